"""One batch without a server: a job manager on a store in memory. Result files are all there is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError, ConfigError
from backfill.engine.client import EngineClient
from backfill.engine.messages import Ready, StepReport
from backfill.generation.timeline import Observer
from backfill.ipc.child import abandon_children
from backfill.jobs.config import JobsConfig
from backfill.jobs.feed import InputChanged
from backfill.jobs.lifecycle import InputMissing
from backfill.jobs.local_files import RunFiles, RunResults
from backfill.jobs.manager import JobManager
from backfill.jobs.open_batch import OpenBatch
from backfill.jobs.progress import RunSpeed
from backfill.jobs.records import BatchRecord, BatchStatus, FileRecord, RequestCounts, TokenUsage
from backfill.jobs.results import ResultLog
from backfill.jobs.threads import ThreadPool
from backfill.models.config import ModelConfig
from backfill.preparation.division import Division
from backfill.preparation.line_file import complement, union
from backfill.preparation.lines import BadLine, LineError
from backfill.preparation.messages import InputLimits, InputReport, LineSelection, PreparationSetup
from backfill.preparation.readers import PreparedLines
from backfill.preparation.resources import resources_of, typical_resources
from backfill.preparation.serving import ServingProcesses
from backfill.preparation.validation import InputCheck
from backfill.protocol.preparer import EngineFacts

_MAX_LINE_BYTES = 32 << 20
_NO_WINDOW_S = 100 * 365 * 24 * 3600
# Docker kills a container 10 s after SIGTERM. What comes after the grace takes a second at most, but for a
# write of results that a disk delays.
_GRACE_S = 8.0


class BadInput(BackfillError):
    """The input file is invalid; no line was run."""

    def __init__(self, path: Path, errors: Sequence[LineError]) -> None:
        lines = [f"{path} is invalid, and no line was run:"]
        for error in errors:
            lines.append(error.message if error.line is None else f"  line {error.line}: {error.message}")
        super().__init__("\n".join(lines))


class _Stopped(Exception):
    """The run was stopped before every line had a result."""


class RunInput:
    """The ``InputReader`` of a run: it knows the file, and which of its lines are the run's.

    Attributes:
        lines: from when they are opened on, as they are if there are any to run; ``is_opened`` is done then.
    """

    def __init__(self, files: RunFiles, processes: ServingProcesses, setup: PreparationSetup) -> None:
        self.lines: PreparedLines | None = None
        self.is_opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._files = files
        self._processes = processes
        self._setup = setup
        self._of_others = b""  # a bit for each line of other parts
        self._threads = ThreadPool("input", 1)

    def close(self) -> None:
        self._threads.close()

    async def check_input(self, path: str, limits: InputLimits) -> InputReport:
        """Check it in this process, before another is started. Raises: OSError."""
        names = " or ".join(self._setup.model.names)
        hint = (
            f"Lines may call this run's {names}, or name no model; --served-model-name gives it other names."
        )
        limits = msgspec.structs.replace(limits, endpoint=None, model_hint=hint)
        division = None
        if self._files.num_shards > 1:
            model = ModelConfig.from_folder(self._setup.model.folder)
            division = Division("blend", typical_resources(model))  # whatever the order: all runs agree
        check = InputCheck(self._files.input, limits, self._setup.line_check, division)
        with contextlib.closing(check):
            while not await self._threads.run(check.advance):
                pass
        report = check.report
        if division is None or report.errors:
            return report
        part = (await self._threads.run(division.parts_of, self._files.num_shards))[self._files.shard]
        self._of_others = complement(part)
        return msgspec.structs.replace(report, total=int.from_bytes(part, "little").bit_count())

    def open_lines(self, selection: LineSelection) -> PreparedLines:
        self.lines = self._processes.preparation.open_lines(
            msgspec.structs.replace(
                selection,
                path=str(self._files.input),
                done=union(selection.done, self._of_others),
                complete_by_s=None,
            )
        )
        if not self.is_opened.done():
            self.is_opened.set_result(None)
        return self.lines


class LocalRun:
    """Runs every line of a file that has no result yet.

    The public attributes may be read at any time.

    Attributes:
        phase: what it does before lines run, as a text for users.
        num_resumed: lines that had a result before this run.
        num_at_stop: lines that had begun when the run was stopped; None where no lines ran then.
        num_dropped: those of them that did not end; the next run runs them again.
        speed: None before lines run.
        duration_s: of the run, once it has ended.
        grace_s: seconds that lines that have begun have to end when the run is stopped.

    Args:
        setup: with ``is_strict``, a line with a field that has no effect is refused.
    """

    def __init__(self, files: RunFiles, *, setup: PreparationSetup, engine_config: EngineConfig) -> None:
        self.phase = "checking the input"
        self.num_resumed = 0
        self.num_at_stop: int | None = None
        self.num_dropped = 0
        self.speed: RunSpeed | None = None
        self.duration_s = 0.0
        self.grace_s = _GRACE_S
        self._files = files
        self._setup = setup
        self._engine_config = engine_config
        client = EngineClient(engine_config, log_level=setup.log_level, on_report=self._on_report)
        self._processes = ServingProcesses(client, setup)
        self._stop_asked = asyncio.Event()
        self._input: RunInput | None = None
        self._manager: JobManager | None = None
        self._job: OpenBatch | None = None

    @property
    def counts(self) -> RequestCounts:
        """None are known while the input is checked."""
        if self._job is None or self._job.batch.status is BatchStatus.VALIDATING:
            return RequestCounts()
        return self._job.counts()

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage() if self._job is None else self._job.log.usage

    @property
    def planned(self) -> tuple[int, int] | None:
        """Lines read and planned so far, of how many; None before the engine is ready, and once all are."""
        lines = None if self._input is None else self._input.lines
        if self.speed is None or lines is None or lines.is_indexed:
            return None
        return lines.num_indexed, self.counts.total - self.num_resumed

    @property
    def order(self) -> str:
        return self._setup.order

    @property
    def is_stopping(self) -> bool:
        return self._stop_asked.is_set()

    @property
    def num_in_flight(self) -> int:
        """Lines that the engine has, or whose results are not durable yet."""
        return 0 if self._manager is None else self._manager.feeder.num_in_flight

    @property
    def num_begun(self) -> int:
        """Lines in flight that have a token, or whose results are not durable yet."""
        return 0 if self._manager is None else self._manager.feeder.num_begun

    def stop(self) -> None:
        """Begin no more lines, and end the run once those that have begun have ended, or after ``grace_s``.

        Finished results are kept; the next run runs the rest.
        """
        self._stop_asked.set()

    def abandon(self) -> None:
        """End its processes and remove their files at once, for a caller that is about to exit."""
        self._processes.client.abandon()
        abandon_children()

    async def run(self) -> bool:
        """Run all lines. Returns: whether every line has a result.

        Raises: BadInput, ConfigError for files that cannot be used, ForeignResults where a result file
        belongs to another input, BackfillError when the engine cannot run.
        """
        started_at_s = time.monotonic()
        disk = ThreadPool("disk", 1)
        stopping = asyncio.create_task(self._stop_asked.wait())
        try:
            with contextlib.suppress(_Stopped), contextlib.ExitStack() as stack:
                log = await disk.run(self._files.open_results, stack)
                self.num_resumed = log.num_completed + log.num_failed
                async with self._managing(log) as manager:
                    await self._drive(manager, stopping)
                if not self._is_whole:
                    raise _Stopped  # result files that are new and empty are removed
        finally:
            stopping.cancel()
            disk.close()
            self.duration_s = time.monotonic() - started_at_s
        return self._is_whole

    @property
    def _is_whole(self) -> bool:
        return self._job is not None and self._job.batch.status is BatchStatus.COMPLETED

    @contextlib.asynccontextmanager
    async def _managing(self, log: ResultLog) -> AsyncIterator[JobManager]:
        """A manager of one batch."""
        self._input = RunInput(self._files, self._processes, self._setup)
        self._manager = manager = JobManager(
            JobsConfig(
                data_dir=self._files.output.parent,  # for prepared lines, which have no name there
                order=self._setup.order,
                batch_max_lines=sys.maxsize,
                batch_max_queued_lines=sys.maxsize,
                max_line_bytes=_MAX_LINE_BYTES,
            ),
            self._input,
            model_names=self._setup.model.names,
            results=RunResults(log, self._files.losses),
        )
        await manager.start()
        self._processes.preparation.start()
        try:
            yield manager
        finally:
            await manager.stop()
            self._input.close()
            await self._processes.preparation.stop()

    async def _drive(self, manager: JobManager, stopping: asyncio.Task[bool]) -> None:
        """Run the batch until it has ended or a stop is asked for. Raises: as ``run``."""
        assert self._input is not None
        self._job = job = await manager.run_batch(*_records(self._files.input))
        assert job.task is not None
        ends: set[asyncio.Future[Any]] = {job.task, self._input.is_opened, stopping}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._input.is_opened.done() and not self.is_stopping:
            await self._run_lines(manager, job, stopping)
        if job.batch.status is BatchStatus.FAILED:
            errors = (await manager.get_batch(job.batch.owner, job.batch.id)).errors
            raise BadInput(self._files.input, [error for error in errors if not error.is_warning])
        if job.error is not None:
            raise self._shown(job.error)
        if job.task.done() and not job.task.cancelled():  # else it was stopped
            job.task.result()

    async def _run_lines(self, manager: JobManager, job: OpenBatch, stopping: asyncio.Task[bool]) -> None:
        """Run an engine until all lines have results, a stop is asked for, or it cannot go on."""
        assert job.task is not None
        self.phase = "loading the model"

        async def on_ready(ready: Ready) -> None:
            await self._on_engine_ready(ready, manager)

        engine = self._processes.start(on_ready=on_ready, on_lost=manager.engine_lost)
        try:
            ends: set[asyncio.Future[Any]] = {job.task, engine, stopping}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                # Not those still in flight at the end: a dead engine's lines are not.
                num_durable = manager.feeder.num_durable
                self.num_at_stop = await manager.drain(self.grace_s)
                if self.counts.unfinished:
                    await manager.pause()
                else:
                    await job.task
                self.num_dropped = self.num_at_stop - (manager.feeder.num_durable - num_durable)
            elif not job.task.done():
                engine.result()
        finally:
            # After a stop nothing is left to save.
            await self._processes.stop_engine(at_once=self.is_stopping)

    async def _on_engine_ready(self, ready: Ready, manager: JobManager) -> None:
        preparer = await self._processes.loaded()
        await self._processes.preparation.files.wait_ready()
        self._processes.configure(preparer, EngineFacts.of(ready, self._engine_config.scheduler))
        if self.speed is None:
            model = ModelConfig.from_folder(self._setup.model.folder)
            self.speed = RunSpeed(
                resources_of(ready.info, ready.profile, model),
                ready.info,
                num_lines=self.counts.unfinished,
                num_at_once=self._engine_config.scheduler.max_num_seqs,
                now_s=time.monotonic(),
            )
        # Tokens are counted by step: a generator's observer learns of a prompt when its request ends.
        service = self._processes.create_service(preparer, Observer())
        manager.engine_ready(service, self._engine_config.scheduler.max_num_seqs)

    def _shown(self, error: Exception) -> Exception:
        """What ended the batch, with the file's path where it is about a file."""
        path = self._files.input
        match error:
            case InputMissing():
                return ConfigError(f"-i {path}: {os.strerror(errno.ENOENT)}.")
            case OSError():
                if error.filename is None:  # a read has none, and results that cannot be written wait
                    error.filename = str(path)
                return self._files.unusable(error)
            case BadLine():
                return ConfigError(f"{path} was changed while it ran: line {error.error.line}: {error}")
            case InputChanged():
                return ConfigError(f"{path}: {error}")
            case _:
                return error

    def _on_report(self, report: StepReport) -> None:
        if self.speed is not None:
            now_s = time.monotonic()
            self.speed.on_report(report, now_s)
            self._processes.preparation.on_report(report, now_s)


def _records(path: Path) -> tuple[FileRecord, BatchRecord]:
    """Of a run's input, and of its batch, which has no window. Results are in the run's own files."""
    now = int(time.time())
    name = os.fsencode(path.name).decode(errors="replace")  # for log lines; a database takes no other text
    file = FileRecord(
        id=name, owner="", num_bytes=0, created_at=now, expires_at=None, filename=name, purpose="batch"
    )
    batch = BatchRecord(
        id=name,
        owner="",
        endpoint="",
        input_file_id=name,
        completion_window="",
        status=BatchStatus.VALIDATING,
        created_at=now,
        expires_at=now + _NO_WINDOW_S,
        output_blob="",
        error_blob="",
        output_retention_s=0,
    )
    return file, batch
