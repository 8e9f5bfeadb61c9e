"""The harness of all studies: options, seeds, processes, progress, tables, plot and JSON.

A study is a dataclass: its fields are the options of its command and its docstring is the help
(``backfill/cli/command.py``). It says what to run, what a point's figures are, and how they are shown.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from cyclopts import App
from rich.console import Console
from rich.table import Table

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.sweeps import SweepOptions, live_sweep
from backfill.core.options import check_types, options_of
from backfill.simulation.progress import SweepProgress
from backfill.simulation.sweep import processes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = TypeVar("Point")


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation.

    Attributes:
        point: the setting to which it belongs.
        system: what is compared at a point: a policy, an order, an estimate.
        simulate: gives the outcome. It is pickled where processes run side by side.
    """

    point: Hashable
    system: str
    seed: int
    simulate: Callable[[], Any]


Outcomes = Mapping[str, Sequence[Any]]
"""Outcomes of a point by system, in the order of the seeds."""


class PointStore(Protocol[Point]):
    """Where finished points are kept between runs of a command."""

    finished: Mapping[Any, Point]

    def add(self, point: Point) -> None: ...


class _NoStore(Generic[Point]):
    def __init__(self) -> None:
        self.finished: Mapping[Any, Point] = {}

    def add(self, point: Point) -> None:
        """Nothing is kept."""


class Study(Generic[Point]):
    """One figure or table. A subclass is a frozen dataclass.

    Attributes:
        scenario: name of the study in JSON, and of its plot.
        title: is printed first.
        how: options of the run that the command has.
        writes: options of what it writes.
        tells_progress: its runs say how far they are.
    """

    scenario: ClassVar[str]
    title: ClassVar[str]
    how: ClassVar[str] = "seeds jobs"
    writes: ClassVar[str] = "plot json"
    tells_progress: ClassVar[bool] = False

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)  # type: ignore[arg-type]

    def heading(self) -> str:
        """The title with what the options say."""
        return self.title

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Raises: ConfigError."""
        raise NotImplementedError

    def point(self, setting: Any, outcomes: Outcomes) -> Point:
        """Figures of a setting whose runs have ended."""
        raise NotImplementedError

    @contextmanager
    def store(self, console: Console, num_seeds: int) -> Iterator[PointStore[Point]]:
        """Points that have been run already, which are not run again."""
        yield _NoStore()

    def describe(self, run: Run, outcome: Any) -> str:
        """A line for a run that has ended; empty for none."""
        return f"{run.point}: {run.system} done"

    def report(self, console: Console, points: Sequence[Point]) -> None:
        """Print tables."""
        raise NotImplementedError

    def as_json(self, points: Sequence[Point]) -> dict[str, Any]:
        raise NotImplementedError

    def draw(self, figure: Figure, points: Sequence[Point]) -> None:
        """Draw into a figure whose size it sets."""
        raise NotImplementedError

    def cannot_draw(self, points: Sequence[Point]) -> str | None:
        """Why there is nothing to draw."""
        return None


def run_study(
    study: Study[Point],
    num_seeds: int = 1,
    num_processes: int = 1,
    on_done: Callable[[Run, Any], None] = lambda *_: None,
    progress: SweepProgress | None = None,
    store: PointStore[Point] | None = None,
) -> list[Point]:
    """Run every system at every setting under the seeds 1 to ``num_seeds``.

    ``on_done`` is called after each run, in order. Points do not depend on ``num_processes``.

    Raises: ConfigError.
    """
    study.validate()
    kept = store or _NoStore()
    runs = study.runs(range(1, num_seeds + 1))
    left = Counter(run.point for run in runs)
    points: dict[Hashable, Point] = {each: kept.finished[each] for each in left if each in kept.finished}
    new = [run for run in runs if run.point not in points]
    outcomes: dict[Hashable, dict[str, list[Any]]] = {}
    with processes(num_processes, progress) as pool:
        for run, outcome in zip(new, pool.map(_simulate, new), strict=True):
            outcomes.setdefault(run.point, {}).setdefault(run.system, []).append(outcome)
            on_done(run, outcome)
            left[run.point] -= 1
            if not left[run.point]:
                points[run.point] = study.point(run.point, outcomes.pop(run.point))
                kept.add(points[run.point])
    return [points[each] for each in left]


def _simulate(run: Run) -> Any:
    return run.simulate()


def command_of(kind: type[Study[Any]]) -> App:
    """The command line of a study."""

    def run(study: Study[Any], options: SweepOptions) -> None:
        _run_command(study, options)

    run.__doc__ = (inspect.getdoc(kind) or "").partition("\n\nAttributes:")[0]
    run.__annotations__ = {"study": kind, "options": SweepOptions}
    run.__name__ = kind.scenario.partition("-")[2]  # the name of the command
    names = " ".join(options_of(kind))  # type: ignore[arg-type]
    groups = {"Points": names, "Runs": kind.how, "Output": kind.writes}
    prefix = f"EXPERIMENTS_{kind.scenario.upper().replace('-', '_')}_"
    return command(run, {title: each for title, each in groups.items() if each}, prefix=prefix)


def _run_command(study: Study[Any], options: SweepOptions) -> None:
    console = Console()
    num_seeds = options.seeds
    runs = study.runs(range(1, num_seeds + 1))  # wrong options are refused before anything is printed
    path = None
    if "plot" in study.writes:
        path = options.begin(console, study.heading(), study.scenario)
    else:
        console.print(f"[bold]{study.heading()}[/bold]")

    def on_done(run: Run, outcome: Any) -> None:
        if line := study.describe(run, outcome):
            console.print(line, style="dim", soft_wrap=True)

    with study.store(console, num_seeds) as store:
        num_runs = 0
        if study.tells_progress:
            num_runs = sum(run.point not in store.finished for run in runs)
        bar = live_sweep(console, num_runs)
        with interruptible(), bar as progress:
            points = run_study(study, num_seeds, options.jobs, on_done, progress, store)
    study.report(console, points)
    if path is not None and (reason := study.cannot_draw(points)):
        console.print(f"No plot: {reason}.", highlight=False)
        path = None
    if path is not None:
        from backfill.simulation.plot import new_figure, write_figure

        figure = new_figure()
        study.draw(figure, points)
        write_figure(figure, path)
    of_seeds = {"num_seeds": num_seeds} if "seeds" in study.how else {}
    options.end(console, path, {"scenario": study.scenario, **of_seeds, **study.as_json(points)})


def mean_of(results: Sequence[Any]) -> dict[str, float]:
    """Means of the fields of dataclasses, by name."""
    contents = [asdict(each) for each in results]
    return {name: fmean(each[name] for each in contents) for name in contents[0]}


def table_of(title: str, *headings: str, left: Sequence[str] = (), caption: str | None = None) -> Table:
    """A narrow table; the columns in ``left`` hold names, the others numbers."""
    table = Table(title=title, caption=caption, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in headings:
        is_name = heading in left
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    return table
