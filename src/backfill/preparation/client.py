"""The server's client of the preparation process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from backfill.core.errors import BackfillError, NotReady
from backfill.core.request import ServiceClass
from backfill.engine.tasks import TaskWatch
from backfill.ipc.child import ChildProcess
from backfill.preparation.lines import BatchLine
from backfill.preparation.messages import (
    START,
    AnswerBody,
    CancelCheck,
    CheckInput,
    CloseLines,
    Configure,
    Failure,
    FromPreparation,
    InputLimits,
    InputReport,
    Job,
    JobBegun,
    LineSelection,
    LinesRead,
    Loaded,
    OpenLines,
    Position,
    PreparationSetup,
    PrepareBody,
    ReadLines,
    Result,
    ToPreparation,
    Work,
    exception_of,
)
from backfill.preparation.process import run_preparation_process
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

Wanted = TypeVar("Wanted", bound=Result)


class PreparationDied(BackfillError):
    """The process ended twice while it worked on a job, the second time on this job alone."""


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
        self._lines: dict[int, PreparedLines] = {}
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

    async def stop(self) -> None:
        """End the process and cancel the jobs that have no result."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
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

    def open_lines(self, selection: LineSelection, position: Position = START) -> PreparedLines:
        """The lines of a file from a position on, prepared. Close it after use."""
        reader_id = next(self._ids)
        lines = self._lines[reader_id] = PreparedLines(self, reader_id, selection, position)
        self.move(reader_id, lines)
        return lines

    async def read_lines(self, reader_id: int, max_lines: int) -> LinesRead:
        """For PreparedLines. Raises: BadLine, OSError, PreparationDied."""
        return await self._ask(ReadLines(reader_id, max_lines), LinesRead)

    def move(self, reader_id: int, lines: PreparedLines) -> None:
        """For PreparedLines: continue at its position."""
        self._send(OpenLines(reader_id, lines.selection, lines.position))

    def close_lines(self, reader_id: int) -> None:
        """For PreparedLines."""
        del self._lines[reader_id]
        self._send(CloseLines(reader_id))

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
            if isinstance(work, CheckInput):
                self._send(CancelCheck(job.job_id))
            raise
        finally:
            self._jobs.pop(job.job_id, None)
            self._send_jobs()  # others may have waited for this one, if it was a suspect
        if isinstance(result, Failure):
            raise exception_of(result)
        assert isinstance(result, kind)
        return result

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
        for reader_id, lines in self._lines.items():
            self.move(reader_id, lines)
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


@dataclass(slots=True, eq=False)
class PreparedLines:
    """The lines of a file, in order, read on demand. One reader at a time.

    A line that ends the process is returned as one that cannot be prepared.
    """

    client: PreparationClient
    reader_id: int
    selection: LineSelection
    position: Position = START
    _num_single: int = 0  # lines to read one by one, as one of them ended the process

    async def read(self, max_lines: int) -> Sequence[BatchLine]:
        """The next lines, at least one unless the file has no more. Raises: BadLine, OSError."""
        if self._num_single > 0:
            max_lines = 1
        try:
            group = await self.client.read_lines(self.reader_id, max_lines)
            lines, self.position = group.lines, group.position
        except PreparationDied:
            if max_lines > 1:
                self._num_single = max_lines
                return await self.read(1)
            lines = await self._read_name()
        self._num_single = max(0, self._num_single - 1)
        return lines

    def close(self) -> None:
        self.client.close_lines(self.reader_id)

    async def _read_name(self) -> list[BatchLine]:
        """The next line, without its body."""
        names = self.client.open_lines(
            msgspec.structs.replace(self.selection, names_only=True), self.position
        )
        try:
            lines = list(await names.read(1))
        finally:
            names.close()
        self.position = names.position
        self.client.move(self.reader_id, self)
        return lines
