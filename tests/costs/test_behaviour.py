from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from backfill.costs.behaviour import DeviceBehaviour, NoiseSource, StepNoise
from backfill.costs.fit import TimedStep, fit_error
from backfill.costs.load import StepLoad
from backfill.costs.profile import FitError
from tests.builders import flat_cost, linear_cost


def draws(noise: StepNoise, count: int, seed: int = 3) -> np.ndarray:
    source = NoiseSource(noise, seed)
    return np.array([source.draw() for _ in range(count)])


def test_without_noise_every_ratio_is_exactly_one() -> None:
    assert set(draws(StepNoise(), 100)) == {1.0}


def test_a_seed_gives_one_sequence() -> None:
    noise = StepNoise.of_error(FitError(0.05, 0.15, 100))
    assert draws(noise, 50).tolist() == draws(noise, 50).tolist()
    assert draws(noise, 50, seed=4).tolist() != draws(noise, 50).tolist()


@pytest.mark.parametrize(("median", "p95"), [(0.012, 0.038), (0.1, 0.3), (0.2, 1.4)])
def test_noise_of_an_error_has_its_median_and_its_p95(median: float, p95: float) -> None:
    ratios = draws(StepNoise.of_error(FitError(median, p95, 100)), 40_000)
    above = ratios[ratios > 1.0] - 1.0
    assert np.median(ratios) == pytest.approx(1.0, abs=0.2 * median)
    assert np.median(above) == pytest.approx(median, rel=0.1)
    assert np.percentile(above, 95) == pytest.approx(p95, rel=0.1)
    assert ratios.min() > 0.0 and ratios.max() <= 1.0 + 1.5 * p95


def test_noise_of_measured_ratios_has_their_quantiles() -> None:
    error = FitError(0.1, 0.5, 100, (0.8, 0.9, 1.0, 1.3, 2.0))
    ratios = draws(StepNoise.of_error(error), 40_000)
    found = np.quantile(ratios, [0.0, 0.25, 0.5, 0.75, 1.0])
    assert found == pytest.approx([0.8, 0.9, 1.0, 1.3, 2.0], rel=0.02)


@pytest.mark.parametrize(
    "wrong",
    [
        {"probabilities": (0.0, 0.5)},
        {"probabilities": (0.1, 1.0)},
        {"ratios": (1.0,)},
        {"ratios": (1.0, 0.9)},
        {"ratios": (0.0, 1.0)},
        {"ratios": (1.0, math.inf)},
        {"correlation": 1.0},
        {"correlation": -0.1},
    ],
)
def test_what_is_no_distribution_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        replace(StepNoise(), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan])
def test_a_behaviour_takes_no_time_below_zero(value: float) -> None:
    with pytest.raises(ValueError, match="host_s"):
        DeviceBehaviour(linear_cost(), host_s=value)


def test_the_mean_is_that_of_the_draws() -> None:
    noise = StepNoise((0.0, 0.5, 0.9, 1.0), (0.8, 1.0, 1.2, 3.0))
    assert StepNoise().mean == 1.0
    assert noise.mean == pytest.approx(0.45 + 0.44 + 0.21)
    assert draws(noise, 40_000).mean() == pytest.approx(noise.mean, rel=0.01)


def test_a_fit_keeps_the_quantiles_of_measured_over_predicted() -> None:
    steps = [TimedStep(StepLoad.of([(0, 10, True)]), 0.1 * ratio) for ratio in (0.5, 1.0, 1.5, 2.0, 4.0)]
    quantiles = fit_error(flat_cost(0.1), steps).ratio_quantiles
    assert list(quantiles) == sorted(quantiles)
    middle = quantiles[len(quantiles) // 2]
    assert (quantiles[0], middle, quantiles[-1]) == pytest.approx((0.5, 1.5, 4.0))
