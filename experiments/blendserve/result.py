"""BlendServe's pools and the paper's figures of them; figures of orders on a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from backfill.blending.requests import OrderName
from backfill.simulation.study import mean_figures
from experiments.blendserve.pool import PoolResult
from experiments.blendserve.sources import TraceFigures

ORDERS: tuple[OrderName, ...] = ("fcfs", "random", "dfs", "batchllm", "blend")
REFERENCE: OrderName = "dfs"
BLEND: OrderName = "blend"


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
        return cls(**mean_figures(cls.__slots__, results))


@dataclass(frozen=True, slots=True)
class BlendPoint:
    """Every order on the pools of one target.

    Attributes:
        drawn: density and sharing that the first seed's pool has.
        usage: the first seed's results, for plots; empty where the point was read from a file.
        num_seeds: that the figures are means over.
    """

    target: Target
    drawn: TraceFigures
    num_requests: Mapping[str, int]
    orders: Mapping[OrderName, OrderFigures]
    usage: Mapping[OrderName, PoolResult]
    num_seeds: int = 1

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
            "orders": {order: asdict(figures) for order, figures in self.orders.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> BlendPoint:
        """Of ``as_json`` with ``settings``. Raises: KeyError, TypeError, AttributeError."""
        return cls(
            Target(**content["target"]),
            TraceFigures(**content["drawn"]),
            content["num_requests"],
            {order: OrderFigures(**figures) for order, figures in content["orders"].items()},
            {},
            content["settings"]["num_seeds"],
        )


def speedups_of(
    points: Sequence[BlendPoint], order: OrderName = BLEND, over: OrderName = REFERENCE
) -> list[float]:
    """Of each pool on which both ran."""
    found = (point.speedup(order, over) for point in points)
    return [each for each in found if each is not None]
