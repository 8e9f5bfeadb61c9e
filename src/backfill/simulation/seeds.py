"""Runs a scenario under several seeds and summarizes its figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.scenarios import Scenario, ScenarioResult, run_scenario

# Seed 0 is for tuning: rates, limits and the code's constants were chosen with it. What is reported must not
# come from it.
TUNING_SEED = 0
FIRST_REPORTED_SEED = 1

OnDone: TypeAlias = Callable[[int, Mapping[str, float], str, PolicyMetrics], None]


class Spread(NamedTuple):
    """A figure over the seeds."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class SeededResult:
    """Results of one scenario by seed, in the order of the seeds."""

    runs: Mapping[int, ScenarioResult]

    @property
    def first(self) -> ScenarioResult:
        return next(iter(self.runs.values()))

    @property
    def scenario(self) -> Scenario:
        return self.first.scenario

    def spreads(self, point: int) -> dict[str, dict[str, Spread]]:
        """The figures of a point, by its number, by policy and by name of ``PolicyMetrics``."""
        by_policy = {
            policy: [asdict(run.points[point].metrics[policy]) for run in self.runs.values()]
            for policy in self.first.points[point].metrics
        }
        return {
            policy: {name: spread_of([each[name] for each in figures]) for name in figures[0]}
            for policy, figures in by_policy.items()
        }

    def as_json(self) -> dict[str, Any]:
        """As ``ScenarioResult.as_json``, with medians, and with each seed's own figures in ``runs``."""
        medians = [
            {
                policy: {name: spread.median for name, spread in spreads.items()}
                for policy, spreads in self.spreads(index).items()
            }
            for index in range(len(self.first.points))
        ]
        content = {**self.first.as_json(), "seeds": list(self.runs), "policies": medians[0]}
        if "points" in content:
            content["points"] = [
                {**point.setting, "policies": policies}
                for point, policies in zip(self.first.points, medians, strict=True)
            ]
        results = {seed: run.as_json() for seed, run in self.runs.items()}
        content["runs"] = [
            {"seed": seed, **{name: result[name] for name in ("policies", "points") if name in result}}
            for seed, result in results.items()
        ]
        return content


def run_seeds(
    build: Callable[[int], Scenario], seeds: Sequence[int], policies: Sequence[str], on_done: OnDone
) -> SeededResult:
    """Build and run a scenario for each seed, at least one. ``on_done`` gets the seed of each replay too."""

    def run(seed: int) -> ScenarioResult:
        def replayed(setting: Mapping[str, float], policy: str, metrics: PolicyMetrics) -> None:
            on_done(seed, setting, policy, metrics)

        return run_scenario(build(seed), policies, replayed)

    return SeededResult({seed: run(seed) for seed in seeds})


def spread_of(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
