from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.costs.hardware import load_hardware_profile
from backfill.costs.load import StepLoad
from experiments.blendserve.overlap import INTERFERENCE, Overlap, OverlappedCostModel

COST = load_hardware_profile("a100-80g-llama-3-8b").costs.cost
DECODES = StepLoad.of([(8000, 1, True)] * 40)
MIXED = StepLoad.of([(0, 470, False), (64, 100, True), *([(8000, 1, True)] * 40)])

rates = st.floats(0.0, 1.0)
pairs = st.lists(st.tuples(rates, rates), max_size=5)
seconds = st.floats(0.0, 100.0)


@given(pairs, seconds, seconds)
def test_overlapping_takes_no_less_than_the_longer_and_no_more_than_both(
    points: list[tuple[float, float]], compute_s: float, memory_s: float
) -> None:
    together_s = Overlap.of_rates(points).seconds(compute_s, memory_s)
    assert max(compute_s, memory_s) - 1e-9 <= together_s <= compute_s + memory_s + 1e-9


@given(pairs, seconds, seconds, seconds, seconds)
def test_work_in_two_parts_takes_no_less_than_together(
    points: list[tuple[float, float]], c0: float, m0: float, c1: float, m1: float
) -> None:
    """Otherwise an order of requests could beat the optimum of all of them at once."""
    overlap = Overlap.of_rates(points)
    assert overlap.seconds(c0 + c1, m0 + m1) <= overlap.seconds(c0, m0) + overlap.seconds(c1, m1) + 1e-9


@given(pairs, st.integers(0, 4))
def test_rates_that_are_given_are_reached_or_beaten(points: list[tuple[float, float]], index: int) -> None:
    if index < len(points):
        assert Overlap.of_rates(points).seconds(*points[index]) <= 1.0 + 1e-9


def test_none_and_perfect_overlap_are_the_sum_and_the_longer() -> None:
    assert INTERFERENCE["sequential"].seconds(2.0, 3.0) == 5.0
    assert INTERFERENCE["ideal"].seconds(2.0, 3.0) == 3.0


def test_a_pair_that_is_slower_than_alternating_has_no_effect() -> None:
    fast, slow = (0.8, 0.6), (0.9, 0.2)
    assert Overlap.of_rates([fast, slow]) == Overlap.of_rates([fast])


@pytest.mark.parametrize("pair", [(-0.1, 0.5), (0.5, 1.1), (float("nan"), 0.5)])
def test_rates_beyond_those_alone_are_refused(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="rates must be 0 to 1"):
        Overlap.of_rates([pair])


def gain(name: str, density: float) -> float:
    """Of overlapping, over one resource after the other."""
    return (density + 1.0) / INTERFERENCE[name].seconds(density, 1.0)


def test_nanoflows_measured_pairs_gain_a_fifth_at_most() -> None:
    """That is less than BlendServe reports, so its figures do not follow from these pairs."""
    assert max(gain("nanoflow", density / 100) for density in range(10, 400)) == pytest.approx(1.2)


def test_the_fit_has_what_blendserve_states() -> None:
    """Densities on this device are about 1.1 times those of section 2.3 (docs/simulation.md)."""
    of_traces = [gain("blendserve", 1.1 * density) for density in (1.4, 0.9, 1.4, 0.9)]
    assert fmean(of_traces) == pytest.approx(1.2084 / 0.8655, abs=0.005)
    best = max(range(50, 250), key=lambda percent: gain("blendserve", 1.1 * percent / 100))
    assert best / 100 == pytest.approx(1.3, abs=0.01)


def test_without_overlap_a_step_takes_what_the_cost_model_says() -> None:
    model = OverlappedCostModel.of(COST, INTERFERENCE["sequential"])
    for load in (DECODES, MIXED, StepLoad.of([(0, 2048, False)]), StepLoad.of([(5, 1, True)])):
        assert model.step_time_s(load) == pytest.approx(COST.step_time_s(load))
        assert sum(model.resources_s(load)) == pytest.approx(COST.step_time_s(load))
    assert model.step_time_s(StepLoad()) == 0.0
    assert model.resources_s(StepLoad()) == (0.0, 0.0)


def test_decode_attention_is_memory_traffic_and_the_rest_is_compute() -> None:
    model = OverlappedCostModel.of(COST, INTERFERENCE["ideal"])
    compute_s, memory_s = model.resources_s(MIXED)
    assert memory_s == pytest.approx(COST.decode_context_s * 40 * 8000)
    assert model.step_time_s(MIXED) == pytest.approx(max(compute_s, memory_s))


def test_weights_of_a_small_step_are_memory_traffic() -> None:
    model = OverlappedCostModel.of(COST, INTERFERENCE["ideal"])
    compute_s, memory_s = model.resources_s(DECODES)
    assert memory_s - COST.decode_context_s * 40 * 8000 == pytest.approx(0.0075, abs=0.0005)
    assert 0.0 < compute_s < 0.01


def test_a_step_is_planned_with_the_overlap() -> None:
    """``max_tokens`` finds more prompt tokens beside decodes than without overlap."""
    sequential = COST.max_tokens(DECODES, 0, 4096, 0.1)
    overlapped = OverlappedCostModel.of(COST, INTERFERENCE["ideal"]).max_tokens(DECODES, 0, 4096, 0.1)
    assert 0 < sequential < overlapped
