"""One batch without a server: an engine of its own, and result files that are also its state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError, ConfigError
from backfill.engine.client import EngineClient
from backfill.engine.messages import Ready, StepReport
from backfill.generation.timeline import Observer
from backfill.ipc.child import abandon_children
from backfill.jobs.feed import Feed
from backfill.jobs.feeder import Feeder
from backfill.jobs.lines import ServiceRunner
from backfill.jobs.local_files import check_tail, digest_of, locked
from backfill.jobs.progress import TimeLeft, TokenRates, WorkShares
from backfill.jobs.records import RequestCounts, TokenUsage
from backfill.jobs.results import ForeignResults, ResultLog
from backfill.jobs.suspects import LossFile, Suspects
from backfill.jobs.threads import ThreadPool
from backfill.models.config import ModelConfig
from backfill.preparation.division import Division
from backfill.preparation.line_file import complement, union
from backfill.preparation.lines import BadLine, LineError
from backfill.preparation.messages import InputLimits, LineSelection, PreparationSetup
from backfill.preparation.readers import PreparedLines
from backfill.preparation.resources import resources_of, typical_resources
from backfill.preparation.serving import ServingProcesses
from backfill.preparation.validation import InputCheck
from backfill.protocol.preparer import EngineFacts
from backfill.protocol.service import CompletionService

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 32 << 20
_MIN_FREE_BYTES = 1 << 30  # of the disk of the results
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


class LocalRun:
    """Runs every line of a file that has no result yet.

    The public attributes may be read at any time.

    Attributes:
        phase: what it does before lines run, as a text for users.
        num_resumed: lines that had a result before this run.
        num_at_stop: lines that had begun when the run was stopped; None where no lines ran then.
        num_dropped: those of them that did not end; the next run runs them again.
        rates, work, time_left: None before lines run.
        offload_interval: in use at the start; None without offloading, and before the engine is ready.
        least_offload_interval: the smallest in use until now, likewise.
        duration_s: of the run, once it has ended.
        grace_s: seconds that lines that have begun have to end when the run is stopped.

    Args:
        error_path: where failed lines go; None puts them into the output file too.
        setup: with ``is_strict``, a line with a field that has no effect is refused.
        num_shards, shard: run one of so many parts of the file; from 0 on.
    """

    def __init__(
        self,
        input_path: Path,
        output_path: Path,
        error_path: Path | None,
        *,
        setup: PreparationSetup,
        engine_config: EngineConfig,
        num_shards: int = 1,
        shard: int = 0,
    ) -> None:
        self.phase = "checking the input"
        self.num_resumed = 0
        self.num_at_stop: int | None = None
        self.num_dropped = 0
        self.rates: TokenRates | None = None
        self.work: WorkShares | None = None
        self.offload_interval: int | None = None
        self.least_offload_interval: int | None = None
        self.time_left: TimeLeft | None = None
        self.duration_s = 0.0
        self.grace_s = _GRACE_S
        self._input_path = input_path
        self._result_paths = (output_path, error_path or output_path)
        self._setup = setup
        self._engine_config = engine_config
        self._num_shards = num_shards
        self._shard = shard
        self._of_others = b""  # bits of the lines of other shards
        client = EngineClient(engine_config, log_level=setup.log_level, on_report=self._on_report)
        self._processes = ServingProcesses(client, setup)
        self._stop_asked = asyncio.Event()
        self._total = self._num_to_run = 0
        self._lines: PreparedLines | None = None
        self._log: ResultLog | None = None
        self._feed_of_lines: Feed | None = None  # while lines run
        self._suspects = Suspects()
        self._service: CompletionService | None = None
        self._threads = ThreadPool("disk", 2)
        runner = ServiceRunner(lambda: self._service)
        self._feeder = Feeder(runner, self._threads, reports_progress=setup.order == "blend")

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(self._total) if self._log is None else self._log.counts(self._total)

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage() if self._log is None else self._log.usage

    @property
    def planned(self) -> tuple[int, int] | None:
        """Lines read and planned so far, of how many; None before the engine is ready, and once all are."""
        if self.rates is None or self._lines is None or self._lines.is_indexed:
            return None
        return self._lines.num_indexed, self._num_to_run

    @property
    def order(self) -> str:
        return self._setup.order

    @property
    def is_stopping(self) -> bool:
        return self._stop_asked.is_set()

    @property
    def num_in_flight(self) -> int:
        """Lines that the engine has, or whose results are not durable yet."""
        return 0 if self._feed_of_lines is None else self._feed_of_lines.num_in_flight

    @property
    def num_begun(self) -> int:
        """Lines in flight that have a token, or whose results are not durable yet."""
        return 0 if self._feed_of_lines is None else self._feed_of_lines.num_begun

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
        for option, path in (("-i", self._input_path), ("-o", self._result_paths[0])):
            if str(path) == "-":
                raise ConfigError(f"{option} - is no file: an interrupted run resumes from files.")
        try:
            name = await self._check_input()
            with contextlib.ExitStack() as stack:
                if not self._stop_asked.is_set():
                    self.phase = "reading results"
                    await self._threads.run(self._open_results, name, stack)
                    if self.counts.unfinished > 0:
                        await self._prepare_and_run()
                    if self.counts.unfinished == 0:
                        await self._threads.run(self._suspects.delete)
        except OSError as error:
            raise ConfigError(f"{self._named(error.filename)}: {error.strerror}.") from error
        except ForeignResults as error:
            message = f"{error} The file is left as it is; give another -o, or delete it to start over."
            raise ForeignResults(message) from None
        finally:
            self._threads.close()
            self.duration_s = time.monotonic() - started_at_s
        return not self._stop_asked.is_set() or (self._log is not None and self.counts.unfinished == 0)

    def _named(self, filename: str | bytes | int | None) -> str:
        """The option and path of a file of the run."""
        options = (
            ("-i", self._input_path),
            ("-o", self._result_paths[0]),
            ("--error-file", self._result_paths[1]),
        )
        named = (f"{option} {path}" for option, path in options if str(path) == str(filename))
        return next(named, str(filename or "A file"))

    async def _check_input(self) -> str:
        """Check the input. Returns: its digest, which names its results. Raises: BadInput, OSError."""
        limits = InputLimits(
            endpoint=None,
            model_names=self._setup.model.names,
            max_lines=sys.maxsize,
            max_line_bytes=_MAX_LINE_BYTES,
            model_hint=(
                f"Lines may call this run's {' or '.join(self._setup.model.names)}, or name no model; "
                "--served-model-name gives it other names."
            ),
        )
        division = None
        if self._num_shards > 1:
            model = ModelConfig.from_folder(self._setup.model.folder)
            division = Division("blend", typical_resources(model))  # whatever the order: all runs agree
        check = InputCheck(self._input_path, limits, self._setup.line_check, division)
        with contextlib.closing(check):
            while not self._stop_asked.is_set() and not await self._threads.run(check.advance):
                pass
        if check.report.errors:
            raise BadInput(self._input_path, check.report.errors)
        if check.report.warning is not None:
            logger.warning("%s: %s", self._input_path, check.report.warning)
        self._total = check.report.total
        name = await self._threads.run(digest_of, self._input_path)
        if division is None:
            return name
        part = (await self._threads.run(division.parts_of, self._num_shards))[self._shard]
        self._of_others = complement(part)
        self._total = int.from_bytes(part, "little").bit_count()
        return f"{name}-part-{self._shard}-of-{self._num_shards}"

    def _open_results(self, name: str, stack: contextlib.ExitStack) -> None:
        for path in dict.fromkeys(self._result_paths):
            if path.exists() and path.samefile(self._input_path):
                raise ConfigError(f"{path} is the input file.")
            stack.enter_context(locked(path))
            check_tail(path, f'{{"id":"batch_req_{name}_'.encode())
        log = ResultLog(name, *self._result_paths)
        log.open()
        self._log = log
        output = self._result_paths[0]
        self._suspects = Suspects(LossFile(output.with_name(output.name + ".suspects")), name)
        self._suspects.load()
        self.num_resumed = log.num_completed + log.num_failed

    async def _prepare_and_run(self) -> None:
        stopping = asyncio.create_task(self._stop_asked.wait())
        self._processes.preparation.start()
        try:
            await self._run_lines(stopping)
        finally:
            stopping.cancel()
            await self._processes.preparation.stop()

    async def _run_lines(self, stopping: asyncio.Task[bool]) -> None:
        self.phase = "loading the model"
        engine = self._processes.start(on_ready=self._on_engine_ready, on_lost=self._on_engine_lost)
        try:
            await self._feed(engine, stopping)
        finally:
            # After a stop nothing is left to save.
            await self._processes.stop_engine(at_once=self.is_stopping)

    async def _feed(self, engine: asyncio.Task[None], stopping: asyncio.Task[bool]) -> None:
        """Run lines until all have results, a stop is asked for, or the engine cannot go on."""
        assert self._log is not None
        self._num_to_run = self.counts.unfinished
        self._lines = lines = self._processes.preparation.open_lines(
            LineSelection(
                path=str(self._input_path),
                max_line_bytes=_MAX_LINE_BYTES,
                done=union(self._log.done, self._of_others),
                spool_folder=str(self._result_paths[0].parent),
                min_free_bytes=_MIN_FREE_BYTES,
            )
        )
        feed = Feed(
            self._input_path.name,
            lines,
            self._num_to_run,
            self._log,
            lambda results: None,  # counts are read from the result log
            suspects=self._suspects,
        )
        self._feeder.add(feed)
        self._feed_of_lines = feed
        num_durable = 0
        try:
            ends: set[asyncio.Future[Any]] = {feed.finished, engine, stopping}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                num_durable = feed.num_durable
                self.num_at_stop = await self._feeder.drain(feed, self.grace_s)
        finally:
            # Results that are not durable are dropped: a full disk would block the stop.
            await self._feeder.remove(feed, keep_results=False)
            if self.num_at_stop is not None:
                # Not those still in flight: a dead engine's lines are not.
                num_ended = self._log.num_completed + self._log.num_failed - self.num_resumed - num_durable
                self.num_dropped = self.num_at_stop - num_ended
            self._feed_of_lines = None
            lines.close()
            self._lines = None
        if feed.finished.done():
            with self._input_unchanged():
                feed.finished.result()
        elif engine.done():
            engine.result()

    @contextlib.contextmanager
    def _input_unchanged(self) -> Iterator[None]:
        try:
            yield
        except BadLine as bad:
            message = f"{self._input_path} was changed while it ran: line {bad.error.line}: {bad}"
            raise ConfigError(message) from None

    async def _on_engine_ready(self, ready: Ready) -> None:
        self.offload_interval = self.least_offload_interval = ready.info.offload_interval
        preparer = await self._processes.loaded()
        await self._processes.preparation.files.wait_ready()
        self._processes.configure(preparer, EngineFacts.of(ready, self._engine_config.scheduler))
        # Tokens are counted by step: a generator's observer learns of a prompt when its request ends.
        self._service = self._processes.create_service(preparer, Observer())
        if self.rates is None:
            now_s, facts = time.monotonic(), preparer.engine
            resources = resources_of(facts, ModelConfig.from_folder(self._setup.model.folder))
            self.rates = TokenRates(now_s)
            self.work = WorkShares(resources, facts.info.num_blocks * facts.info.block_size, now_s)
            self._estimate()
        if not self.is_stopping:
            self._feeder.set_capacity(2 * self._engine_config.scheduler.max_num_seqs)

    def _estimate(self) -> None:
        """Estimate the time left, once the engine is ready and the number of lines is known."""
        if self.rates is not None:
            num_at_once = self._engine_config.scheduler.max_num_seqs
            self.time_left = TimeLeft(self.counts.unfinished, num_at_once, time.monotonic())

    def _on_report(self, report: StepReport) -> None:
        now_s = time.monotonic()
        if self.least_offload_interval is not None:
            self.least_offload_interval = min(self.least_offload_interval, report.stats.offload_interval)
        if self.rates is not None:
            self.rates.on_report(report, now_s)
        if self.work is not None:
            self.work.on_report(report, now_s)

    def _on_engine_lost(self) -> None:
        self._service = None
        self._feeder.set_capacity(0)
