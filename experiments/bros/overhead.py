"""BROS's figure 14: the scheduler's own time. Decisions run on this machine, steps are simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from backfill.cli.studies import command_of
from backfill.core.errors import ConfigError
from backfill.core.options import bounded
from backfill.core.request import ServiceClass
from backfill.engine.engine import Engine
from backfill.simulation.replay import ReplayResult
from backfill.simulation.study import MOST, Outcomes
from backfill.simulation.tables import cell, table_of
from backfill.simulation.variants import COLOURS, Simulation
from experiments.bros.engine import observed_by
from experiments.bros.tradeoff import LEAST_DURATION_S, MODELS, Bros, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVERHEAD_MODELS = ("opt-13b", "opt-30b")  # section 7.4.2
OVERHEAD_RATES_PER_S = (5.0, 10.0)
OVERHEAD_DURATION_S = 60.0
OVERHEAD_POLICIES = ("bros-checkpoint", "bros")
# Least and most share of an iteration that scheduling takes.
PAPER_SHARES: Mapping[str, tuple[float, float]] = {"opt-13b": (0.0912, 0.0952), "opt-30b": (0.0756, 0.0842)}
# Steps are grouped by the requests that hold blocks: up to the first of these, up to the second, ...
GROUPS = (32, 64, 128, 256)
_ROW_INCHES = 2.8

Floats = NDArray[np.float64]


@dataclass(slots=True)
class StepTimes:
    """Observes the steps of a replay that took time and began before ``duration_s``.

    Attributes:
        num_running: requests that held blocks after each step.
        decision_s: seconds of this machine in which each step was planned and committed.
        step_s: seconds of the simulated device.
    """

    duration_s: float
    num_running: list[int] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    _scheduling_s: float = 0.0

    def on_step(self, engine: Engine, began_s: float, ended_s: float) -> None:
        """See ``Observer``."""
        decision_s = engine.scheduling_s - self._scheduling_s
        self._scheduling_s = engine.scheduling_s
        if began_s < ended_s and began_s < self.duration_s:
            requests = engine.scheduler.requests
            self.num_running.append(len(requests.running) + len(requests.restoring))
            self.decision_s.append(decision_s)
            self.step_s.append(ended_s - began_s)


@dataclass(frozen=True, slots=True)
class OverheadRun:
    """Steps of one simulation, with the median time of each step's decision over the repetitions.

    Attributes:
        copy_s: simulated seconds in which the link between device and host was busy.
    """

    num_running: NDArray[np.int64]
    decision_s: Floats
    step_s: Floats
    copy_s: float


def run_repeatedly(simulation: Simulation, *, repeats: int) -> OverheadRun:
    """Run the same simulation several times. Its steps are the same each time; what decisions take is not.

    Raises: ConfigError if no step begins within the trace.
    """
    duration_s = simulation.workload.duration_s
    runs = []
    for _ in range(repeats):
        times = StepTimes(duration_s)
        result = simulation.replay(observed_by(times))
        if not times.step_s:
            raise ConfigError(f"`duration`: no step begins within {duration_s:g} s.")
        runs.append(times)
    assert all(times.step_s == runs[0].step_s for times in runs), "a simulation is not deterministic"
    return OverheadRun(
        num_running=np.array(runs[0].num_running),
        decision_s=np.median([times.decision_s for times in runs], axis=0),
        step_s=np.array(runs[0].step_s),
        copy_s=_copy_s(simulation, result),
    )


def _copy_s(simulation: Simulation, result: ReplayResult) -> float:
    copies = simulation.hardware.costs.copies
    if copies is None:
        return 0.0
    counters = [result.counters[each] for each in ServiceClass]
    num_out = sum(each.num_checkpointed_tokens for each in counters)
    num_back = sum(each.num_restored_tokens for each in counters)
    token_s = num_out / copies.to_host_bytes_per_s + num_back / copies.to_device_bytes_per_s
    return token_s * simulation.hardware.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Overhead:
    """What scheduling takes of the steps.

    Attributes:
        share: decisions over decisions and steps, of all iterations together.
        decision_ms, step_ms: medians.
        copy_share: the link's busy time over that of the steps; None for a part of the steps.
    """

    num_steps: int
    share: float
    decision_ms: float
    step_ms: float
    copy_share: float | None = None

    @classmethod
    def of(cls, decision_s: Floats, step_s: Floats, copy_s: float | None = None) -> Overhead:
        """At least one step."""
        total_s = float(step_s.sum())
        return cls(
            num_steps=len(step_s),
            share=float(decision_s.sum()) / (float(decision_s.sum()) + total_s),
            decision_ms=1000 * float(np.median(decision_s)),
            step_ms=1000 * float(np.median(step_s)),
            copy_share=None if copy_s is None else copy_s / total_s,
        )


@dataclass(frozen=True, slots=True)
class OverheadPoint:
    """Policies at one setting: all steps of each, and those of each group of ``GROUPS`` that has any."""

    setting: Setting
    policies: dict[str, Overhead] = field(default_factory=dict)
    groups: dict[str, dict[int, Overhead]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OverheadStudy(Bros[OverheadPoint]):
    """Run BROS's figure 14: what scheduling takes of an iteration.

    Decisions (planning and committing a step) run on this machine and are timed. Steps and copies are those
    of a simulated device.

    Attributes:
        repeats: runs of each point. A step's decision takes the median of its times in them.
    """

    models: str = ",".join(OVERHEAD_MODELS)
    rates: str = ",".join(f"{rate:g}" for rate in OVERHEAD_RATES_PER_S)
    duration: float = bounded(OVERHEAD_DURATION_S, least=LEAST_DURATION_S, most=MOST)
    policies: str = ",".join(OVERHEAD_POLICIES)
    repeats: int = bounded(3, least=1, most=1000)

    scenario: ClassVar[str] = "bros-overhead"
    title: ClassVar[str] = "BROS, figure 14: decisions measured on this machine, steps of a simulated device"
    how: ClassVar[str] = "seeds"  # a process beside it would disturb what is measured

    def simulate(self) -> Callable[[Simulation], Any]:
        return partial(run_repeatedly, repeats=self.repeats)

    def point(self, setting: Setting, outcomes: Outcomes) -> OverheadPoint:
        point = OverheadPoint(setting)
        for policy, runs in outcomes.items():
            num_running = np.concatenate([run.num_running for run in runs])
            decision_s = np.concatenate([run.decision_s for run in runs])
            step_s = np.concatenate([run.step_s for run in runs])
            point.policies[policy] = Overhead.of(decision_s, step_s, sum(run.copy_s for run in runs))
            group = np.searchsorted(GROUPS, num_running)  # the first that is at least as many
            point.groups[policy] = {
                most: Overhead.of(decision_s[group == index], step_s[group == index])
                for index, most in enumerate(GROUPS)
                if (group == index).any()
            }
        return point

    def report(self, console: Console, points: Sequence[OverheadPoint]) -> None:
        for point in points:
            _print_point(console, point)

    def as_json(self, points: Sequence[OverheadPoint]) -> dict[str, Any]:
        def content(overhead: Overhead) -> dict[str, Any]:
            return {name: value for name, value in asdict(overhead).items() if value is not None}

        return {
            "duration_s": self.duration,
            "repeats": self.repeats,
            "points": [
                {
                    **point.setting._asdict(),
                    "policies": {
                        policy: {
                            **content(overhead),
                            "by_running": {
                                str(most): content(each) for most, each in point.groups[policy].items()
                            },
                        }
                        for policy, overhead in point.policies.items()
                    },
                }
                for point in points
            ],
            "paper": {model: {"share": list(shares)} for model, shares in PAPER_SHARES.items()},
        }

    def draw(self, figure: Figure, points: Sequence[OverheadPoint]) -> None:
        """A row for each model: breakdown of an iteration, and decisions by running requests."""
        models = self.names("models", MODELS)
        figure.set_size_inches(11, 1 + _ROW_INCHES * len(models))
        figure.suptitle("BROS, figure 14: decisions measured on this machine beside steps of a simulated one")
        axes = figure.subplots(len(models), 2, squeeze=False)
        for row, model in zip(axes, models, strict=True):
            of_model = [point for point in points if point.setting.model == model]
            _draw_breakdown(row[0], of_model)
            _draw_groups(row[1], of_model)
            row[0].set(ylabel=f"{model}\nms of an iteration, medians")
            if model in PAPER_SHARES:
                low, high = PAPER_SHARES[model]
                row[0].set(title=f"paper: {low:.1%} to {high:.1%} for scheduling")


app = command_of(OverheadStudy, "EXPERIMENTS_")

_CAPTION = (
    "requests: that have blocks; share: of decisions in an iteration; copies: their time over the steps'"
)


def _print_point(console: Console, point: OverheadPoint) -> None:
    title = f"{point.setting}"
    if point.setting.model in PAPER_SHARES:
        low, high = PAPER_SHARES[point.setting.model]
        title += f" (paper: scheduling is {low:.2%} to {high:.2%} of an iteration)"
    names, numbers = ("policy", "requests"), ("steps", "decision ms", "step ms", "share", "copies")
    table = table_of(title, *names, *numbers, left=names, caption=_CAPTION)
    for policy, overhead in point.policies.items():
        table.add_row(policy, "any", *_cells(overhead))
        for most, of_group in point.groups[policy].items():
            table.add_row("", f"up to {most}", *_cells(of_group))
        table.add_section()
    console.print(table)


def _cells(overhead: Overhead) -> list[str]:
    return [
        str(overhead.num_steps),
        f"{overhead.decision_ms:.3f}",
        f"{overhead.step_ms:.2f}",
        f"{overhead.share:.2%}",
        cell(overhead.copy_share, ".2%"),
    ]


def _draw_breakdown(axis: Axes, points: list[OverheadPoint]) -> None:
    bars = [(point.setting, policy, each) for point in points for policy, each in point.policies.items()]
    at = np.arange(len(bars))
    step_ms = np.array([each.step_ms for *_, each in bars])
    decision_ms = np.array([each.decision_ms for *_, each in bars])
    axis.bar(at, step_ms, color="#bdbdbd", label="step, simulated")
    colours = [COLOURS[policy] for _, policy, _ in bars]
    axis.bar(at, decision_ms, bottom=step_ms, color=colours, label="decision, measured")
    for x, height, (*_, each) in zip(at, step_ms + decision_ms, bars, strict=True):
        axis.annotate(f"{each.share:.1%}", (x, height), ha="center", va="bottom", fontsize=7)
    names = [f"{setting.workload} {setting.rate_per_s:g}/s\n{policy}" for setting, policy, _ in bars]
    axis.set_xticks(at, names, fontsize=6, rotation=30)
    axis.margins(y=0.15)
    axis.legend(fontsize=7)


def _draw_groups(axis: Axes, points: list[OverheadPoint]) -> None:
    for point in points:
        for policy, groups in point.groups.items():
            values = [groups[most].decision_ms if most in groups else np.nan for most in GROUPS]
            label = f"{policy}, {point.setting.workload} {point.setting.rate_per_s:g}/s"
            axis.plot(range(len(GROUPS)), values, color=COLOURS[policy], marker=".", label=label)
    axis.set_xticks(range(len(GROUPS)), [f"up to {most}" for most in GROUPS])
    axis.set(xlabel="requests that hold blocks", ylabel="decision (ms)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6)
