"""What a simulated device does, as opposed to what a cost profile predicts of it."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from backfill.costs.model import CostModel
from backfill.costs.profile import CopySpeed, FitError

_NORMAL = NormalDist()
# A fit's error says nothing beyond its P95. A normal deviation exceeds 1.5 times its P95 once in 300 steps.
_FARTHEST_OVER_P95 = 1.5
_EDGE = 1e-6  # ranks stay this far from 0 and 1, where the normal distribution has no finite quantile


def _ascend(values: Sequence[float]) -> bool:
    return all(low <= high for low, high in itertools.pairwise(values))


@dataclass(frozen=True, slots=True)
class StepNoise:
    """The distribution of a step's observed over its typical time.

    Attributes:
        probabilities: ascending from 0 to 1.
        ratios: the quantile at each of them, above 0 and not descending; linear in between.
        correlation: of consecutive steps, in [0, 1): lag-1 autocorrelation of the ratios' normal scores.
    """

    probabilities: tuple[float, ...] = (0.0, 1.0)
    ratios: tuple[float, ...] = (1.0, 1.0)
    correlation: float = 0.0

    def __post_init__(self) -> None:
        at, ratios = self.probabilities, self.ratios
        if len(at) != len(ratios) or len(at) < 2 or at[0] != 0.0 or at[-1] != 1.0 or not _ascend(at):
            raise ValueError(f"needs as many ratios as probabilities, ascending from 0 to 1, got {at}")
        if ratios[0] <= 0.0 or not _ascend(ratios) or not math.isfinite(ratios[-1]):
            raise ValueError(f"ratios must be above 0, finite and not descend, got {ratios}")
        if not 0.0 <= self.correlation < 1.0:
            raise ValueError(f"correlation must be at least 0 and below 1, got {self.correlation}")

    @property
    def mean(self) -> float:
        points = zip(self.probabilities, self.ratios, strict=True)
        return sum((p1 - p0) * (r0 + r1) / 2 for (p0, r0), (p1, r1) in itertools.pairwise(points))

    def quantile(self, probability: float) -> float:
        """The same as ``numpy.interp``, which takes longer for one number."""
        x, y = self.probabilities, self.ratios
        last = len(x) - 1
        i = bisect_right(x, probability) - 1
        if i >= last or x[i] == probability:
            return y[min(i, last)]
        return (y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (probability - x[i]) + y[i]

    @classmethod
    def of_error(cls, error: FitError) -> StepNoise:
        """What a fit's error on held-out steps says, independent from step to step.

        The ratios measured, if the error has them. Else a symmetric distribution: half of the ratios are
        within the median error of 1, 95 % within the P95, and none beyond 1.5 times that.
        """
        if len(error.ratio_quantiles) > 1:
            at = np.linspace(0.0, 1.0, len(error.ratio_quantiles))
            return cls(tuple(at.tolist()), tuple(max(each, _EDGE) for each in error.ratio_quantiles))
        p95 = max(error.p95, error.median)
        deviations = (error.median, p95, _FARTHEST_OVER_P95 * p95)
        # A machine cannot be faster than any time above 0.
        below = tuple(max(1.0 - each, _EDGE) for each in reversed(deviations))
        above = tuple(1.0 + each for each in deviations)
        return cls((0.0, 0.025, 0.25, 0.5, 0.75, 0.975, 1.0), (*below, 1.0, *above))


@dataclass(frozen=True, slots=True)
class DeviceBehaviour:
    """What steps and copies take on a simulated device. The scheduler knows none of it.

    Attributes:
        cost: typical step times.
        copies: None without a pool in host memory.
        noise: of each step; all layers of a step share it.
        host_s: seconds between two steps: planning, committing and delivering tokens.
    """

    cost: CostModel
    copies: CopySpeed | None = None
    noise: StepNoise = StepNoise()
    host_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.host_s < math.inf:
            raise ValueError(f"host_s must be a finite number of at least 0, got {self.host_s}")


class NoiseSource:
    """Draws a ratio for each step; the same sequence for the same seed.

    The ratios' normal scores are an autoregressive process of first order, so every ratio has the
    distribution of the noise, and consecutive ones have its correlation.
    """

    def __init__(self, noise: StepNoise, seed: int) -> None:
        self._noise = noise
        self._random = random.Random(seed)
        self._score: float | None = None

    def draw(self) -> float:
        kept, fresh = self._noise.correlation, self._random.gauss(0.0, 1.0)
        before = self._score
        self._score = fresh if before is None else kept * before + math.sqrt(1.0 - kept * kept) * fresh
        return self._noise.quantile(_NORMAL.cdf(self._score))
