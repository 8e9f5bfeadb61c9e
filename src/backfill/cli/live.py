"""What commands show on standard error while they run."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backfill.bench.record import Outcome

if TYPE_CHECKING:
    from backfill.bench.runner import Run

_INTERVAL_S = 0.5  # drawing takes time from the load
_NUM_RECENT = 200


def note(text: str) -> None:
    """Tell the user something beside the result."""
    print(f"backfill: {text}", file=sys.stderr)


@asynccontextmanager
async def alongside(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run ``work`` beside the block and cancel it after the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def live_progress(run: Run, is_disabled: bool) -> AsyncIterator[None]:
    """Draw a run while the block runs it. Silent without a terminal."""
    console = Console(stderr=True)
    if is_disabled or not console.is_terminal:
        yield
        return
    columns = (
        TextColumn("[bold]requests"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        async with alongside(_draw(run, progress)):
            yield


async def _draw(run: Run, progress: Progress) -> None:
    task = progress.add_task("", total=run.num_requests)
    while True:
        num_ended = len(run.records) - run.count(Outcome.RUNNING)
        progress.update(task, completed=num_ended, description=describe_run(run), refresh=True)
        await asyncio.sleep(_INTERVAL_S)


def describe_run(run: Run) -> str:
    """Counts, the mean output rate so far, and the median TTFT of the last requests that have one."""
    elapsed_s = max(time.perf_counter() - run.started_at, 1e-9)
    chunks = sum(len(record.chunk_after_s) for record in run.records)
    parts = [f"{run.count(Outcome.RUNNING)} running", f"{chunks / elapsed_s:.0f} tok/s"]
    ttfts = [record.ttft_s for record in run.records[-_NUM_RECENT:] if record.chunk_after_s]
    if ttfts:
        parts.append(f"TTFT {statistics.median(ttfts) * 1000:.0f} ms")
    if failed := run.count(Outcome.FAILED):
        parts.append(f"[red]{failed} failed[/red]")
    return ", ".join(parts)
