"""The command line of a study: its options and those of the run, a line of progress, and what is written."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.startup import check_plot
from backfill.core.errors import ConfigError
from backfill.core.measured_on import writing
from backfill.core.options import bounded, check_types, options_of
from backfill.simulation.processes import Progress as RunsDone
from backfill.simulation.study import FIRST_REPORTED_SEED, Run, Study, run_study

_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """How a study runs and what it writes.

    Attributes:
        seeds: how many seeds to run; each draws a workload and the noise of the device.
        first_seed: the first of them. Rates and limits were tuned with seed 0.
        jobs: processes to run in. Figures do not depend on it.
        plot: PNG to write; needs matplotlib.
        json: end with one JSON object on a line.
    """

    seeds: int = bounded(1, least=1, most=10_000)
    first_seed: int = bounded(FIRST_REPORTED_SEED, least=0)
    jobs: int = bounded(1, least=1, most=64)
    plot: Path | None = None
    json: bool = False

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)


def command_of(kind: type[Study[Any]], prefix: str) -> App:
    """The command line of a study.

    Args:
        prefix: of its environment variables, before the scenario's name.
    """

    def run(study: Study[Any], options: StudyOptions) -> None:
        try:
            _run_command(study, options)
        except ConfigError as error:
            raise ConfigError(str(error), field=_option_of_file(study, str(error))) from error
        except ArithmeticError as error:
            raise ConfigError(f"An option is too large or too small to be computed with: {error}.") from error

    run.__doc__ = (inspect.getdoc(kind) or "").partition("\n\nAttributes:")[0]
    run.__annotations__ = {"study": kind, "options": StudyOptions}
    run.__name__ = kind.scenario.partition("-")[2] or kind.scenario  # the name of the command
    own = kind.groups or {"Points": " ".join(options_of(kind))}  # type: ignore[arg-type]
    groups = {**own, "Runs": kind.how, "Output": kind.writes}
    variables = f"{prefix}{kind.scenario.upper().replace('-', '_')}_"
    return command(run, {title: names for title, names in groups.items() if names}, prefix=variables)


def _option_of_file(study: Study[Any], message: str) -> str | None:
    """The option with the file whose path begins a message: who reads a trace does not know its option."""
    for name, option in options_of(study).items():  # type: ignore[arg-type]
        path = option.default
        if isinstance(path, Path) and message.startswith((f"{path} ", f"{path}, ", f"{path}: ")):
            return name
    return None


def _run_command(study: Study[Any], options: StudyOptions) -> None:
    console = Console()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = study.runs(seeds)  # wrong options are refused before anything is printed
    check_plot(options.plot)
    title, *lines = study.heading(seeds[0])
    console.print(f"[bold]{title}[/bold]")
    for line in lines:
        console.print(line, highlight=False, markup=False)

    def on_done(run: Run, outcome: Any) -> None:
        if line := study.describe(run, outcome):
            console.print(line, style="dim", soft_wrap=True)

    num_runs = len(runs) if study.tells_progress else 0
    with interruptible(), live_progress(console, num_runs) as progress:
        points = run_study(study, seeds, options.jobs, on_done, progress)
    study.report(console, points)
    if options.plot is not None:
        _draw(study, points, options.plot)
        console.print(f"wrote {options.plot}", markup=False, soft_wrap=True)
    if options.json:
        of_seeds = {"num_seeds": options.seeds} if "seeds" in study.how else {}
        print(json.dumps({"scenario": study.scenario, **of_seeds, **study.as_json(points)}))


def _draw(study: Study[Any], points: list[Any], path: Path) -> None:
    """Raises: ConfigError when the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    study.draw(figure, points)
    with writing(path):
        figure.savefig(path, dpi=110, format="png")


@contextmanager
def live_progress(console: Console, num_runs: int) -> Iterator[RunsDone | None]:
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
    done, has_ended = RunsDone(), threading.Event()
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=num_runs)
        drawing = threading.Thread(target=_draw_bar, args=(done, has_ended, bar, task), daemon=True)
        drawing.start()
        try:
            yield done
        finally:
            has_ended.set()
            drawing.join()


def _draw_bar(done: RunsDone, has_ended: threading.Event, bar: Progress, task: TaskID) -> None:
    while not has_ended.wait(_INTERVAL_S):
        bar.update(task, completed=done.num_done, refresh=True)
