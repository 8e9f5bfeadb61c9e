"""``backfill run-batch``: a file of requests answered without a server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backfill.cli import engine_options as engine
from backfill.cli.engine_options import ENGINE_DEFAULTS, LIMITS
from backfill.core.errors import BackfillError
from backfill.engine.options import EngineOptions, uses_generation_config
from backfill.generation.chat_template import read_template

if TYPE_CHECKING:
    from backfill.jobs.local_run import LocalRun

_DRAW_INTERVAL_S = 0.5
_EXIT_FAILED_LINES = 3
_EXIT_INTERRUPTED = 130


def run_batch(
    input_file: Annotated[
        Path, typer.Option("--input-file", "-i", help="JSONL of requests, one a line, as the Batch API's.")
    ],
    output_file: Annotated[
        Path, typer.Option("--output-file", "-o", help="Where results go; one that is begun is gone on with.")
    ],
    error_file: Annotated[
        Path | None, typer.Option(help="Where failed lines go. Default: into the output file.")
    ] = None,
    model: Annotated[str, typer.Option(help=engine.MODEL_HELP)] = engine.DEFAULT_MODEL,
    served_model_name: engine.ServedModelName = None,
    revision: engine.Revision = None,
    device: engine.Device = "auto",
    dtype: engine.DType = "auto",
    load_format: engine.LoadFormat = "auto",
    max_model_len: engine.MaxModelLen = None,
    max_num_seqs: engine.MaxNumSeqs = LIMITS.max_num_seqs,
    max_num_batched_tokens: engine.MaxNumBatchedTokens = LIMITS.max_num_batched_tokens,
    max_prefill_chunk_tokens: engine.MaxPrefillChunkTokens = LIMITS.max_prefill_chunk_tokens,
    block_size: engine.BlockSize = ENGINE_DEFAULTS.block_size,
    kv_gib: engine.KvGib = None,
    host_kv_gib: engine.HostKvGib = None,
    gpu_memory_utilization: engine.GpuMemoryUtilization = ENGINE_DEFAULTS.gpu_memory_utilization,
    threads: engine.Threads = None,
    engine_hang_timeout: engine.EngineHangTimeout = None,
    strict: engine.Strict = False,
    chat_template: engine.ChatTemplate = None,
    generation_config: engine.GenerationConfig = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object, the last line of output.")
    ] = False,
    log_level: engine.LogLevel = "WARNING",
) -> None:
    """Answer every line of a file without a server. The same command goes on where it was interrupted.

    Exit status: 0 every line is answered; 1 it cannot run, or not to the end; 3 every line has a result,
    some of them errors; 130 interrupted.
    """
    console = Console(stderr=True)
    try:
        engine.configure_logging(log_level, "run-batch")
        options = EngineOptions(
            device=device,
            dtype=dtype,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk_tokens=max_prefill_chunk_tokens,
            block_size=block_size,
            kv_gib=kv_gib,
            host_kv_gib=host_kv_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            threads=threads,
            engine_hang_timeout=engine_hang_timeout,
        )
        engine_config = options.for_offline_work().config()
        template = read_template(chat_template)
        from_model = uses_generation_config(generation_config)
        from backfill.jobs.local_run import LocalRun

        served = engine.find_model(model, revision, tuple(served_model_name or ()))
        run = LocalRun(
            input_file,
            output_file,
            error_file,
            model=served,
            engine_config=dataclasses.replace(engine_config, model_dir=str(served.folder)),
            chat_template=template,
            uses_generation_config=from_model,
            is_strict=strict,
            log_level=log_level.upper(),
        )
        is_whole = engine.run_in_loop(_run(run, console))
    except BackfillError as error:
        typer.echo(f"backfill: {error}", err=True)
        raise typer.Exit(1) from None
    _print_summary(run, console, as_json=as_json)
    if not is_whole:
        raise typer.Exit(_EXIT_INTERRUPTED)
    if run.counts.failed:
        raise typer.Exit(_EXIT_FAILED_LINES)


async def _run(run: LocalRun, console: Console) -> bool:
    """Whether every line has a result; False after a signal."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, run.stop)
    async with _LiveProgress(run, console):
        return await run.run()


def _print_summary(run: LocalRun, console: Console, *, as_json: bool) -> None:
    counts, usage = run.counts, run.usage
    num_ended = counts.completed + counts.failed
    lines = f"{num_ended} of {counts.total} lines: {counts.completed} completed, {counts.failed} failed"
    console.print(f"{lines}; {usage.input_tokens} tokens in, {usage.output_tokens} out", highlight=False)
    if num_ended < counts.total:
        console.print("Interrupted. The same command goes on from here.", highlight=False)
    if as_json:
        summary = {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
            "resumed": run.num_resumed,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "duration_s": round(run.duration_s, 3),
        }
        typer.echo(json.dumps(summary))


class _LiveProgress:
    """Lines, tokens a second and time left on a terminal; silent without one. An async context manager."""

    def __init__(self, run: LocalRun, console: Console) -> None:
        self._run = run
        self._is_enabled = console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]lines"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=None)

    async def __aenter__(self) -> _LiveProgress:
        self._drawing = asyncio.create_task(self._draw())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drawing.cancel()
        await asyncio.gather(self._drawing, return_exceptions=True)
        if self._is_enabled:
            self._show()
            self._progress.stop()

    async def _draw(self) -> None:
        if not self._is_enabled:
            return
        self._progress.start()
        while True:
            self._show()
            await asyncio.sleep(_DRAW_INTERVAL_S)

    def _show(self) -> None:
        counts = self._run.counts
        self._progress.update(
            self._task,
            total=counts.total,
            completed=counts.completed + counts.failed,
            description=describe(self._run, time.monotonic()),
        )
        self._progress.refresh()


def describe(run: LocalRun, now_s: float) -> str:
    """What the run does: while it feeds, mean rate of all tokens so far and time left at that pace."""
    if run.feeding_since_s is None:
        return run.phase
    elapsed_s = max(now_s - run.feeding_since_s, 1e-9)
    num_ended = run.counts.completed + run.counts.failed - run.num_resumed
    parts = [f"{run.num_tokens_here / elapsed_s:.0f} tok/s"]
    if num_ended:
        num_left = run.counts.total - run.num_resumed - num_ended
        minutes, seconds = divmod(round(num_left * elapsed_s / num_ended), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(f"{hours}:{minutes:02d}:{seconds:02d} left")
    if run.counts.failed:
        parts.append(f"[red]{run.counts.failed} failed[/red]")
    return ", ".join(parts)
