"""The ring: every reader reads every message, however small the ring is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.parallel.shared_memory import RingReader, RingWriter, create_ring
from backfill.parallel.worker import DriverClosed
from tests.shared import examples

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
