"""A ring of bytes in shared memory: one process writes messages, several read all of them.

    words     [written | read by 0 | read by 1 | ...]     each on a cache line of its own
    bytes     [ ...................................... ]

The words count bytes since the start; a byte's place is its count modulo the capacity. A message is its
length and its bytes. It may be longer than the ring: the writer goes on as readers make room.

Readers that find nothing sleep until the writer wakes them all with one call. They do not spin first: where
ranks and driver share cores, that takes the time of those they wait for.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from backfill.parallel.futex import Futex, fence
from backfill.parallel.memory import create_memory, map_memory

_LINE = 8  # words of a cache line: processes that write different lines do not slow each other down
_WRITTEN = 0
_LENGTH = struct.Struct("<Q")
_SLEEP_S = 0.25
_FULL_WAIT_S = 0.0005  # a full ring is rare: only long prompts fill it


class RingClosed(Exception):
    """The process at the other end has ended."""


class RingMemory:
    """The memory of a ring, mapped.

    Args:
        fd: of ``create``; inherited by the readers.
    """

    def __init__(self, fd: int, num_readers: int) -> None:
        memory, header = map_memory(fd), _header_bytes(num_readers)
        self.words = memory[:header].cast("Q")
        self.data = memory[header:]
        self.capacity = len(self.data)
        self.futex = Futex(memory)
        self.places = [_LINE * (1 + reader) for reader in range(num_readers)]  # of the readers' words

    @staticmethod
    def create(capacity: int, num_readers: int) -> int:
        """File descriptor of the memory of a new ring that holds ``capacity`` bytes."""
        return create_memory(_header_bytes(num_readers) + capacity)


def _header_bytes(num_readers: int) -> int:
    return 8 * _LINE * (1 + num_readers)


class RingWriter:
    """Args:
    check: called while the ring is full; raises if a reader has ended.
    """

    def __init__(self, memory: RingMemory, check: Callable[[], None]) -> None:
        self._memory = memory
        self._check = check
        self._written = 0

    def write(self, message: bytes) -> None:
        """Blocks while the ring is full."""
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            num_bytes = min(self._room(), len(rest))
            if num_bytes:
                self._put(rest[:num_bytes])
                rest = rest[num_bytes:]
            else:
                self._check()
                time.sleep(_FULL_WAIT_S)

    def _room(self) -> int:
        memory = self._memory
        return memory.capacity - self._written + min(memory.words[place] for place in memory.places)

    def _put(self, part: memoryview) -> None:
        memory, place = self._memory, self._written % self._memory.capacity
        before_end = min(len(part), memory.capacity - place)
        memory.data[place : place + before_end] = part[:before_end]
        if before_end < len(part):
            memory.data[: len(part) - before_end] = part[before_end:]
        self._written += len(part)
        fence()
        memory.words[_WRITTEN] = self._written
        memory.futex.wake(_WRITTEN)


class RingReader:
    """Args:
    reader: its number, from 0.
    check: called now and then while there is nothing to read; raises if the writer has ended.
    """

    def __init__(self, memory: RingMemory, reader: int, check: Callable[[], None]) -> None:
        self._memory = memory
        self._place = memory.places[reader]
        self._check = check
        self._read = 0

    def read(self) -> bytes:
        """The next message; blocks until it is there."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length)

    def _take(self, num_bytes: int) -> bytes:
        memory, parts, left = self._memory, [], num_bytes
        while left:
            available = memory.words[_WRITTEN] - self._read
            if available == 0:
                self._wait()
                continue
            fence()
            place = self._read % memory.capacity
            count = min(available, left, memory.capacity - place)
            parts.append(bytes(memory.data[place : place + count]))
            left -= count
            self._read += count
            fence()
            memory.words[self._place] = self._read
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wait(self) -> None:
        """Return when there is something to read."""
        memory, read = self._memory, self._read
        while True:
            memory.futex.wait(_WRITTEN, read, _SLEEP_S)
            if memory.words[_WRITTEN] != read:
                return
            self._check()
