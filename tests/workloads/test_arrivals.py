from __future__ import annotations

import math

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.workloads.arrivals import (
    Phase,
    burstiness_of_cv,
    gamma_arrivals,
    gap_cv,
    mean_rate_per_s,
    phased_arrivals,
    ramp_arrivals,
    rescaled_to_rate,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("cv", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_gamma_has_the_rate_and_the_cv_asked_for(cv: float) -> None:
    instants = gamma_arrivals(100_000, 5.0, burstiness_of_cv(cv), rng())
    assert np.all(np.diff(instants) >= 0)
    assert instants[-1] == pytest.approx(100_000 / 5.0)
    assert mean_rate_per_s(instants) == pytest.approx(5.0)
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


def test_constant_and_all_at_once() -> None:
    assert gamma_arrivals(4, 2.0, math.inf, rng()) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert gamma_arrivals(4, math.inf, 1.0, rng()).tolist() == [0, 0, 0, 0]
    assert math.isinf(burstiness_of_cv(0))
    assert burstiness_of_cv(2) == 0.25


def test_phases_have_their_rates_and_off_phases_nothing() -> None:
    instants = phased_arrivals(20_000, [Phase(10, 8), Phase(20, 0), Phase(5, 2)], 1.0, rng())
    assert np.all(np.diff(instants) >= 0)
    in_cycle = instants % 35
    num_cycles = instants[-1] / 35
    assert np.sum(in_cycle < 10) / num_cycles / 10 == pytest.approx(8, rel=0.02)
    assert np.sum((in_cycle > 10 + 1e-6) & (in_cycle < 30 - 1e-6)) == 0
    assert np.sum(in_cycle >= 30) / num_cycles / 5 == pytest.approx(2, rel=0.05)


def test_constant_phases_are_exact() -> None:
    instants = phased_arrivals(6, [Phase(1, 2), Phase(3, 0)], math.inf, rng())
    assert instants == pytest.approx([0.5, 1.0, 4.5, 5.0, 8.5, 9.0])


@pytest.mark.parametrize("exponential", [False, True])
def test_ramp_goes_from_rate_to_rate(exponential: bool) -> None:
    gaps = np.diff(ramp_arrivals(3, 1, 4, math.inf, rng(), exponential=exponential), prepend=0)
    assert 1 / gaps == pytest.approx([1, 2 if exponential else 2.5, 4])


def test_ramp_is_random_with_burstiness() -> None:
    gaps = np.diff(ramp_arrivals(50_000, 10, 10, 4.0, rng()), prepend=0)
    assert gaps.mean() == pytest.approx(0.1, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(0.5, rel=0.02)


def test_rescaling_keeps_the_shape() -> None:
    instants = np.array([3.0, 4.0, 8.0, 13.0])
    rescaled = rescaled_to_rate(instants, 2.0)
    assert rescaled == pytest.approx([0, 0.2, 1.0, 2.0])
    assert gap_cv(rescaled) == pytest.approx(gap_cv(instants))
    with pytest.raises(ConfigError, match="one instant"):
        rescaled_to_rate(np.zeros(3), 2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gamma_arrivals(10, 0.0, 1.0, rng()), "--request-rate must be above 0"),
        (lambda: gamma_arrivals(10, math.nan, 1.0, rng()), "--request-rate must be above 0"),
        (lambda: gamma_arrivals(10, 1.0, 0.0, rng()), "--burstiness must be above 0"),
        (lambda: gamma_arrivals(0, 1.0, 1.0, rng()), "--num-prompts must be at least 1"),
        (lambda: burstiness_of_cv(-1), "--cv must be"),
        (lambda: burstiness_of_cv(math.nan), "--cv must be"),
        (lambda: phased_arrivals(1, [Phase(0, 1)], 1.0, rng()), "--phases: every phase"),
        (lambda: phased_arrivals(1, [Phase(1, -1)], 1.0, rng()), "--phases: every phase"),
        (lambda: phased_arrivals(1, [Phase(1, 0)], 1.0, rng()), "a rate above 0"),
        (lambda: ramp_arrivals(1, 0, 1, 1.0, rng()), "--ramp-up-start-rps"),
    ],
)
def test_out_of_range(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=message):
        call()
