"""The interval that holds objectives within a device's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.slo import SLO
from backfill.offloading.choice import IntervalChooser, LoadLimits, NoIntervalHolds
from backfill.offloading.interval import num_device_layers, step_time_s
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
