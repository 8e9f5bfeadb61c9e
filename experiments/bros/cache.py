"""BROS's figure 13: two requests in a block against other ways to preempt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from rich.console import Console

from backfill.cli.studies import command_of
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.study import Outcomes, mean_figures
from backfill.simulation.tables import print_rows
from backfill.simulation.variants import COLOURS, VARIANTS, Simulation
from experiments.bros.engine import late_bros, observed_by
from experiments.bros.kv_usage import SAMPLE_S, KVUsage, KVUse
from experiments.bros.tradeoff import SLO_OF_ALL, Bros, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CACHE_MODEL, CACHE_RATE_PER_S = "opt-30b", 10.0  # section 7.4.1
# The paper's is "simply recomputation for requests failing to acquire cache blocks". Whether a waiting online
# request then still preempts offline ones is not said: with ``LATE`` it does not.
LATE, WITHOUT = "bros-recompute-late", "bros-recompute"
BASELINES = (LATE, WITHOUT)
CACHE_POLICIES = (*BASELINES, "bros-swap", "bros-checkpoint", "bros")
BIDIRECTIONAL = "bros"
PAPER_RATIOS: Mapping[str, float] = {"ttft_attainment": 1.23, "tpot_attainment": 1.63}
_ROW_INCHES, _COLUMN_INCHES = 2.8, 3.4
_COLOURS = {**COLOURS, LATE: "#7a0177"}
_USE_COLOURS = ("#2166ac", "#e08214", "#762a83", "#fdb863", "#d9d9d9", "#ffffff")  # as in ``KVUse``
_METRICS = (
    "normalized_latency_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "ttft_attainment",
    "tpot_attainment",
    "attainment",
    "offline_rps",
    "num_preemptions",
    "recomputed_token_share",
    "checkpointed_token_share",
    "restored_token_share",
)


@dataclass(frozen=True, slots=True)
class CacheRun:
    """One policy on one workload, and what the KV pool was used for meanwhile."""

    metrics: PolicyMetrics
    usage: KVUsage


def run_observed(simulation: Simulation) -> CacheRun:
    """Run it with its KV pool observed."""
    usage = KVUsage(simulation.workload.duration_s)
    create_engine = observed_by(usage)
    if simulation.policy == LATE:
        simulation, create_engine = replace(simulation, policy=WITHOUT), observed_by(usage, late_bros)
    return CacheRun(metrics_of(simulation.replay(create_engine), simulation.slo), usage)


@dataclass(frozen=True, slots=True)
class CachePoint:
    """Policies at one setting.

    Attributes:
        policies: figures of each, means over the seeds: of ``PolicyMetrics``, and of ``KVUsage.figures``.
        usages: of each policy's first seed.
    """

    setting: Setting
    policies: dict[str, Mapping[str, float]] = field(default_factory=dict)
    usages: dict[str, KVUsage] = field(default_factory=dict)

    def over(self, policy: str, baseline: str) -> dict[str, float]:
        """Attainments over the baseline's, without those that are 0 there; empty if it has not run."""
        if baseline not in self.policies or policy == baseline:
            return {}
        own, other = self.policies[policy], self.policies[baseline]
        return {name: own[name] / other[name] for name in PAPER_RATIOS if other[name] > 0}


@dataclass(frozen=True, kw_only=True)
class Cache(Bros[CachePoint]):
    """Run BROS's figure 13: blocks that two requests share, and other ways to preempt a request.

    Prints attainments beside the paper's ratios and what the KV pool is used for; the plot has it over time.
    """

    models: str = CACHE_MODEL
    rates: str = f"{CACHE_RATE_PER_S:g}"
    policies: str = ",".join(CACHE_POLICIES)

    scenario: ClassVar[str] = "bros-cache"
    title: ClassVar[str] = "BROS, figure 13: bidirectional KV cache"
    known_policies: ClassVar[Collection[str]] = (*VARIANTS, LATE)

    def simulate(self) -> Callable[[Simulation], Any]:
        return run_observed

    def point(self, setting: Setting, outcomes: Outcomes) -> CachePoint:
        point = CachePoint(setting)
        for policy, runs in outcomes.items():
            of_pool = [run.usage.figures() for run in runs]
            point.policies[policy] = {
                **mean_figures(_METRICS, [run.metrics for run in runs]),
                **{name: fmean(each[name] for each in of_pool) for name in of_pool[0]},
            }
            point.usages[policy] = runs[0].usage
        return point

    def report(self, console: Console, points: Sequence[CachePoint]) -> None:
        for point in points:
            print_rows(console, f"{point.setting}", _LATENCIES, point.policies)
            title = f"{point.setting}: parts of the KV pool, means over time"
            print_rows(console, title, _POOL, point.policies)
            _print_ratios(console, point)

    def as_json(self, points: Sequence[CachePoint]) -> dict[str, Any]:
        return {
            "slo": asdict(SLO_OF_ALL),
            "duration_s": self.duration,
            "points": [
                {
                    **point.setting._asdict(),
                    "policies": {
                        policy: {
                            **figures,
                            **{f"over {each}": point.over(policy, each) for each in BASELINES},
                        }
                        for policy, figures in point.policies.items()
                    },
                }
                for point in points
            ],
            "paper": {
                "model": CACHE_MODEL,
                "rate_per_s": CACHE_RATE_PER_S,
                BIDIRECTIONAL: {"over recomputation": dict(PAPER_RATIOS)},
            },
        }

    def draw(self, figure: Figure, points: Sequence[CachePoint]) -> None:
        """A row for each point: attainments, then each policy's use of the pool over time."""
        policies = self.all_policies
        rows, columns = len(points), 1 + len(policies)
        figure.set_size_inches(_COLUMN_INCHES * columns, 1 + _ROW_INCHES * rows)
        figure.suptitle("BROS, figure 13: attainments, and KV blocks by class over time (first seed)")
        axes = figure.subplots(rows, columns, squeeze=False)
        for row, point in zip(axes, points, strict=True):
            _draw_attainments(row[0], point)
            for axis, policy in zip(row[1:], policies, strict=True):
                _draw_usage(axis, point.usages[policy])
                axis.set(title=policy, xlabel="s", ylim=(0, 1))
        axes[0][1].legend(fontsize=7, loc="lower right")


app = command_of(Cache, "EXPERIMENTS_")

_LATENCIES = {
    "normalized_latency_s": ("latency/token s", ".3f"),
    "ttft_attainment": ("TTFT met", ".1%"),
    "tpot_attainment": ("TPOT met", ".1%"),
    "offline_rps": ("offline req/s", ".2f"),
    "num_preemptions": ("preempted", ".0f"),
    "recomputed_token_share": ("recomputed", ".1%"),
    "restored_token_share": ("restored", ".1%"),
}
_POOL = {
    "usable": ("usable", ".3f"),
    "online": ("online", ".1%"),
    "offline": ("offline", ".1%"),
    "shared": ("shared", ".2%"),
    "preempted": ("preempted", ".1%"),
    "sharing_steps": ("steps sharing", ".0%"),
    "num_entered_blocks": ("entered", ".0f"),
    "num_copied_slots": ("slots copied", ".0f"),
    "num_overwritten_slots": ("overwritten", ".0f"),
}
_RATIOS = {"ttft_attainment": ("TTFT met", ".2f"), "tpot_attainment": ("TPOT met", ".2f")}


def _print_ratios(console: Console, point: CachePoint) -> None:
    """How many times as many requests of the same load meet each objective."""
    for baseline in BASELINES:
        columns = {policy: point.over(policy, baseline) for policy in point.policies}
        if any(columns.values()):
            title = f"{point.setting}: attainments over those of {baseline}"
            columns[f"{BIDIRECTIONAL} (paper)"] = dict(PAPER_RATIOS)
            print_rows(console, title, _RATIOS, columns)


def _draw_attainments(axis: Axes, point: CachePoint) -> None:
    names = {
        "ttft_attainment": f"TTFT within\n{SLO_OF_ALL.ttft_s:g} s",
        "tpot_attainment": f"TPOT within\n{SLO_OF_ALL.tpot_s:g} s",
    }
    width = 0.8 / len(point.policies)
    for index, (policy, figures) in enumerate(point.policies.items()):
        at = np.arange(len(names)) + index * width
        axis.bar(at, [figures[name] for name in names], width, color=_COLOURS[policy], label=policy)
    axis.set_xticks(np.arange(len(names)) + 0.4 - width / 2, list(names.values()), fontsize=8)
    setting = point.setting
    label = f"{setting.model}, {setting.workload}\n{setting.rate_per_s:g} requests/s"
    axis.set(ylim=(0, 1), ylabel=label)
    axis.legend(fontsize=7)


def _draw_usage(axis: Axes, usage: KVUsage) -> None:
    at_s = np.arange(len(usage.samples)) * SAMPLE_S
    shares = np.array([sample.use for sample in usage.samples]).T / usage.num_blocks
    axis.stackplot(at_s, shares, labels=KVUse._fields, colors=_USE_COLOURS)
