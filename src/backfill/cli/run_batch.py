"""``backfill run-batch``: a file of requests answered without a server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from backfill.cli.command import LIMITS_SECTION, MODEL_SECTION, VARIABLES, command
from backfill.cli.interrupts import LOADING, SIGNALS, interruptible, take_from_loop
from backfill.cli.live import alongside
from backfill.cli.startup import configure_logging, find_folder, run_in_loop, served_model
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.options import bounded, check_types
from backfill.engine.options import ModelOptions, check_engine
from backfill.jobs.config import OrderOptions
from backfill.protocol.options import RequestOptions, read_template

if TYPE_CHECKING:
    from backfill.jobs.local_run import LocalRun

_DRAW_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 30.0
_BAR_COLUMNS = 34  # without the description, where there is a bar and counts have six digits
_BAR_WIDTH = 80  # of a terminal that has room for a bar beside the figures
_EXIT_FAILED_LINES = 3
_MOST_REASONS, _MOST_NUMBERS, _MOST_REASON_CHARS = 5, 5, 120  # shown of lines that failed
_PLANNING = "reading and planning lines"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatchOptions(OrderOptions):
    """Files of one run, and which of their lines it runs.

    Attributes:
        input_file: JSONL of requests, one per line, as in the Batch API.
        output_file: where results go. An output file of an earlier run is continued.
        error_file: where failed lines go. Default: into the output file.
        json: print the summary as one JSON object, the last line of output.
        shards: split the lines into so many parts of equal work. Each part is a run of its own with its own
            output file, on another machine or device.
        shard: which part this run has, from 0 on. To be given with `shards`.
    """

    input_file: Path
    output_file: Path
    error_file: Path | None = None
    json: bool = False
    shards: int = bounded(1, least=1)
    shard: int | None = None

    def validate(self) -> None:
        """Raises: ConfigError for the first field out of range."""
        check_types(self)
        if self.shard is None:
            if self.shards > 1:
                raise ConfigError(f"is needed with `shards`: from 0 to {self.shards - 1}.", field="shard")
        elif self.shards == 1:
            raise ConfigError("is needed with `shard`: the number of parts.", field="shards")
        elif not 0 <= self.shard < self.shards:
            raise ConfigError(
                f"must be from 0 to {self.shards - 1}, one less than `shards`, got {self.shard}.",
                field="shard",
            )


def run_batch(
    files: RunBatchOptions,
    model: ModelOptions,
    engine: EngineConfig,
    requests: RequestOptions = RequestOptions(log_level="WARNING"),  # noqa: B008  # frozen
) -> None:
    """Answer every line of a file without a server. The same command continues an interrupted run.

    A signal lets lines that have begun end, for 8 s; a second one ends the run at once.

    Exit status: 0 every line is answered; 1 it cannot run, or not to the end, or a second signal ended it
    at once; 3 every line has a result, some of them errors; 130 or 143 interrupted by SIGINT or SIGTERM.
    """
    console = Console(stderr=True)
    configure_logging(requests.log_level, "run-batch")
    engine = engine.for_offline_work()
    template = read_template(requests.chat_template)
    from backfill.jobs.local_files import RunFiles
    from backfill.jobs.local_run import LocalRun
    from backfill.preparation.messages import PreparationSetup

    with interruptible(LOADING):
        folder = find_folder(model)
        engine = dataclasses.replace(engine, model_dir=str(folder))
        check_engine(engine)
        served = served_model(model.model, folder, requests.served_model_name)
    run = LocalRun(
        RunFiles(
            input=files.input_file,
            output=files.output_file,
            errors=files.error_file or files.output_file,
            num_shards=files.shards,
            shard=files.shard or 0,
        ),
        setup=PreparationSetup(
            model=served,
            chat_template=template,
            tool_call_parser=requests.tool_call_parser,
            reasoning_parser=requests.reasoning_parser,
            uses_generation_config=requests.uses_generation_config,
            is_strict=requests.strict,
            log_level=requests.log_level.upper(),
            order=files.order,
        ),
        engine_config=engine,
    )
    stopped_by = run_in_loop(_run(run, console))
    part = f", part {files.shard} of {files.shards}" if files.shards > 1 else ""
    _print_summary(run, console, part, is_whole=stopped_by is None, as_json=files.json)
    if run.counts.failed:
        _print_failures(files.error_file or files.output_file, console)
    if stopped_by is not None:
        raise SystemExit(128 + stopped_by)
    if run.counts.failed:
        raise SystemExit(_EXIT_FAILED_LINES)


app = command(
    run_batch,
    {
        "Files": "input_file output_file error_file json shards shard",
        "Model": MODEL_SECTION,
        "Engine": "device tensor_parallel_size pipeline_parallel_size executor threads num_micro_batches "
        "gpu_memory_utilization device_memory offload_interval "
        "min_offload_interval offload_bus offload_bus_gib_per_s engine_hang_timeout",
        "Scheduling": f"order {LIMITS_SECTION}",
        "KV memory": "kv_gib kv_dtype block_size host_kv_gib prefix_caching",
        "Requests": "strict log_level",
    },
    spellings={"input_file": "-i", "output_file": "-o", "prefix_caching": "--enable-prefix-caching"},
    variables=VARIABLES,
)


async def _run(run: LocalRun, console: Console) -> signal.Signals | None:
    """The signal that stopped the run before every line had a result."""
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        if received:
            run.abandon()
            console.show_cursor(True)  # a bar hides it
            os._exit(1)
        received.append(number)
        run.stop()
        if run.num_begun:
            console.print(
                f"stopping: {run.num_begun} lines that have begun have {run.grace_s:g} s to end; "
                "another signal stops at once",
                highlight=False,
                soft_wrap=True,
            )

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with _LiveProgress(run, console).drawn():
            is_whole = await run.run()
    finally:
        take_from_loop(loop)
    if not is_whole:
        return received[0]
    for number in SIGNALS:  # nothing is left to stop but the summary
        signal.signal(number, signal.SIG_IGN)
    return None


def _print_summary(run: LocalRun, console: Console, part: str, *, is_whole: bool, as_json: bool) -> None:
    counts, usage = run.counts, run.usage
    num_ended = counts.completed + counts.failed
    intervals: tuple[int | None, int | None] = None, None
    if run.speed is not None:
        intervals = run.speed.offload_interval, run.speed.least_offload_interval
    if not is_whole and run.speed is None:
        lines = [f"backfill: {LOADING}"]
    else:
        resumed = f" ({run.num_resumed} of them in an earlier run)" if run.num_resumed else ""
        lines = [
            f"{num_ended} of {counts.total} lines{part}: {counts.completed} completed, {counts.failed} failed"
            f"{resumed}; {usage.input_tokens} tokens in, {usage.output_tokens} out"
        ]
        if intervals[0] is not None:
            lines.append(_intervals_used(intervals[0], intervals[1]))
        if not is_whole:
            if run.num_dropped:
                ended = f"what was computed of {run.num_dropped} lines is dropped"
            else:
                ended = "all lines that had begun have ended" if run.num_at_stop else "no line had begun"
            lines.append(f"Interrupted: {ended}. The same command goes on from here.")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if as_json:
        summary = {
            **dataclasses.asdict(counts),
            "resumed": run.num_resumed,
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "duration_s": round(run.duration_s, 3),
            "offload_interval": intervals[0],
            "least_offload_interval": intervals[1],
        }
        print(json.dumps(summary))


def _print_failures(path: Path, console: Console) -> None:
    """Which lines failed and why, as far as a screen has room."""
    from backfill.jobs.results import failures_in

    failures = failures_in(path)
    for reason, numbers in list(failures.items())[:_MOST_REASONS]:
        shown = ", ".join(map(str, sorted(numbers)[:_MOST_NUMBERS]))
        more = ", ..." if len(numbers) > _MOST_NUMBERS else ""
        lines = "line" if len(numbers) == 1 else "lines"
        text = f"  {len(numbers)} failed with {reason[:_MOST_REASON_CHARS]}: {lines} {shown}{more}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    others = f"  {len(failures) - _MOST_REASONS} other reasons; " if len(failures) > _MOST_REASONS else "  "
    text = f"{others}all errors are in {path}; a line whose error is deleted there runs again"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _intervals_used(largest: int, least: int | None) -> str:
    if least in (None, largest):
        return f"Offload interval {largest} was used."
    return f"Offload intervals {least} to {largest} were used."


class _LiveProgress:
    """Shows the progress of a run: a bar on a terminal, else a line every half minute."""

    def __init__(self, run: LocalRun, console: Console, *, line_interval_s: float = _LINE_INTERVAL_S) -> None:
        self._run = run
        self._console = console
        self._line_interval_s = line_interval_s
        bar = (BarColumn(bar_width=12),) if console.width >= _BAR_WIDTH else ()
        title = TextColumn("{task.fields[title]}")
        columns = title, *bar, MofNCompleteColumn(), TextColumn("{task.description}")
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._plan = self._progress.add_task(_PLANNING, title="plan ", visible=False)
        self._task = self._progress.add_task("", total=None, title="lines")

    @asynccontextmanager
    async def drawn(self) -> AsyncIterator[None]:
        """Draw while the block runs."""
        try:
            async with alongside(self._draw()):
                yield
        finally:
            if self._console.is_terminal:
                self.show(time.monotonic())
                self._progress.stop()

    async def _draw(self) -> None:
        if self._console.is_terminal:
            self._progress.start()
        printed_at_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            counts, speed = self._run.counts, self._run.speed
            if speed is not None:
                speed.time_left.update(counts.completed + counts.failed - self._run.num_resumed, now_s)
            if self._console.is_terminal:
                self.show(now_s)
            elif now_s - printed_at_s >= self._line_interval_s:
                printed_at_s = now_s
                self._print_line(now_s)
            await asyncio.sleep(_DRAW_INTERVAL_S)

    def show(self, now_s: float) -> None:
        """Draw the bar, and above it that of the plan while lines are read."""
        counts, planned = self._run.counts, self._run.planned
        if planned is not None:
            num_planned, num_to_run = planned
            self._progress.update(self._plan, completed=num_planned, total=num_to_run)
        self._progress.update(self._plan, visible=planned is not None)
        self._progress.update(
            self._task,
            total=counts.total,
            completed=counts.completed + counts.failed,
            description=describe(self._run, now_s, self._console.width - _BAR_COLUMNS),
        )
        self._progress.refresh()

    def _print_line(self, now_s: float) -> None:
        counts = self._run.counts
        num_ended = counts.completed + counts.failed
        text = f"{num_ended} of {counts.total} lines; {describe(self._run, now_s)}"
        if self._run.planned is not None:
            num_planned, num_to_run = self._run.planned
            text += f"; {_PLANNING}: {num_planned} of {num_to_run}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(run: LocalRun, now_s: float, num_columns: int | None = None) -> str:
    """What the run does. While lines run: tokens per second in the last half minute, and the time left.

    Then, as far as there are columns for it: prompt tokens found in the prefix cache, what the device's work
    in the last half minute was bound by, the order of lines, and the interval of offloaded layers.
    """
    if run.is_stopping:
        return f"stopping: {run.num_in_flight} lines in flight" if run.num_in_flight else "stopping"
    speed = run.speed
    is_done = run.counts.total > 0 and not run.counts.unfinished
    if speed is None:
        return "done" if is_done else run.phase
    parts = []
    prompts, outputs = speed.rates.prompts.per_s(now_s), speed.rates.outputs.per_s(now_s)
    if prompts is not None and outputs is not None:
        parts.append(f"tok/s: {prompts:,.0f} in, {outputs:,.0f} out")
    if not is_done and (left_s := speed.time_left.seconds(now_s)) is not None:
        parts.append(f"{_clock(left_s)} left")
    if run.counts.failed:
        parts.append(f"{run.counts.failed} failed")
    extras = []
    if (hit_share := speed.rates.hit_share) is not None:
        extras.append(f"{hit_share:.0%} prefix hits")
    if (compute_share := speed.work.compute_share(now_s)) is not None:
        extras.append(f"{compute_share:.0%} compute, {1 - compute_share:.0%} memory")
    extras.append(f"order {run.order}")
    if speed.offload_interval is not None:
        extras.append(f"offload interval {speed.offload_interval}")
    for extra in extras if parts else ():
        if num_columns is None or len("; ".join((*parts, extra))) <= num_columns:
            parts.append(extra)
    return "; ".join(parts) or ("done" if is_done else "running")


def _clock(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest_s:02d}"
