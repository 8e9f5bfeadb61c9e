"""Distributions of prompt and output lengths, in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Lengths: TypeAlias = NDArray[np.int64]
LengthLaw = Literal["uniform", "normal", "lognormal"]


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths around a mean.

    Attributes:
        mean: tokens.
        spread: uniform: the range ratio r; lengths are whole numbers from floor(mean * (1-r)) to
            ceil(mean * (1+r)), as in ``vllm bench serve``. Normal and lognormal: the coefficient of variation
            of the lengths, not of their logarithms. 0 is a fixed length.
        law: family of the distribution. A normal one is cut at 1 token, which raises its mean where
            ``spread`` is above about 0.4.
    """

    mean: int
    spread: float = 0.0
    law: LengthLaw = "uniform"

    def sample(self, count: int, rng: np.random.Generator) -> Lengths:
        """``count`` lengths of at least 1 token."""
        if self.spread == 0:
            return np.full(count, self.mean, dtype=np.int64)
        if self.law == "uniform":
            low = math.floor(self.mean * (1 - self.spread))
            high = math.ceil(self.mean * (1 + self.spread))
            drawn = rng.integers(max(low, 1), high, count, endpoint=True).astype(np.float64)
        elif self.law == "normal":
            drawn = rng.normal(self.mean, self.mean * self.spread, count)
        else:
            variance_of_log = math.log1p(self.spread**2)
            drawn = rng.lognormal(
                math.log(self.mean) - variance_of_log / 2, math.sqrt(variance_of_log), count
            )
        return np.maximum(np.rint(drawn), 1).astype(np.int64)
