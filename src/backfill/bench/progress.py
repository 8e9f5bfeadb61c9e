"""The live display of a run, on standard error."""

from __future__ import annotations

import asyncio
import statistics
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backfill.bench.record import Outcome
from backfill.bench.runner import Run

_INTERVAL_S = 0.5  # drawing takes time from the load: seldom enough not to be seen in the figures
_RECENT = 200


class LiveProgress:
    """Draws a run while it goes on. Use as an async context manager; silent without a terminal."""

    def __init__(self, run: Run, console: Console, *, is_enabled: bool = True) -> None:
        self._run = run
        self._is_enabled = is_enabled and console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]requests"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            transient=True,
        )

    async def __aenter__(self) -> LiveProgress:
        self._drawing = asyncio.create_task(self._draw())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drawing.cancel()
        await asyncio.gather(self._drawing, return_exceptions=True)
        if self._is_enabled:
            self._progress.stop()  # without a start it would print an empty line

    async def _draw(self) -> None:
        if not self._is_enabled:
            return
        task = self._progress.add_task("", total=self._run.num_requests)
        self._progress.start()
        while True:
            ended = len(self._run.records) - self._run.count(Outcome.RUNNING)
            self._progress.update(task, completed=ended, description=describe_run(self._run))
            self._progress.refresh()
            await asyncio.sleep(_INTERVAL_S)


def describe_run(run: Run) -> str:
    """Counts, mean output rate so far, and the median TTFT of the last requests to have one."""
    elapsed_s = max(time.perf_counter() - run.started_at, 1e-9)
    chunks = sum(len(record.chunk_after_s) for record in run.records)
    parts = [f"{run.count(Outcome.RUNNING)} running", f"{chunks / elapsed_s:.0f} tok/s"]
    ttfts = [record.ttft_s for record in run.records[-_RECENT:] if record.chunk_after_s]
    if ttfts:
        parts.append(f"TTFT {statistics.median(ttfts) * 1000:.0f} ms")
    if failed := run.count(Outcome.FAILED):
        parts.append(f"[red]{failed} failed[/red]")
    return ", ".join(parts)
