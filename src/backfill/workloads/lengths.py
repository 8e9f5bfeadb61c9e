"""Distributions of prompt and output lengths, in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from backfill.core.errors import ConfigError

Lengths: TypeAlias = NDArray[np.int64]


class LengthLaw(StrEnum):
    """Families of length distributions."""

    UNIFORM = "uniform"
    NORMAL = "normal"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths around a mean.

    Args:
        mean: tokens.
        spread: UNIFORM: the range ratio r, lengths being whole numbers from floor(mean * (1-r)) to
            ceil(mean * (1+r)), as in ``vllm bench serve``; NORMAL and LOGNORMAL: standard deviation divided
            by the mean, both of the lengths themselves (not of their logarithms). 0 is a fixed length.

    NORMAL is cut at 1 token, so its mean comes out higher than asked for where ``spread`` is above about 0.4.
    """

    mean: int
    spread: float = 0.0
    law: LengthLaw = LengthLaw.UNIFORM

    def validate(self, option: str) -> None:
        """Raises: ConfigError naming ``option`` when the mean or the spread is out of range."""
        if self.mean < 1:
            raise ConfigError(f"{option} must be at least 1 token, got {self.mean}.")
        if self.law is LengthLaw.UNIFORM and not 0 <= self.spread < 1:
            raise ConfigError(
                f"The range ratio of {option} must be at least 0 and below 1, got {self.spread:g}."
            )
        if not (math.isfinite(self.spread) and self.spread >= 0):
            raise ConfigError(f"The CV of {option} must be a number of at least 0, got {self.spread:g}.")

    def sample(self, count: int, rng: np.random.Generator) -> Lengths:
        """``count`` lengths of at least 1 token."""
        if self.spread == 0:
            return np.full(count, self.mean, dtype=np.int64)
        if self.law is LengthLaw.UNIFORM:
            low = math.floor(self.mean * (1 - self.spread))
            high = math.ceil(self.mean * (1 + self.spread))
            drawn = rng.integers(max(low, 1), high, count, endpoint=True).astype(np.float64)
        elif self.law is LengthLaw.NORMAL:
            drawn = rng.normal(self.mean, self.mean * self.spread, count)
        else:
            variance_of_log = math.log1p(self.spread**2)
            drawn = rng.lognormal(
                math.log(self.mean) - variance_of_log / 2, math.sqrt(variance_of_log), count
            )
        return np.maximum(np.rint(drawn), 1).astype(np.int64)
