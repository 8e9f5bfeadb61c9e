"""A ring of bytes in shared memory: one process writes messages, several read all of them.

    words     [written, announced | read by 0, 0 sleeps | read by 1, 1 sleeps | ...]     one line a process
    bytes     [ ...................................... ]

Words count bytes since the start; a byte's place is its count modulo the capacity. A message is its length
and its bytes. It may be longer than the ring: the writer goes on as readers make room. A word is written with
one store of 8 aligned bytes, so no half of it is ever seen.

Readers that find nothing sleep until the writer wakes them all with one call, which it saves if none sleeps.
They do not spin first: where ranks and driver share cores, that takes the time of those they wait for. But
the writer may announce a message that it is about to encode: readers wake up meanwhile, and look for it.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable

from backfill.parallel.futex import Futex, fence
from backfill.parallel.memory import create_memory, map_memory

_LINE = 8  # words of a cache line: processes that write different lines do not slow each other down
_WRITTEN, _ANNOUNCED = 0, 1
_LENGTH = struct.Struct("<Q")
_SLEEP_S = 0.25
_LOOK_S = 0.0003
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
        self.places = [_LINE * (1 + reader) for reader in range(num_readers)]  # of what each has read
        self.flags = [place + 1 for place in self.places]  # whether it sleeps, or is about to

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

    def announce(self) -> None:
        """Wake the readers: a message follows within microseconds. If it does not, they sleep again."""
        self._memory.words[_ANNOUNCED] += 1
        self._wake()

    def write(self, message: bytes) -> None:
        """Blocks while the ring is full."""
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while True:
            room = self._room()
            if room >= len(rest):
                self._put(rest)
                return
            if room:
                self._put(rest[:room])
                rest = rest[room:]
            self._check()
            time.sleep(_FULL_WAIT_S)

    def _room(self) -> int:
        memory = self._memory
        return memory.capacity - self._written + min(map(memory.words.__getitem__, memory.places))

    def _put(self, part: memoryview) -> None:
        memory, place = self._memory, self._written % self._memory.capacity
        before_end = min(len(part), memory.capacity - place)
        memory.data[place : place + before_end] = part[:before_end]
        if before_end < len(part):
            memory.data[: len(part) - before_end] = part[before_end:]
        self._written += len(part)
        fence()
        memory.words[_WRITTEN] = self._written
        self._wake()

    def _wake(self) -> None:
        memory = self._memory
        fence()  # either this sees the flag of a reader that goes to sleep, or that reader what was written
        if any(map(memory.words.__getitem__, memory.flags)):
            memory.futex.wake(_WRITTEN)


class RingReader:
    """Args:
    reader: its number, from 0.
    check: called now and then while there is nothing to read; raises if the writer has ended.
    """

    def __init__(self, memory: RingMemory, reader: int, check: Callable[[], None]) -> None:
        self._memory = memory
        self._place, self._flag = memory.places[reader], memory.flags[reader]
        self._check = check
        self._read = 0
        self._taken = bytearray()  # off the ring, and not returned yet

    def read(self) -> bytes:
        """The next message; blocks until it is there."""
        taken = self._taken
        self._take(_LENGTH.size)
        end = _LENGTH.size + _LENGTH.unpack_from(taken)[0]
        self._take(end)
        message = bytes(taken[_LENGTH.size : end])
        del taken[:end]
        return message

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something is written, at most so long. Returns: whether there is something to read."""
        return bool(self._taken) or self._sleep(timeout_s)

    def _sleep(self, timeout_s: float) -> bool:
        """Until something is written. Returns: whether something is."""
        words, read = self._memory.words, self._read
        announced = words[_ANNOUNCED]
        words[self._flag] = 1
        fence()
        self._memory.futex.wait(_WRITTEN, read, timeout_s)  # not if the kernel finds another count
        words[self._flag] = 0
        if words[_ANNOUNCED] != announced:
            until_s = time.perf_counter() + _LOOK_S
            while words[_WRITTEN] == read and time.perf_counter() < until_s:
                os.sched_yield()
        return words[_WRITTEN] != read

    def _take(self, num_bytes: int) -> None:
        """Until there are so many bytes in ``_taken``."""
        memory = self._memory
        while len(self._taken) < num_bytes:
            available = memory.words[_WRITTEN] - self._read
            if available == 0:
                if not self._sleep(_SLEEP_S):
                    self._check()
                continue
            fence()
            place = self._read % memory.capacity
            before_end = min(available, memory.capacity - place)
            self._taken += memory.data[place : place + before_end]
            self._taken += memory.data[: available - before_end]
            self._read += available
            fence()
            memory.words[self._place] = self._read
