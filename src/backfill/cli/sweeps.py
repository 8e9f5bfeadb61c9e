"""What the sweeps of ``backfill simulate`` have in common: options, files, a line of progress."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from backfill.cli.startup import NEEDS_MATPLOTLIB, can_plot, check_folder, check_plot
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.simulation.progress import SweepProgress

_MOST_JOBS = 64
_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """How a sweep runs and what it writes.

    Attributes:
        policies: policies to run, separated by commas.
        seeds: figures are means over the seeds 1 to this; seed 0 is for tuning.
        jobs: processes to run in. Figures do not depend on it.
        plot: PNG to write; named as the scenario by default, if matplotlib is installed.
        json: end with one JSON object on a line.
    """

    policies: str | None = None
    seeds: int = 1
    jobs: int = 1
    plot: Path | None = None
    json: bool = False

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        if self.seeds < 1:
            raise ConfigError(f"`seeds` must be at least 1, got {self.seeds}.")
        if not 1 <= self.jobs <= _MOST_JOBS:
            raise ConfigError(f"`jobs` must be 1 to {_MOST_JOBS}, got {self.jobs}.")

    def begin(self, console: Console, title: str, scenario: str) -> Path | None:
        """Print the title; returns the file to draw, None without matplotlib. Raises: ConfigError."""
        check_plot(self.plot)
        path = self.plot
        if path is None and can_plot():
            path = Path(f"{scenario}.png")
            check_folder("plot", path)
        console.print(f"[bold]{title}[/bold]")
        if path is None:
            console.print(f"No plot: it needs {NEEDS_MATPLOTLIB}.", highlight=False, markup=False)
        return path

    def end(self, console: Console, path: Path | None, content: Mapping[str, Any]) -> None:
        """Print where the plot is, and the JSON if it was asked for."""
        if path is not None:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
        if self.json:
            print(json.dumps(content))


def names_of(text: str | None, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    if text is None:
        return default
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def numbers_of(field: str, text: str | None, default: tuple[float, ...] = ()) -> tuple[float, ...]:
    """Numbers separated by commas, each once. Raises: ConfigError."""
    if text is None:
        return default
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"`{field}` must be numbers separated by commas, got {text!r:.80}.") from None


def cell(value: float | None, kind: str) -> str:
    """A figure of a table; empty where there is none."""
    return "" if value is None else format(value, kind)


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
