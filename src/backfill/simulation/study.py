"""The harness of all studies on simulated devices: options, seeds, processes, tables, plot and JSON.

A study is a frozen dataclass: its fields are the options of its command and its docstring is the help
(``backfill/cli/studies.py``). It says what to run, what a point's figures are, and how they are shown.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rich.console import Console

from backfill.core.errors import ConfigError
from backfill.core.options import Bounds, check_types
from backfill.simulation.processes import Progress, processes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = TypeVar("Point")
Name = TypeVar("Name", bound=str)

# Seed 0 is for tuning: rates, limits and the code's constants were chosen with it. What is reported must not
# come from it.
TUNING_SEED = 0
FIRST_REPORTED_SEED = 1
MOST_REQUESTS = 10_000_000
# Of times, rates and factors: with less or more a study would compute with zeros and infinities, or not end.
LEAST, MOST = 0.001, 1_000_000
_USUAL = Bounds(least=LEAST, most=MOST)


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


class Study(ABC, Generic[Point]):
    """Systems compared at some settings. A subclass is a frozen dataclass.

    Attributes:
        scenario: name of the study in JSON, and of its plot.
        title: is printed first.
        groups: the study's options by title of a section of ``--help``; by default all are points.
        how: options of the run that the command has.
        writes: options of what it writes.
        tells_progress: its runs say how far they are.
    """

    scenario: ClassVar[str]
    title: ClassVar[str]
    groups: ClassVar[Mapping[str, str]] = {}
    how: ClassVar[str] = "seeds jobs"
    writes: ClassVar[str] = "plot json"
    tells_progress: ClassVar[bool] = False

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)  # type: ignore[arg-type]

    def names(self, field: str, known: Iterable[Name]) -> tuple[Name, ...]:
        """Of a field with names separated by commas, each once. Raises: ConfigError, as ``check_names``."""
        allowed = {str(each): each for each in known}
        texts = [text.strip() for text in getattr(self, field).split(",")]
        names = list(dict.fromkeys(filter(None, texts)))
        check_names(field, names, allowed)
        return tuple(allowed[name] for name in names)

    def numbers(self, field: str, bounds: Bounds = _USUAL) -> tuple[float, ...]:
        """Of a field with numbers separated by commas, each once. Raises: ConfigError."""
        text = getattr(self, field)
        try:
            numbers = tuple(dict.fromkeys(float(part) for part in text.split(",")))
        except ValueError:
            raise ConfigError(f"`{field}` must be numbers separated by commas, got {text!r:.80}.") from None
        for number in numbers:
            bounds.check(field, number)
        return numbers

    def heading(self, seed: int) -> list[str]:
        """The title, and lines on what the options say. Args: seed: the first one."""
        return [self.title]

    @abstractmethod
    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Raises: ConfigError."""

    @abstractmethod
    def point(self, setting: Any, outcomes: Outcomes) -> Point:
        """Figures of a setting whose runs have ended."""

    def describe(self, run: Run, outcome: Any) -> str:
        """A line for a run that has ended; empty for none."""
        return f"{run.point}: {run.system} done"

    @abstractmethod
    def report(self, console: Console, points: Sequence[Point]) -> None:
        """Print tables."""

    @abstractmethod
    def as_json(self, points: Sequence[Point]) -> dict[str, Any]:
        """The figures, to be written as JSON."""

    def draw(self, figure: Figure, points: Sequence[Point]) -> None:
        """Draw into a figure whose size it sets. Studies that write a plot do."""


def run_study(
    study: Study[Point],
    seeds: Sequence[int] = (FIRST_REPORTED_SEED,),
    num_processes: int = 1,
    on_done: Callable[[Run, Any], None] = lambda *_: None,
    progress: Progress | None = None,
) -> list[Point]:
    """Run every system at every setting under every seed.

    ``on_done`` is called after each run, in order. Points do not depend on ``num_processes``.

    Raises: ConfigError.
    """
    study.validate()
    runs = study.runs(seeds)
    left = Counter(run.point for run in runs)
    points: dict[Hashable, Point] = {}
    outcomes: dict[Hashable, dict[str, list[Any]]] = {}
    with processes(num_processes, progress) as map_runs:
        for run, outcome in zip(runs, map_runs(_simulate, runs), strict=True):
            outcomes.setdefault(run.point, {}).setdefault(run.system, []).append(outcome)
            on_done(run, outcome)
            left[run.point] -= 1
            if not left[run.point]:
                points[run.point] = study.point(run.point, outcomes.pop(run.point))
    return [points[each] for each in left]


def _simulate(run: Run) -> Any:
    return run.simulate()


def mean_figures(names: Iterable[str], results: Sequence[object]) -> dict[str, float]:
    """Means of these attributes."""
    return {name: fmean(getattr(each, name) for each in results) for name in names}


def check_names(field: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raises: ConfigError for a name that is not known, or if there is none."""
    allowed = list(known)
    for name in names:
        if name not in allowed:
            raise ConfigError(f"`{field}`: there is no {name!r}; there are {', '.join(allowed)}.")
    if not names:
        raise ConfigError(f"`{field}` names none; there are {', '.join(allowed)}.")
