"""BlendServe's evaluation (sections 5.2 to 5.4, appendix A.2) on a simulated A100."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import numpy as np

from backfill.blending.requests import OrderName
from backfill.core.errors import ConfigError
from backfill.costs.overlap import INTERFERENCE
from backfill.simulation.blend_mix import MixSpec, Usage
from backfill.simulation.blend_run import HARDWARE, PoolResult, PoolRun, run_pool
from backfill.simulation.blend_sources import COMPUTE_SOURCES, SOURCES, TraceFigures
from backfill.simulation.progress import SweepProgress
from backfill.simulation.sweep import check_names, check_positive, processes

ORDERS: tuple[OrderName, ...] = ("fcfs", "random", "dfs", "batchllm", "blend")
REFERENCE: OrderName = "dfs"
BLEND: OrderName = "blend"
_SOURCE_SAMPLE = 20_000


class Target(NamedTuple):
    """Compute density and share of shared tokens of a pool."""

    density: float
    sharing: float


# Table 2, in its order.
TRACES: Mapping[str, Target] = {
    "trace 1": Target(1.4, 0.35),
    "trace 2": Target(0.9, 0.35),
    "trace 3": Target(1.4, 0.05),
    "trace 4": Target(0.9, 0.05),
}
# Section 5.4: 65 pools.
GRID_DENSITIES = tuple(round(0.8 + 0.05 * step, 2) for step in range(13))
GRID_SHARINGS = (0.05, 0.15, 0.25, 0.35, 0.45)
# What the paper prints: mean throughput over a DFS order, and its least and greatest; where it gives none for
# a source, those of the three sources of its appendix together.
PAPER_GRID: Mapping[str, tuple[float | None, float, float]] = {
    "burstgpt": (1.2253, 1.14, 1.34),
    "azure": (None, 1.08, 1.31),
    "sharegpt": (None, 1.08, 1.17),
    "wildchat": (None, 1.08, 1.31),
}
GRID_FIGURES: Mapping[str, int] = {"burstgpt": 9, "azure": 10, "sharegpt": 11, "wildchat": 12}
"""The paper's figure of each source's grid."""
PAPER_TABLE2 = {
    "speedup_mean": 1.2084,
    "speedup_least": 1.1934,
    "speedup_most": 1.2265,
    "of_optimum": 0.8655,
    "of_optimal_sharing": 0.97,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendExperiment:
    """What to run.

    Attributes:
        targets: of the pools, which are drawn one by one.
        source: of the compute-bound requests.
        orders: each runs on every pool.
        num_requests: of a pool.
        interference: name of an ``Overlap``.
        num_seeds: figures are means over the seeds 1 to this.
        lengths: file of the source's lengths; None draws them.
    """

    targets: tuple[Target, ...]
    source: str = "burstgpt"
    orders: tuple[OrderName, ...] = ORDERS
    num_requests: int = 40_000
    interference: str = "blendserve"
    num_seeds: int = 1
    lengths: Path | None = None

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_names("source", (self.source,), COMPUTE_SOURCES)
        check_names("orders", self.orders, get_args(OrderName))
        check_names("interference", (self.interference,), INTERFERENCE)
        check_positive(requests=self.num_requests, seeds=self.num_seeds)
        if not self.targets:
            raise ConfigError("There is no pool to run.")
        for target in self.targets:
            check_positive(densities=target.density)
            if not 0.0 <= target.sharing < 1.0:
                raise ConfigError(f"`sharings` must be at least 0 and below 1, got {target.sharing:g}.")

    def mix(self, target: Target, seed: int) -> MixSpec:
        return MixSpec(self.source, target.density, target.sharing, self.num_requests, seed, self.lengths)

    def runs(self) -> list[PoolRun]:
        """Orders of one pool after another, so that a process draws few pools twice."""
        return [
            PoolRun(self.mix(target, seed), order, self.interference)
            for target, seed in itertools.product(self.targets, range(1, self.num_seeds + 1))
            for order in self.orders
        ]


@dataclass(frozen=True, slots=True)
class OrderFigures:
    """One order on one pool, means over the seeds.

    Attributes:
        tokens_per_s: prompt and output tokens.
        sharing: share of prompt tokens found in the prefix cache.
        of_optimal_sharing: these over those that a perfect cache finds.
        of_optimum: throughput over the achievable optimum (section 5.2).
        of_optimum_with_longest: where that has no fewer steps than the longest output has tokens.
        num_preemptions: requests that were preempted for lack of KV memory, and ran on later.
    """

    tokens_per_s: float
    sharing: float
    of_optimal_sharing: float
    of_optimum: float
    of_optimum_with_longest: float
    num_steps: float
    num_preemptions: float
    recomputed_share: float

    @classmethod
    def mean(cls, results: Sequence[PoolResult]) -> OrderFigures:
        return cls(
            fmean(each.tokens_per_s for each in results),
            fmean(each.sharing for each in results),
            fmean(each.of_optimal_sharing for each in results),
            fmean(each.of_optimum for each in results),
            fmean(each.of_optimum_with_longest for each in results),
            fmean(each.num_steps for each in results),
            fmean(each.counters.num_preemptions for each in results),
            fmean(each.recomputed_share for each in results),
        )


@dataclass(frozen=True, slots=True)
class BlendPoint:
    """Every order on the pools of one target.

    Attributes:
        drawn: density and sharing that the first seed's pool has.
        usage: the first seed's results, for plots; empty where the point was read from a file.
    """

    target: Target
    drawn: TraceFigures
    num_requests: Mapping[str, int]
    orders: Mapping[OrderName, OrderFigures]
    usage: Mapping[OrderName, PoolResult]

    def speedup(self, order: OrderName = BLEND, over: OrderName = REFERENCE) -> float | None:
        """Throughput of an order over that of another; None unless both ran."""
        if order not in self.orders or over not in self.orders:
            return None
        return self.orders[order].tokens_per_s / self.orders[over].tokens_per_s

    def usage_as_json(self) -> dict[str, Any]:
        """Seconds of either resource, averaged over runs of equally many steps (figure 8)."""
        return {
            order: {
                "num_steps": result.num_steps,
                "compute_s": result.compute_s.tolist(),
                "memory_s": result.memory_s.tolist(),
            }
            for order, result in self.usage.items()
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target._asdict(),
            "drawn": self.drawn._asdict(),
            "num_requests": dict(self.num_requests),
            "speedup": self.speedup(),
            "orders": {
                order: {name: getattr(figures, name) for name in OrderFigures.__slots__}
                for order, figures in self.orders.items()
            },
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> BlendPoint:
        """Of ``as_json``. Raises: KeyError, TypeError or AttributeError for anything else."""
        return cls(
            Target(**content["target"]),
            TraceFigures(**content["drawn"]),
            content["num_requests"],
            {order: OrderFigures(**figures) for order, figures in content["orders"].items()},
            {},
        )


@dataclass(slots=True)
class BlendResult:
    """Figures of an experiment."""

    scenario: str
    experiment: BlendExperiment
    points: list[BlendPoint] = field(default_factory=list)

    def speedups(self, order: OrderName = BLEND, over: OrderName = REFERENCE) -> list[float]:
        """Of each pool on which both ran."""
        found = (point.speedup(order, over) for point in self.points)
        return [each for each in found if each is not None]

    def as_json(self) -> dict[str, Any]:
        experiment = self.experiment
        speedups = self.speedups()
        return {
            "scenario": self.scenario,
            "hardware": HARDWARE,
            "source": experiment.source,
            "num_requests": experiment.num_requests,
            "interference": experiment.interference,
            "num_seeds": experiment.num_seeds,
            "points": [point.as_json() for point in self.points],
            "speedup_mean": fmean(speedups) if speedups else None,
        }


def run_blend(
    scenario: str,
    experiment: BlendExperiment,
    num_processes: int = 1,
    on_done: Callable[[PoolRun, PoolResult], None] = lambda *_: None,
    *,
    on_point: Callable[[BlendPoint], None] = lambda _: None,
    finished: Mapping[Target, BlendPoint] = MappingProxyType({}),
    progress: SweepProgress | None = None,
) -> BlendResult:
    """Run every order on every pool. ``on_done`` is called after each, in order.

    Results do not depend on ``num_processes``. Raises: ConfigError.

    Args:
        on_point: is called once all runs of a target are done.
        finished: points of an earlier run, which are not run again.
        progress: counts what has been done of the runs.
    """
    experiment.validate()
    left = tuple(target for target in experiment.targets if target not in finished)
    runs = replace(experiment, targets=left).runs()
    result = BlendResult(scenario, experiment)
    with processes(num_processes, progress) as pool:
        done = iter(zip(runs, pool.map(run_pool, runs), strict=True))
        for target in experiment.targets:
            if (point := finished.get(target)) is None:
                results: dict[OrderName, list[PoolResult]] = {order: [] for order in experiment.orders}
                for run, each in itertools.islice(done, experiment.num_seeds * len(experiment.orders)):
                    results[run.order].append(each)
                    on_done(run, each)
                point = _point(target, results)
                on_point(point)
            result.points.append(point)
    return result


def _point(target: Target, results: Mapping[OrderName, Sequence[PoolResult]]) -> BlendPoint:
    first = next(iter(results.values()))[0]
    return BlendPoint(
        target,
        first.drawn,
        first.num_requests,
        {order: OrderFigures.mean(of_order) for order, of_order in results.items()},
        {order: of_order[0] for order, of_order in results.items()},
    )


def source_figures(source: str, lengths: Path | None = None, seed: int = 1) -> TraceFigures:
    """Sharing and density of one source by itself, beside the paper's table 3. Raises: ConfigError."""
    rng = np.random.default_rng(seed)
    kind = SOURCES[source]
    if lengths is None:
        return Usage.of(kind.draw(_SOURCE_SAMPLE, rng)).figures
    return Usage.of(kind.draw_from(lengths, _SOURCE_SAMPLE, rng)).figures
