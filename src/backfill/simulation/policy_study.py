"""Policies compared at the points of a scenario, under several seeds."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from rich.console import Console

from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.hardware import HardwareProfile
from backfill.costs.profile import CostProfile
from backfill.simulation.metrics import PolicyMetrics, metrics_of, percentile
from backfill.simulation.replay import BIN_S, ReplayResult, Workload
from backfill.simulation.study import Outcomes, Run, Study
from backfill.simulation.tables import print_figures
from backfill.simulation.variants import COLOURS, VARIANTS, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WINDOW_S = 20.0

Setting = tuple[tuple[str, float], ...]
"""Names and values of what varies."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated under one seed.

    Attributes:
        title: is printed first, and ``notes`` below it.
        points: a workload for each setting.
        behaviour, profile: see ``Simulation``.
        seed: of the workloads and of the device's noise.
    """

    title: str
    points: Mapping[Setting, Workload]
    hardware: HardwareProfile
    slo: SLO
    max_num_batched_tokens: int
    seed: int
    behaviour: DeviceBehaviour | None = None
    profile: CostProfile | None = None
    notes: Sequence[str] = ()


class PolicyRun(NamedTuple):
    """One policy at one setting under one seed."""

    scenario: Scenario
    metrics: PolicyMetrics
    replay: ReplayResult


class Spread(NamedTuple):
    """A figure over the seeds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class PolicyPoint(NamedTuple):
    """The runs of each policy at one setting, in the order of the seeds."""

    setting: Setting
    runs: Mapping[str, Sequence[PolicyRun]]

    @property
    def of_seeds(self) -> Sequence[PolicyRun]:
        """A run of each seed, of any policy."""
        return next(iter(self.runs.values()))

    def spreads(self) -> dict[str, dict[str, Spread]]:
        """By policy and by name of ``PolicyMetrics``."""
        figures = {policy: [asdict(run.metrics) for run in runs] for policy, runs in self.runs.items()}
        return {
            policy: {name: Spread.of([each[name] for each in of_seeds]) for name in of_seeds[0]}
            for policy, of_seeds in figures.items()
        }


@dataclass(frozen=True, kw_only=True)
class PolicyStudy(Study[PolicyPoint]):
    """Policies at the points of a scenario. Figures are medians over the seeds.

    Attributes:
        policies: policies to compare, separated by commas.
        figures: names of ``PolicyMetrics`` that are printed, separated by spaces.
        paper: a paper's figures by policy, with names of ``PolicyMetrics`` where these exist.
    """

    policies: str

    how: ClassVar[str] = "seeds first_seed"
    figures: ClassVar[str]
    paper: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def scenario_of(self, seed: int) -> Scenario:
        """Raises: ConfigError."""

    def heading(self, seed: int) -> list[str]:
        scenario = self.scenario_of(seed)
        hardware, slo = scenario.hardware, scenario.slo
        objectives = f"objectives {slo.ttft_s:g} s and {slo.tpot_s * 1000:g} ms"
        return [
            scenario.title,
            f"{hardware.name}, {hardware.kv_tokens} tokens of KV, {objectives}",
            *scenario.notes,
        ]

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        return [
            Run(setting, policy, seed, partial(_replay, scenario, workload, policy))
            for seed in seeds
            for scenario in (self.scenario_of(seed),)
            for setting, workload in scenario.points.items()
            for policy in self.names("policies", VARIANTS)
        ]

    def point(self, setting: Setting, outcomes: Outcomes) -> PolicyPoint:
        return PolicyPoint(setting, outcomes)

    def describe(self, run: Run, outcome: PolicyRun) -> str:
        what = _title((*cast("Setting", run.point), ("seed", run.seed)))
        return f"{what}: {run.system} done, {outcome.metrics.num_steps} steps"

    def report(self, console: Console, points: Sequence[PolicyPoint]) -> None:
        """A table for each point: a column for each policy, beside it the paper's figures if it has any."""
        for point in points:
            num_seeds = len(point.of_seeds)
            columns: dict[str, Mapping[str, object]] = {}
            for policy, spreads in point.spreads().items():
                columns[policy] = spreads
                paper = self.paper.get(policy, {})
                if any(name in paper for name in self.figures.split()):
                    columns[f"{policy} (paper)"] = paper
            seeds = f", {num_seeds} seeds: median (least to most)" if num_seeds > 1 else ""
            print_figures(console, _title(point.setting) + seeds, self.figures, columns)

    def as_json(self, points: Sequence[PolicyPoint]) -> dict[str, Any]:
        """``policies`` are those of the first setting; a study of several also has ``points``."""
        runs = points[0].of_seeds
        medians = [
            {
                policy: {name: spread.median for name, spread in spreads.items()}
                for policy, spreads in point.spreads().items()
            }
            for point in points
        ]
        of_seeds = [
            [{policy: asdict(runs[index].metrics) for policy, runs in point.runs.items()} for point in points]
            for index in range(len(runs))
        ]
        settings = [point.setting for point in points]
        return {
            "hardware": runs[0].scenario.hardware.name,
            "slo": asdict(runs[0].scenario.slo),
            **_points_json(settings, medians),
            "paper": self.paper,
            "seeds": [run.scenario.seed for run in runs],
            "runs": [
                {"seed": run.scenario.seed, **_points_json(settings, figures)}
                for run, figures in zip(runs, of_seeds, strict=True)
            ],
        }

    def draw(self, figure: Figure, points: Sequence[PolicyPoint]) -> None:
        """Of the first seed: latency and throughput over time, or at each of several settings."""
        figure.set_size_inches(10, 9)
        figure.suptitle(points[0].of_seeds[0].scenario.title)
        axes = figure.subplots(3, 1, sharex=True)
        if len(points) == 1:
            _draw_timeline(axes, points[0])
        else:
            _draw_settings(axes, points)


def _replay(scenario: Scenario, workload: Workload, policy: str) -> PolicyRun:
    simulation = Simulation(
        scenario.hardware,
        policy,
        workload,
        scenario.slo,
        scenario.max_num_batched_tokens,
        scenario.seed,
        scenario.behaviour,
        scenario.profile,
    )
    replay = simulation.replay()
    return PolicyRun(scenario, metrics_of(replay, scenario.slo), replay)


def _points_json(settings: Sequence[Setting], policies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {"policies": policies[0]}
    if len(settings) > 1:
        content["points"] = [
            {**dict(setting), "policies": each} for setting, each in zip(settings, policies, strict=True)
        ]
    return content


def _title(setting: Setting) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in setting)


def _draw_timeline(axes: Sequence[Axes], point: PolicyPoint) -> None:
    slo = point.of_seeds[0].scenario.slo
    for policy, (first, *_) in point.runs.items():
        replay, colour = first.replay, COLOURS[policy]
        starts = np.arange(0.0, replay.duration_s, _WINDOW_S)
        for axis, samples in ((axes[0], _ttfts(replay)), (axes[1], _gaps(replay))):
            worst = [percentile(_within(samples, start), 99) or np.nan for start in starts]
            axis.plot(starts, worst, color=colour, label=policy, marker=".")  # a lone window has no line
        at_s = np.arange(len(replay.timeline)) * BIN_S
        tokens = [each.total() / BIN_S for each in replay.timeline]
        axes[2].plot(at_s, tokens, color=colour, label=policy, linewidth=1)
    for axis, limit, name in ((axes[0], slo.ttft_s, "TTFT"), (axes[1], slo.tpot_s, "inter-token gap")):
        axis.axhline(limit, color="red", linewidth=0.8, label="objective")
        axis.set(yscale="log", ylabel=f"P99 {name} (s)")
        axis.legend(fontsize=8)
    axes[2].set(xlabel="s", ylabel="tokens/s, online and offline", xlim=(0, replay.duration_s))


def _draw_settings(axes: Sequence[Axes], points: Sequence[PolicyPoint]) -> None:
    labels = [_title(point.setting) for point in points]
    for axis, name in zip(axes, ("ttft_p99_s", "itl_p99_s", "offline_tok_s"), strict=True):
        for index, policy in enumerate(points[0].runs):
            width = 0.8 / len(points[0].runs)
            at = np.arange(len(labels)) + index * width
            values = [getattr(point.runs[policy][0].metrics, name) for point in points]
            axis.bar(at, values, width, color=COLOURS[policy], label=policy)
        axis.set(ylabel=name)
        axis.set_xticks(np.arange(len(labels)) + 0.3, labels, fontsize=7)
    axes[0].set(yscale="log")
    axes[0].legend(fontsize=8)


def _ttfts(replay: ReplayResult) -> list[tuple[float, float]]:
    return [(record.arrived_at_s, record.ttft_s) for record in replay.online]


def _gaps(replay: ReplayResult) -> list[tuple[float, float]]:
    return [gap for record in replay.online for gap in zip(record.token_at_s, record.gaps_s(), strict=False)]


def _within(samples: list[tuple[float, float]], start_s: float) -> list[float]:
    return [value for at_s, value in samples if start_s <= at_s < start_s + _WINDOW_S]
