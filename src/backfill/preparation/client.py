"""The server's client of the preparation process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass

import msgspec

from backfill.core.errors import BackfillError, NotReady
from backfill.core.request import ServiceClass
from backfill.engine.tasks import TaskWatch
from backfill.ipc.child import ChildProcess
from backfill.preparation.messages import (
    AnswerBody,
    CancelCheck,
    CheckInput,
    Configure,
    Failure,
    FromPreparation,
    InputLimits,
    InputReport,
    Job,
    JobBegun,
    JobDone,
    LineSelection,
    LinesTaken,
    Loaded,
    OnlineTraffic,
    PreparationSetup,
    PrepareBody,
    Result,
    SplitLines,
    ToPreparation,
    Work,
    exception_of,
)
from backfill.preparation.process import run_preparation_process
from backfill.preparation.readers import LineNames, LineReaders, PreparationDied, PreparedLines, Wanted
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import EngineFacts, RequestContext, TextEndpoint

logger = logging.getLogger(__name__)

# Bodies of a class in the process at once. More wait here, where a client that disconnects frees its body.
_MAX_ONLINE_BODIES = 4
_MAX_OFFLINE_BODIES = 1
# Failed launches in a row after which jobs are refused instead of kept waiting.
_MAX_FAILED_LAUNCHES = 3
_FIRST_RESTART_S = 0.1
_LONGEST_RESTART_S = 10.0
_NOT_READY = "The server cannot prepare requests at the moment. Please retry."

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromPreparation] = msgspec.msgpack.Decoder(FromPreparation)


@dataclass(slots=True)
class _PendingJob:
    """A job without a result."""

    job: Job
    done: asyncio.Future[Result | Failure]
    is_sent: bool = False  # the current process has it
    has_begun: bool = False  # the current process works on it
    is_suspect: bool = False  # a process ended while it worked on this job, and perhaps on others


class PreparationClient:
    """Starts the process, sends it jobs, and restarts it when it dies. One event loop owns the client.

    Jobs may be submitted before the process is up. When the process dies, the next one gets the jobs that
    have no result. The jobs that it worked on are suspects: the next process gets them one at a time, and a
    suspect that ends this process too fails. No other job fails.

    Attributes:
        num_deaths: processes that ended by themselves.
    """

    def __init__(self, setup: PreparationSetup, tasks: TaskWatch | None = None) -> None:
        self.setup = setup
        self._tasks = tasks or TaskWatch()
        self._child: ChildProcess | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ids = itertools.count()
        self._jobs: dict[int, _PendingJob] = {}
        self._readers = LineReaders(self._ask, self._send)
        self._indexing: asyncio.Task[None] | None = None
        self._facts: EngineFacts | None = None
        self._bodies = {
            ServiceClass.ONLINE: asyncio.Semaphore(_MAX_ONLINE_BODIES),
            ServiceClass.OFFLINE: asyncio.Semaphore(_MAX_OFFLINE_BODIES),
        }
        self._is_needed = asyncio.Event()
        self._launched: asyncio.Future[None] | None = None
        self._num_failed_launches = 0
        self.num_deaths = 0

    @property
    def pid(self) -> int | None:
        """Of the running process; None if there is none."""
        return None if self._child is None else self._child.pid

    @property
    def is_up(self) -> bool:
        """A process is ready."""
        return self._child is not None

    async def wait_ready(self) -> None:
        """Return once a process has been ready. Raises: BackfillError if the first launch failed."""
        assert self._launched is not None, "called after start"
        self._is_needed.set()
        await asyncio.shield(self._launched)

    def start(self, *, within_s: float = 0.0) -> None:
        """Launch the process after ``within_s`` seconds, or at the first job."""
        self._launched = asyncio.get_running_loop().create_future()
        self._reader = self._tasks.start(self._run(within_s), "preparation")
        self._indexing = self._tasks.start(self._readers.run(), "preparation-indexing")

    async def stop(self) -> None:
        """End the process and cancel the jobs that have no result."""
        tasks = [task for task in (self._reader, self._indexing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pending in self._jobs.values():
            pending.done.cancel()
        self._jobs.clear()
        if self._child is not None:
            child, self._child = self._child, None
            await child.close()

    def configure(self, facts: EngineFacts) -> None:
        """Send the engine's limits. Called before the first body or line is prepared."""
        self._facts = facts
        self._send(Configure(facts))
        self._readers.allow()

    def note_online(self, traffic: OnlineTraffic) -> None:
        """Tell the process what online requests take of the engine; nothing where there is no process."""
        self._send(traffic)

    async def prepare(
        self,
        endpoint: GenerationEndpoint,
        body: bytes,
        context: RequestContext,
        service_class: ServiceClass = ServiceClass.ONLINE,
    ) -> Generation:
        """Prepare a body. Bodies of the two classes do not wait for each other.

        Raises: RequestError; NotReady while no process can be started; PreparationDied.
        """
        async with self._bodies[service_class]:
            return await self._ask(PrepareBody(endpoint, body, context), Generation)

    async def answer(self, endpoint: TextEndpoint, body: bytes) -> bytes:
        """The JSON answer of ``/tokenize`` or ``/detokenize``. Raises: as ``prepare``."""
        async with self._bodies[ServiceClass.ONLINE]:
            return await self._ask(AnswerBody(endpoint, body), bytes)

    async def check_input(self, path: str, limits: InputLimits) -> InputReport:
        """Check an input file. Cancelling stops the reading. Raises: OSError, PreparationDied."""
        return await self._ask(CheckInput(path, limits), InputReport)

    async def split_lines(self, wanted: SplitLines) -> bytes:
        """The bits of the lines that are not a shard's. Cancelling stops the reading.

        Raises: BadLine, OSError, PreparationDied; RequestError for a file with too many lines.
        """
        return await self._ask(wanted, bytes)

    def open_lines(self, selection: LineSelection) -> PreparedLines:
        """The lines of a file, prepared, in the order of ``setup``. Close it after use."""
        return self._readers.open(selection)

    def open_names(self, selection: LineSelection) -> LineNames:
        """The lines of a file without their bodies, in its order."""
        return LineNames(self._ask, selection)

    async def _ask(self, work: Work, kind: type[Wanted]) -> Wanted:
        if self._num_failed_launches >= _MAX_FAILED_LAUNCHES:
            raise NotReady(_NOT_READY)
        job = Job(next(self._ids), work)
        pending = _PendingJob(job, asyncio.get_running_loop().create_future())
        self._jobs[job.job_id] = pending
        self._is_needed.set()
        self._send_jobs()
        try:
            result = await pending.done
        except asyncio.CancelledError:
            if isinstance(work, CheckInput | SplitLines):
                self._send(CancelCheck(job.job_id))
            if pending.done.done() and not pending.done.cancelled():
                self._drop(pending.done.result())
            raise
        finally:
            self._jobs.pop(job.job_id, None)
            self._send_jobs()  # others may have waited for this one, if it was a suspect
        if isinstance(result, Failure):
            raise exception_of(result)
        assert isinstance(result, kind)
        return result

    def _drop(self, result: Result | Failure) -> None:
        """A result came for a caller that was cancelled."""
        if isinstance(result, LinesTaken):
            self._readers.put_back(result)

    def _send_jobs(self) -> None:
        """Send the process all jobs, or one suspect at a time."""
        if self._child is None:
            return
        waiting = [each for each in self._jobs.values() if not each.done.done()]
        suspect = next((each for each in waiting if each.is_suspect), None)
        if suspect is not None:
            waiting = [] if any(each.is_sent for each in waiting) else [suspect]
        for each in waiting:
            if not each.is_sent:
                each.is_sent = True
                self._send(each.job)

    def _send(self, message: ToPreparation) -> None:
        """Send to the process if there is one. ``_launch`` sends the next one all it needs."""
        if self._child is not None:
            self._child.send(_encoder.encode(message))

    async def _launch(self) -> None:
        child = ChildProcess("backfill-preparation", run_preparation_process, (self.setup,))
        try:
            child.start()
            first = await child.receive()
            loaded = Loaded("The preparation process ended.") if first is None else _decoder.decode(first)
            assert isinstance(loaded, Loaded)
            if loaded.error is not None:
                raise BackfillError(loaded.error)
        except BaseException:
            await child.close()
            raise
        self._child = child
        if self._facts is not None:
            self._send(Configure(self._facts))
        self._readers.restart()
        for pending in self._jobs.values():
            pending.is_sent = pending.has_begun = False
        self._send_jobs()

    async def _run(self, within_s: float) -> None:
        """Keep a process running and dispatch its messages, until cancelled."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_needed.wait(), within_s)
        while True:
            await self._launch_until_ready()
            child = self._child
            assert child is not None
            try:
                while (data := await child.receive()) is not None:
                    self._take(_decoder.decode(data))
            except Exception:
                logger.exception("a message of the preparation process cannot be read; the process is ended")
            self._child = None
            await child.close()
            self.num_deaths += 1
            logger.error("the preparation process %s; it is restarted", child.how_it_ended())
            self._find_suspects()

    def _take(self, message: FromPreparation) -> None:
        assert not isinstance(message, Loaded)
        pending = self._jobs.get(message.job_id)
        if pending is None or pending.done.done():  # its caller was cancelled
            if isinstance(message, JobDone):
                self._drop(message.result)
            return
        if isinstance(message, JobBegun):
            pending.has_begun = True
        else:
            pending.done.set_result(message.result)

    def _find_suspects(self) -> None:
        """After a death: suspect the jobs that the process worked on; one that was alone is to blame."""
        begun = [each for each in self._jobs.values() if each.has_begun and not each.done.done()]
        for pending in begun:
            if pending.is_suspect:
                message = "The server could not prepare the request: the process ended while preparing it."
                pending.done.set_exception(PreparationDied(message))
            pending.is_suspect = True

    async def _launch_until_ready(self) -> None:
        """Launch processes until one is ready."""
        delay_s = _FIRST_RESTART_S
        while True:
            try:
                await self._launch()
            except Exception as error:  # may pass, such as a lack of memory
                self._note_failed_launch(error)
                logger.error(
                    "the preparation process cannot be started (%s); next try in %g s", error, delay_s
                )
            else:
                self._num_failed_launches = 0
                if self._launched is not None and not self._launched.done():
                    self._launched.set_result(None)
                return
            await asyncio.sleep(delay_s)
            delay_s = min(_LONGEST_RESTART_S, 2 * delay_s)

    def _note_failed_launch(self, error: Exception) -> None:
        """Fail the wait for the first launch; after several failed launches, fail all jobs."""
        self._num_failed_launches += 1
        if self._launched is not None and not self._launched.done():
            self._launched.set_exception(
                error if isinstance(error, BackfillError) else BackfillError(str(error))
            )
            self._launched.exception()  # else asyncio warns if nobody waits for it
        if self._num_failed_launches >= _MAX_FAILED_LAUNCHES:
            for pending in self._jobs.values():
                if not pending.done.done():
                    pending.done.set_exception(NotReady(_NOT_READY))
