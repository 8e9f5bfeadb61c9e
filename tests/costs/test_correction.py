from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.costs.correction import BiasCorrection, ErrorQuantile


def after(ratios: list[float], predicted_s: float = 0.02) -> BiasCorrection:
    correction = BiasCorrection()
    for ratio in ratios:
        correction.observe(predicted_s, predicted_s * ratio)
    return correction


@pytest.mark.parametrize("ratio", [0.6, 0.9, 1.0, 1.3, 1.9])
def test_a_constant_ratio_is_learnt(ratio: float) -> None:
    assert after([ratio] * 300).mean == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize(("ratio", "bound"), [(0.01, 0.5), (0.0, 0.5), (3.0, 2.0), (1000.0, 2.0)])
def test_it_is_bounded(ratio: float, bound: float) -> None:
    assert after([ratio] * 500).mean == bound


def test_an_outlier_moves_it_little() -> None:
    settled = after([1.0] * 100)
    settled.observe(0.02, 20.0)  # a process that was stopped for a while
    assert settled.mean < 1.07


@pytest.mark.parametrize("predicted_s", [0.0, -1.0])
def test_steps_without_a_prediction_teach_nothing(predicted_s: float) -> None:
    correction = after([1.2] * 10)
    before = correction.mean
    correction.observe(predicted_s, 0.5)
    assert correction.mean == before


def quantile_after(ratios: list[float], share: float = 0.99) -> float:
    errors = ErrorQuantile(share, initial=1.1)
    for ratio in ratios:
        errors.observe(ratio)
    return errors.ratio


def test_until_steps_are_observed_the_error_is_what_was_assumed() -> None:
    assert quantile_after([]) == pytest.approx(1.1, rel=0.011)
    assert quantile_after([1.0] * 50) == pytest.approx(1.1, rel=0.011)


def test_steps_that_are_predicted_exactly_leave_no_margin() -> None:
    assert quantile_after([1.0] * 1000) == pytest.approx(1.0, abs=0.011)


@pytest.mark.parametrize("share", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("spread", [0.02, 0.06, 0.15])
def test_the_share_of_steps_that_are_in_time_is_the_one_asked_for(share: float, spread: float) -> None:
    rng = random.Random(3)
    errors, num_in_time = ErrorQuantile(share, initial=1.1), 0
    for index in range(8000):
        ratio = rng.lognormvariate(0.0, spread)
        num_in_time += index >= 1000 and ratio <= errors.ratio
        errors.observe(ratio)
    assert share - 0.01 <= num_in_time / 7000 <= share + 0.05, "bins are 1 % wide"


def test_a_machine_that_becomes_noisy_is_followed_and_forgotten_again() -> None:
    noisy = [1.0, 1.0, 1.0, 1.4] * 20
    assert quantile_after([1.0] * 1000 + noisy) > 1.38
    assert quantile_after([1.0] * 1000 + noisy + [1.0] * 3000) < 1.02


@given(st.lists(st.floats(1e-6, 1e6), max_size=100))
def test_any_ratios_leave_the_quantile_within_its_bounds(ratios: list[float]) -> None:
    assert 0.49 < quantile_after(ratios) < 2.02


@pytest.mark.parametrize("spread", [0.03, 0.15])
@pytest.mark.parametrize("used", [0.9, 1.0])
def test_the_margin_follows_what_is_kept(spread: float, used: float) -> None:
    rng = random.Random(5)
    errors, num_kept = ErrorQuantile(0.99, initial=1.1), 0
    for index in range(40_000):
        ratio = rng.lognormvariate(0.0, spread)
        kept = ratio * used <= errors.ratio  # the step was planned to take ``used`` of its time
        num_kept += index >= 5000 and kept
        errors.observe(ratio)
        errors.adapt(float(kept), 0.99)
    kept_share = num_kept / 35_000
    assert kept_share > 0.985
    if used == 1.0:
        assert kept_share < 0.995, "time that the objectives do not need is given away"


def test_a_disturbance_is_forgotten_within_half_a_minute_of_steps() -> None:
    errors = ErrorQuantile(0.99, initial=1.1)
    for ratio, num_steps in ((1.0, 1000), (2.0, 100), (1.0, 400)):
        for _ in range(num_steps):
            kept = ratio <= errors.ratio
            errors.observe(ratio)
            errors.adapt(float(kept), 0.99)
    assert errors.ratio < 1.05
