"""A ring of messages in shared memory: one process writes them, several read all of them.

A message may be longer than the ring: the writer goes on as readers make room. Readers that find nothing
sleep until the writer wakes them all with one call, which it saves if none sleeps. They do not spin first:
where ranks and driver share cores, that takes the time of those they wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from backfill import _shared_memory  # type: ignore[attr-defined]
from backfill.parallel.shared_memory import create_memory, map_memory

_SLEEP_S = 0.25
_FULL_WAIT_S = 0.0005  # a full ring is rare: only long prompts fill it


class RingClosed(Exception):
    """The process at the other end has ended."""


def create_ring(capacity: int, num_readers: int) -> int:
    """File descriptor of the memory of a new ring that holds ``capacity`` bytes. The caller closes it."""
    return create_memory(_shared_memory.ring_header_bytes(num_readers) + capacity)


class RingWriter:
    """Args:
    fd: of ``create_ring``.
    check: called while the ring is full; raises if a reader has ended.
    """

    def __init__(self, fd: int, num_readers: int, check: Callable[[], None]) -> None:
        self._ring = _shared_memory.RingWriter(map_memory(fd), num_readers)
        self._check = check

    def write(self, message: bytes) -> None:
        """Blocks while the ring is full."""
        while not self._ring.write(message):
            self._check()
            time.sleep(_FULL_WAIT_S)


class RingReader:
    """Args:
    fd: of ``create_ring``; inherited.
    reader: its number, from 0.
    check: called now and then while there is nothing to read; raises if the writer has ended.
    """

    def __init__(self, fd: int, num_readers: int, reader: int, check: Callable[[], None]) -> None:
        self._ring = _shared_memory.RingReader(map_memory(fd), num_readers, reader)
        self._check = check

    def read(self) -> bytes:
        """The next message; blocks until it is there."""
        while (message := self._ring.read()) is None:
            if not self._ring.wait(_SLEEP_S):
                self._check()
        return bytes(message)
