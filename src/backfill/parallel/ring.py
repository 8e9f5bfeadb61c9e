"""A ring of bytes in shared memory: one process writes messages, several read all of them.

    words     [written | read by 0, 0 sleeps | read by 1, 1 sleeps | ...]     each pair on a cache line
    bytes     [ .............................................................. ]

``written`` and ``read`` count bytes since the start; a byte's place is its count modulo the capacity. A message
is its length and its bytes, and may be longer than the ring: the writer goes on as readers make room.

A reader that finds nothing looks again for a moment, then sleeps on its doorbell, a socket to the writer, so a
writer or a reader that has ended is noticed as the socket's end.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from backfill.parallel.memory import create_memory, map_memory

_LINE = 8  # words of a cache line: processes that write different lines do not slow each other down
_LENGTH = struct.Struct("<Q")
_SPIN_S = 50e-6
_RECHECK_S = 0.05  # see RingReader._wait
_FULL_WAIT_S = 0.0005  # a full ring is rare: only long prompts fill it


class RingClosed(Exception):
    """The process at the other end has ended."""


class RingMemory:
    """The memory of a ring, mapped.

    Args:
        fd: of ``create``; inherited by the readers.
    """

    def __init__(self, fd: int, num_readers: int) -> None:
        header = _header_bytes(num_readers)
        memory = map_memory(fd)
        self.num_readers = num_readers
        self.words = memory[:header].cast("Q")
        self.data = memory[header:]
        self.capacity = len(self.data)
        self._fence = threading.Lock()

    @staticmethod
    def create(capacity: int, num_readers: int) -> int:
        """File descriptor of the memory of a new ring that holds ``capacity`` bytes."""
        return create_memory(_header_bytes(num_readers) + capacity)

    def fence(self) -> None:
        """Order what was written before against what is written or read after, also on weakly ordered CPUs."""
        with self._fence:
            pass


def _header_bytes(num_readers: int) -> int:
    return 8 * _LINE * (1 + num_readers)


class RingWriter:
    """Args:
    doorbells: one socket for each reader.
    wait_for_room: called while the ring is full; raises if a reader has ended.
    """

    def __init__(
        self, memory: RingMemory, doorbells: Sequence[socket.socket], wait_for_room: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._doorbells = doorbells
        self._wait_for_room = wait_for_room
        self._written = 0
        for doorbell in doorbells:
            doorbell.setblocking(False)

    def write(self, message: bytes) -> None:
        """Blocks while the ring is full."""
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            num_bytes = min(self._room(), len(rest))
            if num_bytes == 0:
                self._wait_for_room()
                time.sleep(_FULL_WAIT_S)
                continue
            self._put(rest[:num_bytes])
            rest = rest[num_bytes:]

    def _room(self) -> int:
        words, num_readers = self._memory.words, self._memory.num_readers
        read = min(words[_LINE * (1 + reader)] for reader in range(num_readers))
        return self._memory.capacity - (self._written - read)

    def _put(self, part: memoryview) -> None:
        memory, place = self._memory, self._written % self._memory.capacity
        before_end = min(len(part), memory.capacity - place)
        memory.data[place : place + before_end] = part[:before_end]
        memory.data[: len(part) - before_end] = part[before_end:]
        self._written += len(part)
        memory.fence()
        memory.words[0] = self._written
        memory.fence()
        for reader, doorbell in enumerate(self._doorbells):
            if memory.words[_LINE * (1 + reader) + 1]:
                with suppress(OSError):  # it has been rung already, or the reader has ended
                    doorbell.send(b"\0")


class RingReader:
    """Args:
    reader: its number, from 0.
    doorbell: the other end of the writer's socket for this reader.
    """

    def __init__(self, memory: RingMemory, reader: int, doorbell: socket.socket) -> None:
        self._memory = memory
        self._place = _LINE * (1 + reader)
        self._doorbell = doorbell
        self._read = 0

    def read(self) -> bytes:
        """The next message; blocks until it is there. Raises: RingClosed."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return bytes(self._take(length))

    def _take(self, num_bytes: int) -> bytearray:
        memory, taken = self._memory, bytearray(num_bytes)
        done = 0
        while done < num_bytes:
            available = memory.words[0] - self._read
            if available == 0:
                self._wait()
                continue
            memory.fence()
            place = self._read % memory.capacity
            count = min(available, num_bytes - done, memory.capacity - place)
            taken[done : done + count] = memory.data[place : place + count]
            done += count
            self._read += count
            memory.fence()
            memory.words[self._place] = self._read
        return taken

    def _wait(self) -> None:
        """Return when there is something to read."""
        words, read = self._memory.words, self._read
        until = time.perf_counter() + _SPIN_S
        while time.perf_counter() < until:
            if words[0] != read:
                return
        words[self._place + 1] = 1
        self._memory.fence()
        try:
            # A time limit, as no fence of Python's is known to order this flag against the counter on each CPU.
            while words[0] == read:
                if select.select([self._doorbell], (), (), _RECHECK_S)[0] and not self._doorbell.recv(4096):
                    raise RingClosed
        except OSError as error:
            raise RingClosed from error
        finally:
            words[self._place + 1] = 0
