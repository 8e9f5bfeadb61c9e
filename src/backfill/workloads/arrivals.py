"""Arrival processes: the instants, in seconds from the start of a run, at which requests arrive.

Every process returns ``count`` non-decreasing float64 instants and draws only from the generator it is given.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from backfill.core.errors import ConfigError

Instants: TypeAlias = NDArray[np.float64]
RandomSource: TypeAlias = np.random.Generator | np.random.RandomState


def burstiness_of_cv(cv: float) -> float:
    """Shape of the gamma distribution whose coefficient of variation is ``cv``: 1/cv², inf for cv 0.

    Raises: ConfigError unless ``cv`` is finite and not negative.
    """
    if not (math.isfinite(cv) and cv >= 0):
        raise ConfigError(f"`cv` must be a number of at least 0 (1 is Poisson), got {cv:g}.")
    return math.inf if cv == 0 else 1 / cv**2


def gamma_arrivals(count: int, rate_per_s: float, burstiness: float, rng: RandomSource) -> Instants:
    """Gamma-distributed gaps, rescaled so that the last request arrives at ``count / rate_per_s``.

    Args:
        rate_per_s: mean rate, above 0.
        burstiness: shape of the gamma distribution, CV = 1/sqrt(burstiness); 1 is Poisson, inf is constant.
    Source: ``vllm bench serve``, its distribution and its rescaling. Without the rescaling the rate of a
        short run differs from ``rate_per_s`` by several percent from seed to seed.
    """
    return unit_arrivals(count, burstiness, rng) / rate_per_s


def unit_arrivals(count: int, burstiness: float, rng: RandomSource) -> Instants:
    """Arrivals of rate 1, rescaled so that the last one is at ``count``."""
    is_constant = math.isinf(burstiness)
    at = np.cumsum(np.ones(count) if is_constant else rng.gamma(burstiness, 1 / burstiness, count))
    return np.asarray(at * (count / at[-1])) if at[-1] > 0 else at
