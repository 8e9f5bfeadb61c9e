from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from backfill.costs.correction import BiasCorrection, ErrorQuantile
from backfill.costs.fit import TimedStep, fit_beside, fit_cost_model, fit_error, knots_within, nnls
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profiler import FULL, QUICK, Capacity

ROW_KNOTS = (1, 16, 64, 256, 1024)
SAMPLED_KNOTS = (1, 16, 64)
# The shape of a small model on a CPU: a knee at 16 rows, then nearly linear.
TRUTH = CostModel(
    rows_s=PiecewiseLinear(tuple(map(float, ROW_KNOTS)), (0.020, 0.024, 0.060, 0.200, 0.790)),
    sampled_s=PiecewiseLinear((0.0, 1.0, 16.0, 64.0), (0.0, 0.004, 0.006, 0.020)),
    request_s=2e-5,
    prefill_pair_s=1.5e-7,
    prefill_context_s=4e-7,
    decode_context_s=9e-7,
)


def random_load(rng: random.Random) -> StepLoad:
    decodes = [(rng.randint(16, 2000), 1, True)] * rng.choice((0, 1, 4, 8, 20, 40))
    chunks = [
        (rng.choice((0, rng.randint(1, 2000))), round(2 ** rng.uniform(0, 9)), rng.random() < 0.5)
        for _ in range(rng.choice((0, 1, 2)) if decodes else 1)
    ]
    return StepLoad.of([*decodes, *chunks])


def timed(count: int, seed: int, noise: float = 0.0) -> list[TimedStep]:
    rng = random.Random(seed)
    loads = [random_load(rng) for _ in range(count)]
    return [TimedStep(load, TRUTH.step_time_s(load) * (1 + rng.gauss(0, noise))) for load in loads]


def errors(model: CostModel, steps: list[TimedStep]) -> list[float]:
    return sorted(abs(model.step_time_s(step.load) / step.seconds - 1) for step in steps)


def test_a_known_model_is_found_again_from_exact_times() -> None:
    model = fit_cost_model(timed(200, seed=0), ROW_KNOTS, SAMPLED_KNOTS)
    assert errors(model, timed(200, seed=1))[-1] < 0.01
    assert model.rows_s.x == tuple(map(float, ROW_KNOTS))
    assert model.sampled_s.x == (0.0, *map(float, SAMPLED_KNOTS))
    assert model.prefill_pair_s == pytest.approx(TRUTH.prefill_pair_s, rel=0.05)
    assert model.decode_context_s == pytest.approx(TRUTH.decode_context_s, rel=0.05)


def test_errors_are_relative_so_that_long_steps_do_not_outweigh_short_ones() -> None:
    """No line fits all of these; least squares of seconds would follow the long ones."""
    short = [TimedStep(StepLoad.of([(0, count, False)]), 0.01) for count in range(1, 7)]
    long = [TimedStep(StepLoad.of([(0, count, False)]), 0.8 + count / 5000) for count in range(512, 1025, 32)]
    model = fit_cost_model([*short, *long], (1, 1024), (1,))
    assert errors(model, short)[-1] < 1.0


@pytest.mark.parametrize("count", [1, 11])
def test_fewer_steps_than_terms_are_fitted_exactly(count: int) -> None:
    steps = timed(count, seed=0)
    assert max(errors(fit_cost_model(steps, ROW_KNOTS, SAMPLED_KNOTS), steps)) < 1e-6


def test_terms_that_no_step_has_cost_nothing() -> None:
    """Prefills alone do not determine the terms of decodes; that is no error."""
    loads = [StepLoad.of([(0, count, False)]) for count in range(1, 40)]
    steps = [TimedStep(load, TRUTH.step_time_s(load)) for load in loads]
    model = fit_cost_model(steps, (1, 16, 64), (1, 16))
    assert model.decode_context_s == 0.0
    assert model.sampled_s(8) == 0.0
    assert errors(model, steps)[-1] < 0.01


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_predictions_never_fall_with_more_tokens_nor_beyond_the_last_knot(noise: float) -> None:
    model = fit_cost_model(timed(100, seed=5, noise=noise), ROW_KNOTS, SAMPLED_KNOTS)
    for curve in (model.rows_s, model.sampled_s):
        values = [curve(at) for at in (*range(0, 1100, 7), 2000, 10_000, 100_000)]
        assert all(low <= high for low, high in itertools.pairwise(values))
    assert min(model.request_s, model.prefill_pair_s, model.prefill_context_s, model.decode_context_s) >= 0.0
    beyond = [model.step_time_s(StepLoad.of([(0, count, True)])) for count in (1024, 2048, 8192)]
    assert beyond[0] < beyond[1] < beyond[2]


def test_fit_error_is_relative_to_what_was_measured() -> None:
    load = StepLoad.of([(0, 16, False)])
    seconds = TRUTH.step_time_s(load)
    steps = [TimedStep(load, seconds * factor) for factor in (1.0, 1.0, 2.0, 0.5, 0.8)]
    error = fit_error(TRUTH, steps)
    assert error.num_steps == 5
    assert error.median == pytest.approx(0.25)  # of 0, 0, 1/2, 1 and 1/4
    assert error.p95 == pytest.approx(0.9)


Array = NDArray[np.float64]


def norm(a: Array, b: Array, x: Array) -> float:
    return float(np.linalg.norm(a @ x - b))


def best_of_all_subsets(a: Array, b: Array) -> float:
    """The least error of any x >= 0: some set of columns has it as its unconstrained best."""
    least = float(np.linalg.norm(b))
    for size in range(1, a.shape[1] + 1):
        for columns in itertools.combinations(range(a.shape[1]), size):
            x = np.zeros(a.shape[1])
            x[list(columns)] = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
            if x.min() >= 0:
                least = min(least, norm(a, b, x))
    return least


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("num_rows", "num_columns"), [(12, 5), (5, 5), (3, 5), (40, 7)])
def test_no_other_x_is_better(seed: int, num_rows: int, num_columns: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(num_rows, num_columns)), rng.normal(size=num_rows)
    x = nnls(a, b)
    assert x.min() >= 0
    assert norm(a, b, x) == pytest.approx(best_of_all_subsets(a, b), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_an_exact_solution_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, x = rng.random((200, 26)), np.maximum(rng.normal(size=26), 0)
    assert nnls(a, a @ x) == pytest.approx(x, abs=1e-9)


def test_columns_may_depend_on_each_other() -> None:
    rng = np.random.default_rng(0)
    a = rng.random((50, 4))
    a = np.hstack([a, a, a[:, :1] + a[:, 1:2], np.zeros((50, 2))])
    b = rng.random(50)
    x = nnls(a, b)
    assert x.min() >= 0
    assert norm(a, b, x) == pytest.approx(norm(a[:, :4], b, nnls(a[:, :4], b)), abs=1e-9)


def test_a_weight_that_would_be_negative_is_zero() -> None:
    assert nnls(np.eye(3), np.array([-1.0, 2.0, 0.0])).tolist() == [0.0, 2.0, 0.0]
    assert nnls(-np.ones((4, 2)), np.ones(4)).tolist() == [0.0, 0.0]


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


def test_what_is_expected_bounds_what_few_steps_of_a_busy_machine_say() -> None:
    """Alone, their noise goes into terms that they cannot tell: a prompt of 512 tokens would take minutes."""
    truth = CostModel(
        PiecewiseLinear((1.0, 16.0, 512.0), (0.008, 0.02, 0.45)),
        PiecewiseLinear((0.0, 1.0, 32.0), (0.0, 0.0015, 0.01)),
        request_s=0.0,
        prefill_pair_s=0.9e-6,
        prefill_context_s=1e-7,
        decode_context_s=1.5e-6,
    )
    expected = CostModel(  # each term off by a factor of its own
        PiecewiseLinear((1.0, 8192.0), (0.01, 10.0)),
        PiecewiseLinear((0.0, 64.0), (0.0, 0.05)),
        request_s=0.0,
        prefill_pair_s=0.3e-6,
        prefill_context_s=0.3e-6,
        decode_context_s=0.6e-6,
    )
    capacity = Capacity(46_592, 16, 8192, 64, 2048)
    grid = [StepLoad.of(shape) for shape in FULL.shapes(capacity)]
    prompt, decodes = StepLoad.of([(0, 512, True)]), StepLoad.of([(1000, 1, True)] * 32)
    ratios: dict[str, list[float]] = {"alone": [], "beside": []}
    for seed in range(40):
        rng = random.Random(seed)
        steps = [
            TimedStep(load, truth.step_time_s(load) * (2.0 * rng.paretovariate(1.0) - 1.0))
            for load in map(StepLoad.of, QUICK.listed[:6])
        ]
        alone = fit_cost_model(
            steps, knots_within(QUICK.row_knots, 128), knots_within(QUICK.sampled_knots, 32)
        )
        slower = sorted(step.seconds / expected.step_time_s(step.load) for step in steps)[3]
        beside = fit_beside(expected.slowed(slower), steps, grid)
        for name, cost in {"alone": alone, "beside": beside}.items():
            ratios[name] += [cost.step_time_s(load) / truth.step_time_s(load) for load in (prompt, decodes)]
    assert max(ratios["beside"]) < 40
    assert max(ratios["alone"]) > 100
    assert np.median(ratios["beside"]) < np.median(ratios["alone"])
