"""What a driver and its ranks share, and when one stands still."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill import _shared_memory  # type: ignore[attr-defined]
from backfill.core.errors import BackfillError
from backfill.execution.collectives import PeerFailed
from backfill.parallel.shared_memory import RingReader, RingWriter, create_memory, create_ring, map_memory
from backfill.parallel.shared_memory_group import SharedMemoryGroup, Signals
from backfill.parallel.shared_state import Position, SharedState
from backfill.parallel.stall import StallWatch, describe_positions, stall_limit_s, unwatched_s
from backfill.parallel.worker import DriverClosed
from tests.api.servers import wait_until
from tests.shared import examples


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
    assert [step for step in range(4 * num_words) if state.stops.signal(step).is_set()] == [2 * num_words]


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
    wait_until(lambda: state.positions()[0].exchanges, "a rank that waits for others")
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


@pytest.mark.parametrize(
    ("engine_hang_timeout", "predicted_s", "limit_s"),
    [(None, 0.0, 150.0), (None, 0.1, 15.0), (None, 4.0, 40.0), (8.0, 4.0, 4.0), (0.0, 4.0, math.inf)],
)
def test_the_limit(engine_hang_timeout: float | None, predicted_s: float, limit_s: float) -> None:
    assert stall_limit_s(engine_hang_timeout, predicted_s) == limit_s


@pytest.mark.parametrize("engine_hang_timeout", [0.1, 8.0, 300.0])
def test_ranks_that_stand_still_are_named_before_the_engine_is_killed(engine_hang_timeout: float) -> None:
    limit_s = stall_limit_s(engine_hang_timeout, 0.1)
    assert unwatched_s(engine_hang_timeout) + limit_s <= 0.75 * engine_hang_timeout
    assert unwatched_s(None) + stall_limit_s(None, 0.1) < 30.0  # the least that it is by default
    assert unwatched_s(0.0) == unwatched_s(None)


def test_progress_begins_the_count_again_and_a_pause_of_the_machine_hardly_counts() -> None:
    watch = StallWatch(100.0)
    for look in range(9):
        watch.look("layer 1", 100.0 + look / 4)
    assert watch.still_s == 2.0
    watch.look("layer 1", 5000.0)
    assert watch.still_s == 2.5
    watch.look("layer 2", 5000.25)
    assert watch.still_s == 0.0
    watch.look("layer 2", 5000.5)
    assert watch.still_s == 0.25


TIMEOUT_S = 60.0


def nothing() -> None:
    pass


def ring(
    capacity: int, num_readers: int, check: Callable[[], None] = nothing
) -> tuple[RingWriter, list[RingReader]]:
    """Each end maps the memory for itself, as processes do."""
    fd = create_ring(capacity, num_readers)
    writer = RingWriter(fd, num_readers, check)
    readers = [RingReader(fd, num_readers, reader, check) for reader in range(num_readers)]
    os.close(fd)
    return writer, readers


@given(
    capacity=st.integers(1, 40),
    num_readers=st.integers(1, 3),
    messages=st.lists(st.binary(max_size=60), max_size=6),
)
@settings(max_examples=examples(40), deadline=None)
def test_every_reader_reads_every_message(capacity: int, num_readers: int, messages: Sequence[bytes]) -> None:
    writer, readers = ring(capacity, num_readers)
    found: list[list[bytes]] = [[] for _ in readers]

    def read(reader: RingReader, into: list[bytes]) -> None:
        into.extend(reader.read() for _ in messages)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, found, strict=True)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message)
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert found == [list(messages)] * num_readers


@given(rounds=st.lists(st.lists(st.binary(max_size=20), max_size=4), max_size=20))
def test_messages_that_fit_wait_for_readers_that_come_late(rounds: Sequence[Sequence[bytes]]) -> None:
    writer, (early, late) = ring(2 * 4 * 28, 2)
    for messages in rounds:
        for message in messages:
            writer.write(message)
        assert [early.read() for _ in messages] == list(messages)
        assert [late.read() for _ in messages] == list(messages)


def test_a_writer_gives_up_if_nobody_reads_any_more() -> None:
    class Ended(Exception):
        pass

    def check() -> None:
        raise Ended

    writer, _ = ring(16, 2, check)
    writer.write(b"12345678")
    with pytest.raises(Ended):
        writer.write(b"1")


def test_a_reader_gives_up_if_nobody_writes_any_more() -> None:
    def check() -> None:
        raise DriverClosed

    _, (reader,) = ring(16, 1, check)
    with pytest.raises(DriverClosed):
        reader.read()
