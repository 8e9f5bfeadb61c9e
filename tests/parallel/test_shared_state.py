"""What a driver and its ranks share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from backfill import _shared_memory  # type: ignore[attr-defined]
from backfill.core.errors import BackfillError
from backfill.execution.collectives import PeerFailed
from backfill.parallel.shared_memory import create_memory, map_memory
from backfill.parallel.shared_memory_group import SharedMemoryGroup, Signals
from backfill.parallel.shared_state import Position, SharedState
from backfill.parallel.stall import describe_positions


@pytest.fixture
def state() -> Iterator[SharedState]:
    created = SharedState(4)
    yield created
    created.close()


def test_ranks_wait_until_those_of_their_stage_have_planned(state: SharedState) -> None:
    thread = threading.Thread(target=state.wait_planned, args=([2, 3], 2))
    thread.start()
    state.wait_planned([2, 3], 3)
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(BackfillError, match=r"Rank 1 has waited 0\.01 s for these ranks to .* load: 0\."):
        state.wait_planned([0, 1], 1, timeout_s=0.01)


def test_a_stop_of_an_earlier_step_does_not_undo_a_later_one(state: SharedState) -> None:
    num_words = len(state.stops._words)
    state.stops.request(2 * num_words)
    state.stops.request(num_words)
    assert [step for step in range(4 * num_words) if state.stops.is_requested(step)] == [2 * num_words]


def test_the_places_of_ranks_are_told_those_first_that_wait_for_no_other(state: SharedState) -> None:
    before = state.snapshot()
    for rank in range(3):
        state.of_rank(rank).begin_step(7)
    state.of_rank(3).begin_step(6)
    state.of_rank(1).begin_layer(0)
    state.of_rank(0).begin_layer(2)
    assert state.snapshot() != before
    with state.of_rank(0).exchanging():
        positions = state.positions()
    assert positions == [
        Position(7, 2, True),
        Position(7, 0, False),
        Position(7, -1, False),
        Position(6, -1, False),
    ]
    assert not state.positions()[0].exchanges
    assert describe_positions(7, range(4), positions) == (
        "rank 1 stands still in layer 0; rank 2 stands still before its first layer; "
        "rank 3 has not begun it; rank 0 waits for others in layer 2"
    )
    copy = SharedState(4)
    copy.of_rank(0).set_data(state.of_rank(0).data())
    assert copy.positions()[0] == Position(7, 2, False)
    copy.close()


def test_a_wait_for_another_rank_is_seen_while_it_lasts_also_one_that_fails(state: SharedState) -> None:
    fd = create_memory(SharedMemoryGroup.num_bytes(2))
    waiting, other = (SharedMemoryGroup(map_memory(fd), rank, 2, state.of_rank(rank)) for rank in range(2))
    os.close(fd)
    waiting.begin_step()
    failures: list[Exception] = []

    def wait() -> None:
        try:
            waiting._wait_for_others(1 << 24)
        except PeerFailed as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until_s = time.monotonic() + 60.0
    while not state.positions()[0].exchanges:
        assert time.monotonic() < until_s
    other.close()
    thread.join(60)
    assert failures
    assert not state.positions()[0].exchanges


def test_a_wait_for_a_counter_leaves_the_interpreter_to_other_threads() -> None:
    fd = create_memory(Signals.num_bytes(2, 0))
    ends = [_shared_memory.Signals(map_memory(fd), rank, 2, 0) for rank in range(2)]
    os.close(fd)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(ends[0].wait_for(1, 5, 60.0)))
    thread.start()
    began = time.monotonic()
    ends[1].raise_to(4)
    ends[1].raise_to(5)
    thread.join(60)
    assert found == [True]
    assert time.monotonic() - began < 30.0
    assert not ends[1].wait_for(0, 1, 0.001)
