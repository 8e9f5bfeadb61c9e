from __future__ import annotations

import math

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.workloads.arrivals import Instants, burstiness_of_cv, gamma_arrivals


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gap_cv(instants: Instants) -> float:
    gaps = np.diff(instants)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize("cv", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_gamma_has_the_rate_and_the_cv_asked_for(cv: float) -> None:
    instants = gamma_arrivals(100_000, 5.0, burstiness_of_cv(cv), rng())
    assert np.all(np.diff(instants) >= 0)
    assert instants[-1] == pytest.approx(100_000 / 5.0)
    assert gap_cv(instants) == pytest.approx(cv, rel=0.05)


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    instants = gamma_arrivals(50_000, 20.0, 1.0, rng(1))
    counts = np.histogram(instants, bins=np.arange(0, 2500, 1.0))[0]
    assert counts.mean() == pytest.approx(20, rel=0.02)
    assert counts.var() == pytest.approx(20, rel=0.1)


def test_gamma_follows_vllm() -> None:
    """Cumulated gaps of shape b and mean 1/rate, stretched to end at N/rate."""
    gaps = rng(3).gamma(0.5, 1 / 0.5, 50) / 2.0
    expected = np.cumsum(gaps) * (50 / 2.0 / gaps.sum())
    assert gamma_arrivals(50, 2.0, 0.5, rng(3)) == pytest.approx(expected)


def test_seed_decides() -> None:
    first, again, other = (gamma_arrivals(20, 1.0, 1.0, rng(seed)) for seed in (7, 7, 8))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_constant_gaps() -> None:
    assert gamma_arrivals(4, 2.0, math.inf, rng()) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert math.isinf(burstiness_of_cv(0))
    assert burstiness_of_cv(2) == 0.25


@pytest.mark.parametrize("cv", [-1, math.nan])
def test_a_variation_out_of_range_is_refused(cv: float) -> None:
    with pytest.raises(ConfigError, match="`cv` must be"):
        burstiness_of_cv(cv)
