from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.costs.correction import BiasCorrection


def after(ratios: list[float], predicted_s: float = 0.02) -> BiasCorrection:
    correction = BiasCorrection()
    for ratio in ratios:
        correction.observe(predicted_s, predicted_s * ratio)
    return correction


def test_it_begins_with_the_profile_as_it_is() -> None:
    assert (BiasCorrection().mean, BiasCorrection().upper) == (1.0, 1.0)
    assert BiasCorrection(deviation=0.1).upper == pytest.approx(1.2)


@pytest.mark.parametrize("ratio", [0.6, 0.9, 1.0, 1.3, 1.9])
def test_a_constant_ratio_is_learnt(ratio: float) -> None:
    correction = after([ratio] * 300)
    assert correction.mean == pytest.approx(ratio, rel=0.01)
    assert correction.upper == pytest.approx(ratio, rel=0.01), "a ratio that is constant has no deviation"


def test_half_of_a_change_is_learnt_within_a_dozen_steps() -> None:
    correction = after([1.0] * 100 + [1.4] * 12)
    assert 1.2 < correction.mean < 1.4


@pytest.mark.parametrize(("ratio", "bound"), [(0.01, 0.5), (0.0, 0.5), (3.0, 2.0), (1000.0, 2.0)])
def test_it_is_bounded(ratio: float, bound: float) -> None:
    correction = after([ratio] * 500)
    assert correction.mean == bound
    assert correction.upper == bound


@pytest.mark.parametrize("ratio", [0.01, 50.0])
def test_it_comes_back_from_a_bound(ratio: float) -> None:
    assert after([ratio] * 500 + [1.0] * 200).mean == pytest.approx(1.0, rel=0.01)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), max_size=60))
def test_any_observations_leave_it_within_its_bounds(steps: list[tuple[float, float]]) -> None:
    correction = BiasCorrection()
    for predicted_s, observed_s in steps:
        correction.observe(predicted_s, observed_s)
        assert 0.5 <= correction.mean <= correction.upper <= 2.0


def test_an_outlier_moves_it_little() -> None:
    settled = after([1.0] * 100)
    settled.observe(0.02, 20.0)  # a process that was stopped for a while
    assert settled.mean < 1.07
    assert settled.upper < 1.35
    for _ in range(50):
        settled.observe(0.02, 0.02)
    assert settled.upper < 1.02


def test_upper_covers_most_steps_of_a_noisy_machine() -> None:
    rng = random.Random(0)
    correction = after([rng.gauss(1.1, 0.05) for _ in range(400)])
    assert correction.mean == pytest.approx(1.1, abs=0.04)
    within = [rng.gauss(1.1, 0.05) <= correction.upper for _ in range(1000)]
    assert sum(within) > 850
    assert correction.upper < 1.1 + 5 * 0.05


@pytest.mark.parametrize("predicted_s", [0.0, -1.0])
def test_steps_without_a_prediction_teach_nothing(predicted_s: float) -> None:
    correction = after([1.2] * 10)
    before = correction.mean, correction.upper
    correction.observe(predicted_s, 0.5)
    assert (correction.mean, correction.upper) == before
