"""One batch without a server: an input file, result files that are also its state, an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError, ConfigError
from backfill.engine.client import EngineClient
from backfill.engine.messages import Ready, StepReport
from backfill.engine.supervisor import EngineSupervisor
from backfill.generation.generator import NoObserver, TextGenerator
from backfill.generation.tokenizer import Tokenizer
from backfill.ipc.child import abandon_children
from backfill.jobs.feed import Feed
from backfill.jobs.feeder import Feeder
from backfill.jobs.lines import LineResult
from backfill.jobs.progress import TimeLeft, TokenRates
from backfill.jobs.records import RequestCounts, TokenUsage
from backfill.jobs.results import ForeignResults, ResultLog
from backfill.jobs.runner import ServiceRunner
from backfill.jobs.suspects import Suspects
from backfill.jobs.threads import ThreadPool
from backfill.preparation.client import PreparationClient
from backfill.preparation.lines import BadLine, LineError
from backfill.preparation.messages import InputLimits, LineSelection, PreparationSetup
from backfill.preparation.validation import InputCheck
from backfill.protocol.preparer import EngineFacts, ServedModel
from backfill.protocol.service import CompletionService

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 32 << 20
_SLICE_BYTES = 1 << 20


class BadInput(BackfillError):
    """The input file cannot be run; no line has."""

    def __init__(self, path: Path, errors: Sequence[LineError]) -> None:
        shown = [_describe(error) for error in errors]
        super().__init__(f"{path} cannot be run, and nothing of it was:\n" + "\n".join(shown))


class LocalRun:
    """Answers every line of a file that has no result yet.

    What it shows of itself may be read at any time.

    Attributes:
        phase: what it does before lines run, for people.
        num_resumed: lines that had a result before this run.
        num_dropped: lines in flight when the run was stopped, which the next one runs again.
        rates, time_left: None before lines run.
        duration_s: of the run, once it has ended.

    Args:
        error_path: where failed lines go; None puts them into the output file too.
        is_strict: a line with a field that has no effect is refused.
    """

    def __init__(
        self,
        input_path: Path,
        output_path: Path,
        error_path: Path | None,
        *,
        model: ServedModel,
        engine_config: EngineConfig,
        chat_template: str | None = None,
        uses_generation_config: bool = True,
        is_strict: bool = False,
        log_level: str = "WARNING",
    ) -> None:
        self.phase = "checking the input"
        self.num_resumed = 0
        self.num_dropped = 0
        self.rates: TokenRates | None = None
        self.time_left: TimeLeft | None = None
        self.duration_s = 0.0
        self._input_path = input_path
        self._result_paths = (output_path, error_path or output_path)
        self._model = model
        self._engine_config = engine_config
        self._preparation = PreparationClient(
            PreparationSetup(
                model=model,
                chat_template=chat_template,
                uses_generation_config=uses_generation_config,
                is_strict=is_strict,
                log_level=log_level,
            )
        )
        self._stop_asked = asyncio.Event()
        self._total = 0
        self._log: ResultLog | None = None
        self._suspects = Suspects()
        self._service: CompletionService | None = None
        self._threads = ThreadPool("disk", 2)
        self._feeder = Feeder(ServiceRunner(lambda: self._service), self._threads)
        self._client = EngineClient(engine_config, log_level=log_level, on_report=self._on_report)

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(self._total) if self._log is None else self._log.counts(self._total)

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage() if self._log is None else self._log.usage

    @property
    def is_stopping(self) -> bool:
        return self._stop_asked.is_set()

    def stop(self) -> None:
        """End the run soon; finished results are kept and the rest is for the next run."""
        self._stop_asked.set()

    def abandon(self) -> None:
        """End its processes and remove their files at once, for a caller that is about to exit."""
        self._client.abandon()
        abandon_children()

    async def run(self) -> bool:
        """Whether every line has a result at the end.

        Raises: BadInput, ConfigError for files that cannot be used, ForeignResults where a result file is
        another input's, BackfillError when the engine cannot run.
        """
        started_at_s = time.monotonic()
        for option, path in (("-i", self._input_path), ("-o", self._result_paths[0])):
            if str(path) == "-":
                raise ConfigError(
                    f"{option} - is no file: a run that is interrupted needs files to go on with."
                )
        try:
            name = await self._check_input()
            with contextlib.ExitStack() as stack:
                if not self._stop_asked.is_set():
                    self.phase = "reading results"
                    await self._threads.run(self._open_results, name, stack)
                    if self._num_unfinished() > 0:
                        self.phase = "loading the model"
                        await self._run_lines()
                    if self._num_unfinished() == 0:
                        await self._threads.run(self._suspects.delete)
        except OSError as error:
            raise ConfigError(f"{self._named(error.filename)}: {error.strerror}.") from error
        finally:
            self._threads.close()
            self.duration_s = time.monotonic() - started_at_s
        return not self._stop_asked.is_set() or (self._log is not None and self._num_unfinished() == 0)

    def _named(self, filename: str | bytes | int | None) -> str:
        """A file of the run with the option that it was given with."""
        options = (
            ("-i", self._input_path),
            ("-o", self._result_paths[0]),
            ("--error-file", self._result_paths[1]),
        )
        named = (f"{option} {path}" for option, path in options if str(path) == str(filename))
        return next(named, str(filename or "A file"))

    async def _check_input(self) -> str:
        """A digest of the input, which names its results. Raises: BadInput, OSError."""
        limits = InputLimits(
            endpoint=None,
            model_names=self._model.names,
            max_lines=sys.maxsize,
            max_line_bytes=_MAX_LINE_BYTES,
            model_hint=(
                f"Lines may call this run's {' or '.join(self._model.names)}, or name no model; "
                "--served-model-name gives it other names."
            ),
        )
        line_check = self._preparation.setup.line_check
        with contextlib.closing(InputCheck(self._input_path, limits, line_check)) as check:
            while not self._stop_asked.is_set() and not await self._threads.run(check.advance):
                pass
        if check.report.errors:
            raise BadInput(self._input_path, check.report.errors)
        if check.report.warning is not None:
            logger.warning("%s: %s", self._input_path, check.report.warning)
        self._total = check.report.total
        return await self._threads.run(_digest, self._input_path)

    def _open_results(self, name: str, stack: contextlib.ExitStack) -> None:
        try:
            self._read_results(name, stack)
        except ForeignResults as error:
            message = f"{error} The file is left as it is; give another -o, or delete it to begin anew."
            raise ForeignResults(message) from None

    def _read_results(self, name: str, stack: contextlib.ExitStack) -> None:
        for path in dict.fromkeys(self._result_paths):
            if path.exists() and path.samefile(self._input_path):
                raise ConfigError(f"{path} is the input file.")
            stack.enter_context(_held(path))
            _check_tail(path, f'{{"id":"batch_req_{name}_'.encode())
        log = ResultLog(name, *self._result_paths)
        log.open()
        self._log = log
        self._suspects = Suspects(_suspects_path(self._result_paths[0]), name)
        self._suspects.load()
        self.num_resumed = log.num_completed + log.num_failed

    async def _run_lines(self) -> None:
        supervisor = EngineSupervisor(
            self._client, on_ready=self._on_engine_ready, on_lost=self._on_engine_lost
        )
        self._preparation.start()
        self._loading = asyncio.create_task(self._load_tokenizer())
        engine = asyncio.create_task(supervisor.run())
        stopping = asyncio.create_task(self._stop_asked.wait())
        try:
            await self._feed(engine, stopping)
        finally:
            for task in (engine, stopping, self._loading):
                task.cancel()
            await asyncio.gather(engine, self._loading, return_exceptions=True)
            await self._client.stop()
            await self._preparation.stop()

    async def _load_tokenizer(self) -> Tokenizer:
        """Of the outputs, once the inputs can be prepared. Raises: BackfillError."""
        tokenizer = await asyncio.to_thread(self._preparation.setup.load_tokenizer)
        await self._preparation.wait_ready()
        return tokenizer

    async def _feed(self, engine: asyncio.Task[None], stopping: asyncio.Task[bool]) -> None:
        """Run lines until all have results, a stop is asked for, or the engine cannot go on."""
        assert self._log is not None
        lines = self._preparation.open_lines(
            LineSelection(path=str(self._input_path), max_line_bytes=_MAX_LINE_BYTES, done=self._log.done)
        )
        feed = Feed(
            self._input_path.name,
            lines,
            self._num_unfinished(),
            self._log,
            _ignore,
            suspects=self._suspects,
        )
        self._feeder.add(feed)
        try:
            ends: set[asyncio.Future[Any]] = {feed.finished, engine, stopping}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A result that waits for the disk is not waited for: a full disk would hold the stop for ever.
            await self._feeder.remove(feed, keep_results=False)
            self.num_dropped = feed.num_held
            lines.close()
        if feed.finished.done():
            try:
                feed.finished.result()
            except BadLine as bad:
                message = f"{self._input_path} was changed while it ran: line {bad.error.line}: {bad}"
                raise ConfigError(message) from None
        elif engine.done():
            engine.result()

    async def _on_engine_ready(self, ready: Ready) -> None:
        tokenizer = await self._loading
        self._preparation.configure(EngineFacts.of(ready, self._engine_config.scheduler))
        # Tokens are counted by step: here a prompt is known when its request ends.
        generator = TextGenerator(self._client, tokenizer, NoObserver())
        self._service = CompletionService(tokenizer, generator)
        num_at_once = self._engine_config.scheduler.max_num_seqs
        if self.rates is None:
            now_s = time.monotonic()
            self.rates = TokenRates(now_s)
            self.time_left = TimeLeft(self._num_unfinished(), num_at_once, now_s)
        self._feeder.set_capacity(2 * num_at_once)

    def _on_report(self, report: StepReport) -> None:
        if self.rates is not None:
            self.rates.on_report(report, time.monotonic())

    def _on_engine_lost(self) -> None:
        self._service = None
        self._feeder.set_capacity(0)

    def _num_unfinished(self) -> int:
        counts = self.counts
        return counts.total - counts.completed - counts.failed


def _suspects_path(output: Path) -> Path:
    """Beside the results: an interrupted run leaves them there for the next."""
    return output.with_name(output.name + ".suspects")


def _describe(error: LineError) -> str:
    return error.message if error.line is None else f"  line {error.line}: {error.message}"


def _ignore(results: Sequence[LineResult]) -> None:
    """Counts are read from the result log."""


def _digest(path: Path) -> str:
    """Of the contents up to the last line that is not blank."""
    digest = hashlib.sha256()
    blank = b""
    with path.open("rb") as file:
        while block := file.read(_SLICE_BYTES):
            content = block.rstrip()
            if content:
                digest.update(blank)
                digest.update(content)
                blank = b""
            blank += block[len(content) :]
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """The file is this process's while the context lasts. Raises: ConfigError when it is another's."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path} is being written by another run-batch.") from None
        yield
    finally:
        os.close(file)


def _check_tail(path: Path, head: bytes) -> None:
    """Raise ForeignResults where what follows the last whole line is no torn result: it would be cut off."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = end
        while start > 0:
            block_start = max(0, start - _SLICE_BYTES)
            file.seek(block_start)
            newline = file.read(start - block_start).rfind(b"\n")
            if newline >= 0:
                start = block_start + newline + 1
                break
            start = block_start
        file.seek(start)
        tail = file.read(len(head))
    # A machine that loses power may leave zeros where data was to come.
    if not (head.startswith(tail) or not tail.strip(b"\0")):
        raise ForeignResults(f"{path.name} holds a line that is no result of a batch.")
