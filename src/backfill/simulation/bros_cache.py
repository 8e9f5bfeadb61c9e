"""BROS's evaluation of its KV cache: two requests in a block against other ways to preempt (figure 13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from backfill.simulation.bros import SLO_OF_ALL, BrosExperiment, Setting, run_points
from backfill.simulation.kv_usage import KVUsage
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.sweep import Simulation, mean_figures

CACHE_MODEL, CACHE_RATE_PER_S = "opt-30b", 10.0  # section 7.4.1
CACHE_POLICIES = ("bros-recompute-late", "bros-recompute", "bros-swap", "bros", "bros-bidirectional")
BIDIRECTIONAL = "bros-bidirectional"
# The paper's is "simply recomputation for requests failing to acquire cache blocks". Whether a waiting online
# request then still preempts offline ones is not said: the first one does not.
BASELINES = ("bros-recompute-late", "bros-recompute")
PAPER_RATIOS: Mapping[str, float] = {"ttft_attainment": 1.23, "tpot_attainment": 1.63}
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
    return CacheRun(metrics_of(simulation.replay(usage), simulation.slo), usage)


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


@dataclass(slots=True)
class CacheResult:
    experiment: BrosExperiment
    points: list[CachePoint]

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": "bros-cache",
            "slo": asdict(SLO_OF_ALL),
            "duration_s": self.experiment.duration_s,
            "num_seeds": self.experiment.num_seeds,
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
                for point in self.points
            ],
            "paper": {
                "model": CACHE_MODEL,
                "rate_per_s": CACHE_RATE_PER_S,
                BIDIRECTIONAL: {"over recomputation": dict(PAPER_RATIOS)},
            },
        }


def run_bros_cache(
    experiment: BrosExperiment,
    num_processes: int = 1,
    on_done: Callable[[Setting, str], None] = lambda *_: None,
) -> CacheResult:
    """Run every policy at every point. ``on_done`` is called after each, in order.

    Results do not depend on ``num_processes``. Raises: ConfigError.
    """
    points: dict[Setting, CachePoint] = {}

    def receive(setting: Setting, policy: str, runs: Sequence[CacheRun]) -> None:
        point = points.setdefault(setting, CachePoint(setting))
        of_pool = [run.usage.figures() for run in runs]
        point.policies[policy] = {
            **mean_figures(_METRICS, [run.metrics for run in runs]),
            **{name: fmean(each[name] for each in of_pool) for name in of_pool[0]},
        }
        point.usages[policy] = runs[0].usage
        on_done(setting, policy)

    run_points(experiment, run_observed, num_processes, receive)
    return CacheResult(experiment, list(points.values()))
