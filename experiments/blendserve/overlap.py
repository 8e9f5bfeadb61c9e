"""Steps whose compute-bound and memory-bound operators run side by side, as in NanoFlow (arXiv 2408.12757).

Beside each other neither kind runs as fast as alone. How fast each runs is given as pairs of rates: what the
matrix products and what decode attention still reach of their speed alone. A step may use several pairs one
after another, so its time follows from their concave hull.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel


@dataclass(frozen=True, slots=True)
class Overlap:
    """The time of compute-bound beside memory-bound work, from the times that each takes alone.

    Attributes:
        weights: (of compute, of memory) pairs. The time is the greatest of the weighted sums. (1, 1) alone is
            one after the other; (1, 0) and (0, 1) is perfect overlap.
    """

    weights: tuple[tuple[float, float], ...]

    @classmethod
    def of_rates(cls, rates: Sequence[tuple[float, float]]) -> Overlap:
        """From pairs of (compute, memory) rates that are reached together, each over its rate alone.

        Pairs that are slower than alternating between two others have no effect. Raises: ValueError.
        """
        if not all(0.0 <= rate <= 1.0 for pair in rates for rate in pair):
            raise ValueError(f"rates must be 0 to 1, got {tuple(rates)}")
        hull: list[tuple[float, float]] = []
        for point in sorted({(1.0, 0.0), *rates, (0.0, 1.0)}, key=lambda pair: (-pair[0], pair[1])):
            while len(hull) > 1 and not _is_convex(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        weights = []
        for (c0, m0), (c1, m1) in itertools.pairwise(hull):
            area = c0 * m1 - c1 * m0
            weights.append(((m1 - m0) / area, (c0 - c1) / area))
        return cls(tuple(weights))

    def seconds(self, compute_s: float, memory_s: float) -> float:
        """Time of both together, each given as the seconds that it takes alone."""
        return max([compute * compute_s + memory * memory_s for compute, memory in self.weights])


def _is_convex(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """The corner at ``b`` of a walk from (1, 0) to (0, 1) bulges away from the origin."""
    return (b[0] - a[0]) * (c[1] - b[1]) - (b[1] - a[1]) * (c[0] - b[0]) > 0.0


# What GEMV (decode attention) reaches while it has a share of the GPU and GEMM has the rest: NanoFlow's
# published measurements on an A100 (github.com/efeslab/Nanoflow, autosearch/trace/gemv_interference.csv).
_NANOFLOW_GEMV = {
    0.1: 0.25,
    0.2: 0.4,
    0.3: 0.5,
    0.4: 0.6,
    0.5: 0.7,
    0.6: 0.8,
    0.7: 0.85,
    0.8: 0.9,
    0.9: 0.95,
}
# BlendServe does not print its fit. Two of its statements give one pair (docs/simulation.md has the sums):
# the achievable optimum has 1.208 / 0.8655 of the throughput of a DFS order (section 5.2), and overlapping
# gains most at a density of about 1.3 (section 5.4).
_BLENDSERVE = (0.86, 0.60)

InterferenceName = Literal["sequential", "nanoflow", "blendserve", "ideal"]
INTERFERENCE: Mapping[InterferenceName, Overlap] = {
    "sequential": Overlap.of_rates([]),
    "nanoflow": Overlap.of_rates([(1.0 - share, rate) for share, rate in _NANOFLOW_GEMV.items()]),
    "blendserve": Overlap.of_rates([_BLENDSERVE]),
    "ideal": Overlap.of_rates([(1.0, 1.0)]),
}
"""Overlaps by name. None of them was measured for this project."""


@dataclass(frozen=True, slots=True)
class OverlappedCostModel(CostModel):
    """A cost model whose compute-bound terms overlap its memory-bound ones.

    Decode attention is bound by memory, and so is what the matrix products of a small step wait for: their
    weights, as far as reading them takes longer than the products. All else is bound by compute.
    """

    overlap: Overlap

    @classmethod
    def of(cls, cost: CostModel, overlap: Overlap) -> OverlappedCostModel:
        """The model with the same terms."""
        return cls(*cost.terms, overlap)

    def step_time_s(self, load: StepLoad) -> float:
        if load.num_tokens == 0:
            return 0.0
        return self.overlap.seconds(*self.resources_s(load))

    def resources_s(self, load: StepLoad) -> tuple[float, float]:
        """Seconds of compute-bound and of memory-bound work, each as if alone on the device."""
        if load.num_tokens == 0:
            return 0.0, 0.0
        x, y = self.rows_s.x, self.rows_s.y
        row_s = (y[-1] - y[-2]) / (x[-1] - x[-2])
        weights_s = max(0.0, y[0] - row_s * load.num_tokens)
        compute_s = (
            self.rows_s(load.num_tokens)
            - weights_s
            + (self.sampled_s(load.num_sampled) if load.num_sampled else 0.0)
            + self.request_s * load.num_requests
            + self.prefill_pair_s * load.prefill_pairs
            + self.prefill_context_s * load.prefill_context_tokens
        )
        return compute_s, weights_s + self.decode_context_s * load.decode_context_tokens
