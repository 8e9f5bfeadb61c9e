"""Times of several ranks as those of one model."""

from __future__ import annotations

from dataclasses import replace
from operator import le

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.plan import RankTiming
from backfill.offloading.rank_times import RankTransfers, layer_bytes, merge_step

NUM_LAYERS = 4
Halves = tuple[float, float]  # of a layer: each ends with a sum over all ranks

TIMING = RankTiming((), (), (), 100)


def timing(layers_s: list[float], waits_s: list[float], *transfers_s: float) -> RankTiming:
    return replace(TIMING, layers_s=tuple(layers_s), waits_s=tuple(waits_s), transfers_s=transfers_s)


def lockstep(halves_s: list[list[Halves]], waits_s: list[list[float]]) -> list[RankTiming]:
    """What ranks measure whose sums end each half of each layer. Both arguments by rank, then by layer."""
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in waits_s]
    end_s = 0.0
    for halves, waits in zip(zip(*halves_s, strict=True), zip(*waits_s, strict=True), strict=True):
        began_s = [end_s + wait_s for wait_s in waits]
        summed_s = max(each + first_s for each, (first_s, _) in zip(began_s, halves, strict=True))
        end_s = summed_s + max(second_s for _, second_s in halves)
        for (layers_s, of_rank), each, wait_s in zip(found, began_s, waits, strict=True):
            layers_s.append(end_s - each)
            of_rank.append(wait_s)
    return [timing(*each) for each in found]


seconds = st.floats(0.0, 1.0)
halves_of_layers = st.lists(st.tuples(seconds, seconds), min_size=NUM_LAYERS, max_size=NUM_LAYERS)
waits_of_layers = st.lists(seconds, min_size=NUM_LAYERS, max_size=NUM_LAYERS)


@given(halves_of_layers, st.lists(waits_of_layers, min_size=1, max_size=4))
def test_layers_of_equal_ranks_take_what_they_take_without_waiting(
    halves: list[Halves], waits: list[list[float]]
) -> None:
    """However long each rank waits for its weights, and then for those of the others."""
    merged = merge_step(lockstep([halves] * len(waits), waits), 1)
    assert merged.layers_s == pytest.approx([first_s + second_s for first_s, second_s in halves])
    assert merged.waits_s == pytest.approx(sum(map(max, zip(*waits, strict=True))))


@given(st.lists(st.tuples(halves_of_layers, waits_of_layers), min_size=1, max_size=4))
def test_all_time_of_unequal_ranks_is_in_layers_and_waits(
    ranks: list[tuple[list[Halves], list[float]]],
) -> None:
    """A layer counts for no more than it takes if none has to wait."""
    halves = [each for each, _ in ranks]
    measured = lockstep(halves, [waits for _, waits in ranks])
    merged = merge_step(measured, 1)
    total_s = sum(measured[0].layers_s) + sum(measured[0].waits_s)
    assert sum(merged.layers_s) + merged.waits_s == pytest.approx(total_s)
    without_waits = merge_step(lockstep(halves, [[0.0] * NUM_LAYERS for _ in ranks]), 1)
    assert all(map(le, merged.layers_s, [each + 1e-9 for each in without_waits.layers_s]))


def test_one_rank_is_as_it_is() -> None:
    assert merge_step([timing([0.1, 0.2], [0.3, 0.4])], 1) == ([0.1, 0.2], 0.7)


def test_stages_follow_one_another() -> None:
    """Of two ranks each; the one that waited longest for its weights waits for no other rank."""
    ranks = [
        timing([0.25], [0.5]),
        timing([0.5], [0.25]),
        timing([0.5, 2.0], [0.0, 0.0]),
        timing([0.5, 1.0], [0.0, 1.0]),
    ]
    assert merge_step(ranks, 2) == ([0.25, 0.5, 1.0], 1.5)


def test_a_transfer_takes_what_the_slowest_rank_of_its_stage_does() -> None:
    transfers = RankTransfers(2)
    transfers.add([timing([], [], *each) for each in ((1.0,), (2.0, 1.0), (5.0,), ())])
    transfers.add([timing([], [], *each) for each in ((3.0, 1.0), (2.0,), (5.0,), (1.0, 6.0, 9.0))])
    assert transfers.take() == [[2.0, 3.0, 2.0], [5.0, 6.0]]
    transfers.add([timing([], [], each) for each in (1.0, 2.0, 3.0, 4.0)])
    assert transfers.take() == [[2.0], [4.0]]


def test_the_ranks_of_a_stage_have_a_layer_together() -> None:
    sizes = [replace(TIMING, layer_bytes=each) for each in (100, 110, 100, 120)]
    assert layer_bytes(sizes, 2) == 220
    assert layer_bytes(sizes, 1) == 430
