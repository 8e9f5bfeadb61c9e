"""Step times with offloaded layers, and the interval that holds objectives within a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.slo import SLO
from backfill.offloading.choice import IntervalChooser, LoadLimits, NoIntervalHolds
from backfill.offloading.interval import (
    LayerTimes,
    num_device_layers,
    offloaded_layers,
    smallest_interval,
    step_time_s,
)
from backfill.offloading.spread import delays_s, quantile, run_times_s
from tests.offloading.test_record import NUM_LAYERS, RECORD, load

LIMITS = LoadLimits(max_num_seqs=32, max_model_len=1024)
ALL: list[int | None] = [*range(1, NUM_LAYERS + 1), None]
EASY = SLO(1.0, 1.0)


def chooser(fitting: list[int | None] = ALL, limits: LoadLimits = LIMITS) -> IntervalChooser:
    return IntervalChooser(RECORD, limits, fitting)


def test_the_smallest_interval_that_holds_both_objectives() -> None:
    """12 transfers of 4 ms; a decode of one request computes for 14 ms, of 8 for 26, of 32 for 50."""
    assert chooser().smallest_interval(EASY) == 1
    assert chooser().smallest_interval(SLO(1.0, 0.052)) == 1
    assert chooser().smallest_interval(SLO(1.0, 0.046)) == 2
    assert chooser().smallest_interval(SLO(1.0, 0.026)) == 2
    assert chooser().smallest_interval(SLO(1.0, 0.022)) == 3
    assert chooser().smallest_interval(SLO(0.100, 0.026)) == 2, "prefills take longer than their transfers"


def test_no_offloading_where_every_interval_that_holds_saves_no_memory() -> None:
    """A step of 14 ms has time for two transfers of 6.5 ms, and two layers have as many staging buffers."""
    slow = IntervalChooser(replace(RECORD, transfer_s=0.0065), LIMITS, ALL)
    assert slow.holding(SLO(1.0, 0.014))[0] == 5
    assert slow.smallest_interval(SLO(1.0, 0.014)) is None


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "interval"),
    [(1, 128, 1), (8, 128, 1), (9, 128, 2), (32, 128, 2), (64, 128, 2), (8, 129, 2), (1, 4096, 2)],
)
def test_loads_count_as_which_those_of_the_engine_are_found(
    max_num_seqs: int, max_model_len: int, interval: int
) -> None:
    """Large loads do 20 ms outside the layers, between which only two buffers can be filled."""
    large = (replace(load("decode", 32, 128), other_s=0.020), replace(load("decode", 1, 512), other_s=0.020))
    loads = (load("decode", 1, 128), load("decode", 8, 128), load("prefill", 1, 128, 0.01), *large)
    chosen = IntervalChooser(replace(RECORD, loads=loads), LoadLimits(max_num_seqs, max_model_len), ALL)
    assert chosen.smallest_interval(SLO(1.0, 0.051)) == interval


def test_what_does_not_fit_is_not_chosen() -> None:
    assert chooser([1, 2, 3, 4]).smallest_interval(SLO(1.0, 0.022)) == 3
    with pytest.raises(NoIntervalHolds) as caught:
        chooser([1, 2]).smallest_interval(SLO(1.0, 0.018))
    refused = caught.value
    assert refused.nearest == 2
    assert refused.achievable.ttft_s == 1.0
    assert refused.achievable.tpot_s == pytest.approx(0.024)  # 6 transfers
    assert refused.holding[0] == 3
    assert chooser([1, 2]).smallest_interval(refused.achievable) == 2


objectives = st.builds(SLO, st.floats(0.11, 0.4), st.floats(0.015, 0.1))


@given(objectives, st.sets(st.sampled_from(ALL), min_size=1))
def test_what_is_offered_instead_holds_and_nothing_less_does(slo: SLO, fitting: set[int | None]) -> None:
    chosen = chooser(list(fitting))
    saving = [each for each in chosen.holding(slo) if num_device_layers(NUM_LAYERS, each) < NUM_LAYERS]
    if None in fitting or not fitting.isdisjoint(saving):
        found = [each for each in saving if each in fitting]
        assert chosen.smallest_interval(slo) == min(found, default=None)
        return
    with pytest.raises(NoIntervalHolds) as caught:
        chosen.smallest_interval(slo)
    refused = caught.value
    assert refused.nearest in fitting
    assert chosen.holds(refused.nearest, refused.achievable)
    assert refused.achievable.ttft_s >= slo.ttft_s
    assert refused.achievable.tpot_s >= slo.tpot_s
    assert refused.holding == chosen.holding(slo)


@given(objectives, st.sampled_from(ALL[:-1]))
def test_an_interval_that_holds_makes_no_load_late(slo: SLO, interval: int) -> None:
    late = [
        each
        for each in RECORD.loads
        for objective_s in (slo.ttft_s if each.phase == "prefill" else slo.tpot_s,)
        if RECORD.times_of(each).resident_step_s <= objective_s - 0.002
        and step_time_s(RECORD.times_of(each), interval) > objective_s
    ]
    if chooser().holds(interval, slo):
        assert late == []


counts = st.integers(1, 24)
durations = st.integers(0, 40).map(float)  # whole numbers: sums are exact


def test_each_of_the_limits() -> None:
    times = LayerTimes(num_layers=12, compute_s=1.0, transfer_s=4.0, other_s=2.0)
    assert step_time_s(times, None) == step_time_s(times, 6) == times.resident_step_s == 14.0
    assert step_time_s(times, 3) == 16.0  # 4 transfers
    assert step_time_s(LayerTimes(12, 1.0, 20.0, 2.0), 12) == 21.0  # one buffer: the transfer, then the layer
    # 2 transfers; between them layers 10, 11, those of the next step's first interval, and the host's part.
    assert step_time_s(LayerTimes(14, 1.0, 5.0, 6.0), 3) == (1 + 2 + 3) + 6 + 2 * 5.0 == 22.0


@given(counts, durations, durations, durations, st.floats(0.0, 2000.0))
def test_the_smallest_interval_holds_and_the_next_smaller_does_not(
    num_layers: int, compute_s: float, transfer_s: float, other_s: float, objective_s: float
) -> None:
    times = LayerTimes(num_layers, compute_s, transfer_s, other_s)
    found = smallest_interval(times, objective_s)
    holding = [each for each in range(1, num_layers + 1) if step_time_s(times, each) <= objective_s]
    assert found == min(holding, default=None)
    if objective_s >= times.resident_step_s + transfer_s:
        assert found is not None


def test_the_printed_formula_offloads_more_layers_than_the_link_can_move() -> None:
    """floor(L / L_offload) of section 4.4, with the computation of all layers where it prints one layer's."""
    times = LayerTimes(num_layers=30, compute_s=1.0, transfer_s=3.5)
    objective_s = times.resident_step_s
    num_hidden = int(objective_s / times.transfer_s)
    printed = times.num_layers // num_hidden
    assert (num_hidden, printed, len(offloaded_layers(30, printed))) == (8, 3, 10)
    assert step_time_s(times, printed) == 35.0 > objective_s
    assert smallest_interval(times, objective_s) == 4


@given(counts, st.integers(1, 24))
def test_the_last_of_every_interval_is_offloaded_and_two_buffers_replace_them(
    num_layers: int, interval: int
) -> None:
    offloaded = offloaded_layers(num_layers, interval)
    assert list(offloaded) == [index for index in range(num_layers) if (index + 1) % interval == 0]
    expected = num_layers if len(offloaded) < 3 else num_layers - len(offloaded) + 2
    assert num_device_layers(num_layers, interval) == expected
    assert num_device_layers(num_layers, None) == num_layers


def test_runs_of_what_varies_are_steadier_than_one() -> None:
    """Every tenth takes five times as long; so of eight in a row at most one does."""
    times_s = [0.005 if number % 10 == 0 else 0.001 for number in range(640)]
    runs = run_times_s(times_s)
    assert runs[0] == 0.005
    assert runs[3] == pytest.approx((7 * 0.001 + 0.005) / 8)
    assert len(runs) == 6, "of runs of 64 there are too few"
    assert runs[5] == pytest.approx((28 * 0.001 + 4 * 0.005) / 32)


def test_what_is_slow_for_a_while_is_slow_for_whole_runs() -> None:
    times_s = [0.005 if number % 320 < 32 else 0.001 for number in range(640)]
    assert run_times_s(times_s)[:5] == pytest.approx([0.005] * 5)


def test_one_time_is_a_run() -> None:
    assert run_times_s([0.5]) == [0.5]


def test_delays_are_those_of_stretches_of_typical_time() -> None:
    """Parts of 1 ms; one of 50 takes 21."""
    stretches = [(0.001, 0.021 if number % 50 == 0 else 0.001) for number in range(2000)]
    found = delays_s(stretches)
    assert found == pytest.approx([0.020] * 6 + [0.040])
    assert delays_s([(0.001, 0.001)] * 100) == [0.0] * 3
    assert delays_s([]) == []


def test_what_is_faster_than_typical_is_no_delay() -> None:
    assert delays_s([(0.001, 0.0005)] * 100) == [0.0] * 3


def test_the_quantile_is_exceeded_by_one_in_a_hundred() -> None:
    assert quantile(range(1, 101)) == 99
