"""Memory that processes share, and a ring of messages in it: one process writes them, several read all.

It has no name, so none is left behind however they end: they inherit its file descriptor.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable

from backfill import _shared_memory  # type: ignore[attr-defined]

_SLEEP_S = 0.25
_FULL_WAIT_S = 0.0005  # a full ring is rare: only long prompts fill it


def create_memory(num_bytes: int) -> int:
    """File descriptor of a new file in memory, filled with zeros. The caller closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("backfill", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


def map_memory(fd: int) -> memoryview:
    """All of the file; what one process writes, the others read."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))


def create_ring(capacity: int, num_readers: int) -> int:
    """File descriptor of the memory of a new ring that holds ``capacity`` bytes. The caller closes it.

    A message may be longer than the ring: the writer goes on as readers make room. Readers that find nothing
    sleep until the writer wakes them all with one call, which it saves if none sleeps. They do not spin
    first: where ranks and driver share cores, that takes the time of those they wait for.
    """
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
