"""Select-N's figures 9 to 12 and 14: their points, tables and plots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rich.console import Console

from backfill.cli.studies import command_of
from backfill.core.errors import ConfigError
from backfill.core.options import Bounds, bounded
from backfill.offloading.record import Phase
from backfill.simulation.study import Outcomes, Run, Study
from backfill.simulation.tables import cell, table_of
from experiments.selectn.baselines import FLEXGEN
from experiments.selectn.contention import ContentionUnit
from experiments.selectn.model import SHAPES, PhaseLoad
from experiments.selectn.result import (
    ALONE,
    DEEPSPEED,
    LARGEST_BATCH,
    OTHER,
    RESIDENT,
    SELECT_N,
    Row,
    SelectnResult,
    compare,
)
from experiments.selectn.units import BatchUnit, IntervalUnit, LoadUnit, MaxLengthUnit, Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES: tuple[Phase, ...] = ("prefill", "decode")
LENGTH = 64  # sections 5.4 and 5.5; 5.2 does not say
MEMORY_LENGTH = 256  # of figure 2; section 5.3 does not say
SLO_BATCHES = {"prefill": 32, "decode": 128}  # section 5.2
INTERVAL_BATCHES = {"prefill": 16, "decode": 128}  # section 5.4
# Objectives of a decode step with which OPT-13B fits the device at some interval.
BATCH_SLOS_S = (0.35, 0.45, 0.55, 0.7)
# The paper's pair and objective; the same with one that an interval meets; and a pair that fits.
PAIRS = (
    (("opt-13b", "llama-13b"), 0.1),
    (("opt-13b", "llama-13b"), 1.2),
    (("opt-6.7b", "qwen2-beta-7b"), 0.1),
)
LEAST_STEPS = 100  # for a P99
_MOST_STEPS = 100_000
_MOST_BATCH = 4096


class Selectn(Study[list[Row]]):
    """A figure, whose parts run independently.

    Attributes:
        models: models, separated by commas: opt-6.7b, opt-13b, qwen2-beta-7b, llama-2-13b, llama-13b.
        batches: requests of a step, separated by commas.
        slacks: of the objectives over the P99 without offloading, separated by commas; 0.5 is half as long
            again.
        steps: simulated steps of each interval, 100 to 100000.
    """

    how: ClassVar[str] = "jobs"

    def batch_sizes(self) -> tuple[int, ...]:
        """Raises: ConfigError."""
        batches = self.numbers("batches", Bounds(least=1, most=_MOST_BATCH))
        if not all(batch.is_integer() for batch in batches):
            raise ConfigError("must be whole numbers.", field="batches")
        return tuple(map(int, batches))

    @abstractmethod
    def units(self) -> Sequence[Unit]:
        """Raises: ConfigError."""

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """The simulated devices have seeds of their own."""
        return [Run(index, "", 1, unit.rows) for index, unit in enumerate(self.units())]

    def point(self, setting: int, outcomes: Outcomes) -> list[Row]:
        (rows,) = outcomes[""]
        return list(rows)

    def describe(self, run: Run, outcome: Any) -> str:
        return ""

    def report(self, console: Console, points: Sequence[list[Row]]) -> None:
        result = self._result(points)
        for line in result.settings:
            console.print(line, style="dim", highlight=False, markup=False)
        for group, rows in result.groups.items():
            _print_rows(console, self.scenario, group, rows)
        _print_compared(console, result)

    def as_json(self, points: Sequence[list[Row]]) -> dict[str, Any]:
        return self._result(points).as_json()

    def draw(self, figure: Figure, points: Sequence[list[Row]]) -> None:
        """A row for each group."""
        panels = _SHOWN.get(self.scenario, tuple(_PANELS))
        groups = self._result(points).groups
        figure.set_size_inches(4 * len(panels), 1 + _ROW_INCHES * len(groups))
        figure.suptitle(self.title)
        axes = figure.subplots(len(groups), len(panels), squeeze=False)
        for row, (group, rows) in zip(axes, groups.items(), strict=True):
            for axis, panel in zip(row, panels, strict=True):
                _draw(axis, rows, _PANELS[panel])
                x_label = _X.get(self.scenario, "interval")
                axis.set(ylabel=panel, xlabel="objective (s)" if group.endswith(LARGEST_BATCH) else x_label)
                if panel == "P99 / SLO":
                    axis.axhline(1.0, color="red", linewidth=0.8)
                    if max(row.over_slo or 1.0 for row in rows) > _LOG_FROM:
                        axis.set_yscale("log")
                        continue
                axis.set_ylim(0.0, 1.1 * axis.dataLim.y1 or 1.0)
            row[0].set_title(group, loc="left", fontsize=8)
            row[0].legend(fontsize=6)

    def _result(self, points: Sequence[list[Row]]) -> SelectnResult:
        return SelectnResult.of_rows(self.scenario, [row for rows in points for row in rows])


@dataclass(frozen=True, kw_only=True)
class Slo(Selectn):
    """Run Select-N's figure 9: TTFT and TPOT over their objectives, beside DeepSpeed's interval 1."""

    models: str = "opt-6.7b,qwen2-beta-7b"
    slacks: str = "0.1,0.2,0.3,0.4,0.5"
    steps: int = bounded(1000, least=LEAST_STEPS, most=_MOST_STEPS)

    scenario: ClassVar[str] = "selectn-slo"
    title: ClassVar[str] = "Select-N, figure 9: latency over its objective"

    def units(self) -> Sequence[Unit]:
        slacks, systems = self.numbers("slacks", Bounds(least=0)), (DEEPSPEED, RESIDENT)
        return [
            LoadUnit(model, PhaseLoad(phase, SLO_BATCHES[phase], LENGTH), slacks, systems, self.steps)
            for model in self.names("models", SHAPES)
            for phase in PHASES
        ]


@dataclass(frozen=True, kw_only=True)
class Memory(Selectn):
    """Run Select-N's figure 10: host memory and throughput, beside FlexGen's static estimate.

    Batch sizes with the objective of the time without offloading; then the largest decode batch that memory
    allows, with objectives in seconds.
    """

    models: str = "opt-13b"
    batches: str = "4,8,16,32"
    # Section 5.3 states no objective; that of figure 5, with the same systems, has no slack.
    slacks: str = "0"
    steps: int = bounded(1000, least=LEAST_STEPS, most=_MOST_STEPS)

    scenario: ClassVar[str] = "selectn-memory"
    title: ClassVar[str] = "Select-N, figure 10: host memory and throughput"

    def units(self) -> Sequence[Unit]:
        models, slacks = self.names("models", SHAPES), self.numbers("slacks", Bounds(least=0))
        systems = tuple(FLEXGEN)
        loads = [PhaseLoad(phase, batch, MEMORY_LENGTH) for phase in PHASES for batch in self.batch_sizes()]
        return [
            *(LoadUnit(each, load, slacks, systems, self.steps, True) for each in models for load in loads),
            *(
                BatchUnit(each, MEMORY_LENGTH, slo_s, systems, self.steps)
                for each in models
                for slo_s in BATCH_SLOS_S
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class Interval(Selectn):
    """Run Select-N's figure 11: every interval with one objective."""

    models: str = "opt-6.7b"
    slacks: str = "0.5"
    steps: int = bounded(1000, least=LEAST_STEPS, most=_MOST_STEPS)

    scenario: ClassVar[str] = "selectn-interval"
    title: ClassVar[str] = "Select-N, figure 11: every interval"

    def units(self) -> Sequence[Unit]:
        return [
            IntervalUnit(model, PhaseLoad(phase, INTERVAL_BATCHES[phase], LENGTH), slack, self.steps)
            for model in self.names("models", SHAPES)
            for slack in self.numbers("slacks", Bounds(least=0))
            for phase in PHASES
        ]


@dataclass(frozen=True, kw_only=True)
class Contention(Selectn):
    """Run Select-N's figure 12: two devices on one bus."""

    batches: str = "8,16,32"
    steps: int = bounded(1000, least=LEAST_STEPS, most=_MOST_STEPS)

    scenario: ClassVar[str] = "selectn-contention"
    title: ClassVar[str] = "Select-N, figure 12: two devices on one bus"

    def units(self) -> Sequence[Unit]:
        return [
            ContentionUnit(pair, PhaseLoad("decode", batch, LENGTH), slo_s, self.steps)
            for pair, slo_s in PAIRS
            for batch in self.batch_sizes()
        ]


@dataclass(frozen=True, kw_only=True)
class MaxLen(Selectn):
    """Compute Select-N's figure 14: tokens of KV at each interval."""

    models: str = "qwen2-beta-7b"

    scenario: ClassVar[str] = "selectn-maxlen"
    title: ClassVar[str] = "Select-N, figure 14: largest total length"

    def units(self) -> Sequence[Unit]:
        return [MaxLengthUnit(model) for model in self.names("models", SHAPES)]


STUDIES: tuple[type[Selectn], ...] = (Slo, Memory, Interval, Contention, MaxLen)
slo, memory, interval, contention, maxlen = (command_of(study, "EXPERIMENTS_") for study in STUDIES)


class _Column(NamedTuple):
    heading: str
    of: Callable[[Row], str]


def _optimum(row: Row) -> str:
    if not (row.exists and row.found):
        return "none"
    return _interval(row.optimum) if row.searched else ""


def _interval(interval: int | None) -> str:
    return "-" if interval is None else str(interval)


def _offloaded(row: Row) -> str:
    return f"{row.portion:.1%}" if row.portion is not None else _interval(row.interval)


_COLUMNS = {
    "x": _Column("", lambda row: "-" if row.system == RESIDENT and row.x > 1 else f"{row.x:g}"),
    "system": _Column("system", lambda row: row.system),
    "offloaded": _Column("i", _offloaded),
    "optimum": _Column("best", _optimum),
    "batch": _Column("batch", lambda row: str(row.batch_size)),
    "slo": _Column("SLO ms", lambda row: cell(None if row.slo_s is None else 1000 * row.slo_s, ".0f")),
    "p99": _Column("P99 / SLO", lambda row: cell(row.over_slo, ".3f")),
    "tpot": _Column(
        "TPOT / SLO",
        lambda row: "" if row.tpot_p99_s is None or not row.slo_s else f"{row.tpot_p99_s / row.slo_s:.3f}",
    ),
    "smaller": _Column("i-1 / SLO", lambda row: cell(row.smaller_over_slo, ".3f")),
    "host": _Column("host GB", lambda row: f"{row.host_bytes / 1e9:.2f}"),
    "kv": _Column("KV tokens", lambda row: f"{row.kv_tokens:,}" if row.kv_tokens >= 0 else "no room"),
    "tokens": _Column("tok/s", lambda row: f"{row.tokens_per_s:.0f}"),
}
# What ``x`` is, and the columns behind it, by figure or kind of group.
_TABLES = {
    "selectn-slo": ("slack", "system offloaded optimum slo p99 tpot smaller host tokens"),
    "selectn-memory": ("batch", "system offloaded optimum p99 smaller host kv tokens"),
    LARGEST_BATCH: ("SLO s", "system offloaded batch p99 host kv tokens"),
    "selectn-interval": ("i", "system optimum p99 tpot smaller host kv tokens"),
    "selectn-contention": ("batch", "system offloaded optimum p99 host kv tokens"),
    "selectn-maxlen": ("i", "system host kv"),
}
_OF_INTERVALS = ("selectn-interval", "selectn-maxlen")


def _print_rows(console: Console, scenario: str, group: str, rows: list[Row]) -> None:
    kind = LARGEST_BATCH if group.endswith(LARGEST_BATCH) else scenario
    x_heading, names = _TABLES[kind]
    columns = [_COLUMNS[name] for name in ("x", *names.split())]
    table = table_of(group, *(column.heading or x_heading for column in columns), left=("system",))
    before = rows[0]
    for row in rows:
        if scenario in _OF_INTERVALS:
            if row is not before and row.system == OTHER and row.host_bytes == before.host_bytes:
                continue  # as many layers are offloaded
        elif row.x != before.x:
            table.add_section()
        before = row
        table.add_row(*(column.of(row) for column in columns))
    console.print(table)


def _print_compared(console: Console, result: SelectnResult) -> None:
    compared = compare(result)
    if not compared:
        return
    table = table_of("Beside the paper", "figure", "here", "paper", left=("figure",))
    for each in compared:
        table.add_row(each.name, each.ours, each.paper)
    console.print(table)


_ROW_INCHES = 2.6
_LOG_FROM = 4.0  # times the objective
_COLOURS = {
    SELECT_N: "#1b7837",
    OTHER: "#7f7f7f",
    DEEPSPEED: "#b2182b",
    RESIDENT: "#2166ac",
    ALONE: "#e08214",
    "flexgen": "#762a83",
    "flexgen-flops": "#c2a5cf",
    "flexgen-slo": "#de77ae",
}
_PANELS: dict[str, Callable[[Row], float | None]] = {
    "P99 / SLO": lambda row: row.over_slo,
    "host memory (GB)": lambda row: row.host_bytes / 1e9,
    "KV tokens": lambda row: max(0, row.kv_tokens),
    "tokens/s": lambda row: row.tokens_per_s,
}
_SHOWN = {"selectn-maxlen": ("host memory (GB)", "KV tokens")}
_X = {
    "selectn-slo": "slack of the objective",
    "selectn-memory": "batch size",
    "selectn-contention": "batch size",
}


def _draw(axis: Axes, rows: list[Row], figure_of: Callable[[Row], float | None]) -> None:
    for system in dict.fromkeys(row.system for row in rows):
        of_system = {system, SELECT_N} if system == OTHER else {system}
        points = [
            (row.x, value)
            for row in rows
            if row.system in of_system and (value := figure_of(row)) is not None
        ]
        axis.plot(
            [x for x, _ in points],
            [value for _, value in points],
            color=_COLOURS[system],
            label=system,
            marker="o" if system == SELECT_N else ".",
            linewidth=1,
        )
