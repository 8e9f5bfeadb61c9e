"""The preparation process as the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
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
from backfill.protocol.generation import Generation
from backfill.protocol.preparer import EngineFacts, RequestContext, TextEndpoint
from backfill.protocol.requests import GenerationEndpoint

logger = logging.getLogger(__name__)

# Bodies of a class in the process at once; more wait here, where a client that leaves takes its body along.
_MAX_ONLINE_BODIES = 4
_MAX_OFFLINE_BODIES = 1
# Launches that fail in a row before jobs are refused rather than kept waiting.
_MAX_FAILED_LAUNCHES = 3
_FIRST_RESTART_S = 0.1
_LONGEST_RESTART_S = 10.0

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromPreparation] = msgspec.msgpack.Decoder(FromPreparation)

Wanted = TypeVar("Wanted", bound=Result)


class PreparationDied(BackfillError):
    """The process ended over a job, the second time while it had no other."""


class _PendingJob:
    """A job without an answer.

    Attributes:
        is_sent: the process that runs now has it; ``has_begun``: and works on it.
        is_suspect: a process ended while it worked on it, perhaps not the only one.
    """

    __slots__ = ("done", "has_begun", "is_sent", "is_suspect", "job")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done: asyncio.Future[Result | Failure] = asyncio.get_running_loop().create_future()
        self.is_sent = self.has_begun = self.is_suspect = False


class PreparationClient:
    """Starts the process, gives it jobs, and starts it again when it dies: a job that has no answer yet is
    given to the next one. Jobs may come before the process is there. One event loop owns it.

    Which job a process died of is found out: those it worked on are suspects, and are given to the next one
    alone, one after another. One that ends that process too fails; no other job does.

    Attributes:
        num_deaths: processes that ended unasked.

    Args:
        tasks: starts the client's own task.
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
        """Of the running process; None where there is none."""
        return None if self._child is None else self._child.pid

    @property
    def is_up(self) -> bool:
        """A process is there and ready."""
        return self._child is not None

    async def wait_ready(self) -> None:
        """Return once a process has been ready. Raises: BackfillError where the first launch failed."""
        assert self._launched is not None, "called after start"
        self._is_needed.set()
        await asyncio.shield(self._launched)

    def start(self, *, within_s: float = 0.0) -> None:
        """Launch the process after so many seconds, or when the first job comes."""
        self._launched = asyncio.get_running_loop().create_future()
        self._reader = self._tasks.start(self._run(within_s), "preparation")

    async def stop(self) -> None:
        """End the process. Jobs without an answer are cancelled."""
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
        """Tell what the engine takes. Comes before the first body or line to prepare."""
        self._facts = facts
        self._send(Configure(facts))

    async def prepare(
        self,
        endpoint: GenerationEndpoint,
        body: bytes,
        context: RequestContext,
        service_class: ServiceClass = ServiceClass.ONLINE,
    ) -> Generation:
        """A body as a generation. Bodies of the two classes do not wait for each other.

        Raises: RequestError, NotReady while no process can be started, PreparationDied.
        """
        async with self._bodies[service_class]:
            return await self._ask(PrepareBody(endpoint, body, context), Generation)

    async def answer(self, endpoint: TextEndpoint, body: bytes) -> bytes:
        """The JSON answer of ``/tokenize`` or ``/detokenize``. Raises: as ``prepare``."""
        async with self._bodies[ServiceClass.ONLINE]:
            return await self._ask(AnswerBody(endpoint, body), bytes)

    async def check_input(self, path: str, limits: InputLimits) -> InputReport:
        """What is in a file. Cancelled, it stops reading. Raises: OSError, PreparationDied."""
        return await self._ask(CheckInput(path, limits), InputReport)

    def open_lines(self, selection: LineSelection, position: Position = START) -> PreparedLines:
        """A file's lines from a position on, ready to run. Close it after use."""
        reader_id = next(self._ids)
        lines = self._lines[reader_id] = PreparedLines(self, reader_id, selection, position)
        self._send(OpenLines(reader_id, selection, lines.position))
        return lines

    async def read_lines(self, reader_id: int, max_lines: int) -> LinesRead:
        """For PreparedLines. Raises: BadLine, OSError, PreparationDied."""
        return await self._ask(ReadLines(reader_id, max_lines), LinesRead)

    def move(self, reader_id: int, lines: PreparedLines) -> None:
        """For PreparedLines: go on at its position."""
        self._send(OpenLines(reader_id, lines.selection, lines.position))

    def close_lines(self, reader_id: int) -> None:
        """For PreparedLines."""
        del self._lines[reader_id]
        self._send(CloseLines(reader_id))

    async def _ask(self, work: Work, kind: type[Wanted]) -> Wanted:
        if self._num_failed_launches >= _MAX_FAILED_LAUNCHES:
            raise NotReady("The server cannot prepare requests at the moment. Please retry.")
        job = Job(next(self._ids), work)
        pending = self._jobs[job.job_id] = _PendingJob(job)
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
            self._send_jobs()  # it may have been the one that had to be alone
        if isinstance(result, Failure):
            raise exception_of(result)
        assert isinstance(result, kind)
        return result

    def _send_jobs(self) -> None:
        """Give the process what it may have: everything, or one suspect at a time."""
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
        """To the process, if there is one: the next is told anew."""
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
        """Keep a process running and hand out its answers, until cancelled."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_needed.wait(), within_s)
        while True:
            await self._launch_at_last()
            child = self._child
            assert child is not None
            try:
                while (data := await child.receive()) is not None:
                    self._take(_decoder.decode(data))
            except Exception:
                logger.exception("the preparation process is not understood, and is ended")
            self._child = None
            await child.close()
            self.num_deaths += 1
            logger.error("the preparation process %s; it is started again", child.how_it_ended())
            self._find_suspects()

    def _take(self, message: FromPreparation) -> None:
        assert not isinstance(message, Loaded)
        pending = self._jobs.get(message.job_id)
        if pending is None or pending.done.done():  # nobody waits for it any more
            return
        if isinstance(message, JobBegun):
            pending.has_begun = True
        else:
            pending.done.set_result(message.result)

    def _find_suspects(self) -> None:
        """After a death: those the process worked on may be the reason; one that was alone is."""
        begun = [each for each in self._jobs.values() if each.has_begun and not each.done.done()]
        for pending in begun:
            if pending.is_suspect:
                message = "The server could not prepare the request: the process that did ended over it."
                pending.done.set_exception(PreparationDied(message))
            pending.is_suspect = True

    async def _launch_at_last(self) -> None:
        """Launch a process, and again until one is ready."""
        delay_s = _FIRST_RESTART_S
        while True:
            try:
                await self._launch()
            except Exception as error:  # such as memory that is short: it may pass
                self._note_failed_launch(error)
                logger.error("no preparation process can be started (%s); again in %g s", error, delay_s)
            else:
                self._num_failed_launches = 0
                if self._launched is not None and not self._launched.done():
                    self._launched.set_result(None)
                return
            await asyncio.sleep(delay_s)
            delay_s = min(_LONGEST_RESTART_S, 2 * delay_s)

    def _note_failed_launch(self, error: Exception) -> None:
        """Whoever waits for the first launch is told; after several, so is everybody who has a job."""
        self._num_failed_launches += 1
        if self._launched is not None and not self._launched.done():
            self._launched.set_exception(
                error if isinstance(error, BackfillError) else BackfillError(str(error))
            )
            self._launched.exception()  # nobody need wait for it
        if self._num_failed_launches >= _MAX_FAILED_LAUNCHES:
            for pending in self._jobs.values():
                if not pending.done.done():
                    pending.done.set_exception(
                        NotReady("The server cannot prepare requests at the moment. Please retry.")
                    )


class PreparedLines:
    """A file's lines in their order, read as they are asked for. One reader at a time.

    A line over which the process ends is given as one that cannot be prepared.
    """

    def __init__(
        self, client: PreparationClient, reader_id: int, selection: LineSelection, position: Position = START
    ) -> None:
        self.selection = selection
        self.position = position
        self._client = client
        self._id = reader_id
        self._num_single = 0  # lines to read one by one, since one of them ended the process

    async def read(self, max_lines: int) -> Sequence[BatchLine]:
        """The next lines, at least one unless the file has no more. Raises: BadLine, OSError."""
        if self._num_single > 0:
            max_lines = 1
        try:
            group = await self._client.read_lines(self._id, max_lines)
            lines, self.position = group.lines, group.position
        except PreparationDied:
            if max_lines > 1:
                self._num_single = max_lines
                return await self.read(1)
            lines = await self._read_name()
        self._num_single = max(0, self._num_single - 1)
        return lines

    def close(self) -> None:
        self._client.close_lines(self._id)

    async def _read_name(self) -> list[BatchLine]:
        """The next line with its name alone."""
        names = self._client.open_lines(
            msgspec.structs.replace(self.selection, names_only=True), self.position
        )
        try:
            lines = list(await names.read(1))
        finally:
            names.close()
        self.position = names.position
        self._client.move(self._id, self)
        return lines
