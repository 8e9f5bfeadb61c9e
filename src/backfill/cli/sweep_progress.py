"""A line on the terminal that says how far a sweep's runs are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from backfill.simulation.run_progress import SweepProgress

_INTERVAL_S = 0.5


@contextmanager
def live_sweep(console: Console, num_runs: int) -> Iterator[SweepProgress | None]:
    """Draw the progress of so many runs while the block runs them. None without a terminal."""
    if not console.is_terminal or num_runs == 0:
        yield None
        return
    columns = (
        TextColumn(f"{num_runs} runs"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:.1f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    sweep, has_ended = SweepProgress(), threading.Event()
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=num_runs)
        drawing = threading.Thread(target=_draw, args=(sweep, has_ended, bar, task), daemon=True)
        drawing.start()
        try:
            yield sweep
        finally:
            has_ended.set()
            drawing.join()


def _draw(sweep: SweepProgress, has_ended: threading.Event, bar: Progress, task: TaskID) -> None:
    while not has_ended.wait(_INTERVAL_S):
        bar.update(task, completed=sweep.num_done, refresh=True)
