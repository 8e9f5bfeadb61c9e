"""Memory that processes share: words, and counters by which ranks wait for each other.

It has no name, so none is left behind however they end: they inherit its file descriptor.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time

from backfill import _shared_memory  # type: ignore[attr-defined]
from backfill.core.errors import BackfillError
from backfill.execution.collectives import PeerFailed
from backfill.ipc.python_process import is_running

CLOSED = 2**62  # the counter of a rank that has ended
_NUM_STOP_WORDS = 64  # more than the steps that are ever in flight
_BARRIER_POLL_S = 0.005
_BARRIER_TIMEOUT_S = 600.0
_ALIVE_CHECK_S = 0.25


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


class SharedWords:
    """Words of 64 bits, all 0 at first. May be pickled for a process that inherits the file descriptor."""

    def __init__(self, num_words: int, fd: int | None = None) -> None:
        self.fd = create_memory(8 * num_words) if fd is None else fd
        self._num_words = num_words
        self._words = map_memory(self.fd).cast("q")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._num_words, self.fd)

    def close(self) -> None:
        """Close the file; the words stay usable here. May be called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class StopWords(SharedWords):
    """Stop requests, written by the driver at any time and read by ranks at safepoints.

    There is a word for each step in flight, with the number of the step to stop.
    """

    def __init__(self, num_words: int = _NUM_STOP_WORDS, fd: int | None = None) -> None:
        super().__init__(num_words, fd)

    def request(self, step: int) -> None:
        """Stop the step at its next safepoint. One that has ended does not notice."""
        word = step % self._num_words
        # Steps count from 0 and a new word is 0. A late call for an earlier step must not undo it.
        self._words[word] = max(self._words[word], step + 1)

    def is_requested(self, step: int) -> bool:
        return self._words[step % self._num_words] == step + 1


class Barrier(SharedWords):
    """Where ranks wait for each other, once."""

    def arrive(self, rank: int) -> None:
        """Say that the rank has come, without waiting."""
        self._words[rank] = 1

    def has_come(self, rank: int) -> bool:
        return bool(self._words[rank])

    def wait(self, rank: int, timeout_s: float = _BARRIER_TIMEOUT_S) -> None:
        """Raises: BackfillError, which names those that have not come in this time."""
        self.arrive(rank)
        until_s = time.monotonic() + timeout_s
        while not all(self._words):
            if time.monotonic() > until_s:
                missing = ", ".join(str(other) for other, has_come in enumerate(self._words) if not has_come)
                raise BackfillError(
                    f"Rank {rank} has waited {timeout_s:g} s for these ranks to begin to load: {missing}."
                )
            time.sleep(_BARRIER_POLL_S)


class Signals:
    """A counter and some words for each rank; each rank writes its own.

    A wait looks a few times, then yields, then sleeps, so that ranks that share cores do not slow down the
    one they wait for. What a rank has written before it raises its counter is seen by those who see the
    counter.

    Args:
        memory: zeros when the first rank comes; ``num_bytes`` of it are used.
        num_words: words of each rank for the user of this.
    """

    def __init__(self, memory: memoryview, rank: int, size: int, num_words: int) -> None:
        self._cpp = cpp = _shared_memory.Signals(memory, rank, size, num_words)
        self.count, self.raise_to = cpp.count, cpp.raise_to
        self.word, self.set_word = cpp.word, cpp.set_word

    @staticmethod
    def num_bytes(size: int, num_words: int) -> int:
        return int(_shared_memory.Signals.num_bytes(size, num_words))

    def wait_for(self, rank: int, value: int) -> None:
        """Until the rank's counter has reached ``value``. Raises: PeerFailed if its process has ended."""
        while not self._cpp.wait_for(rank, value, _ALIVE_CHECK_S):
            pid = self._cpp.pid(rank)  # 0 before the rank has come
            if pid and not is_running(pid) and self.count(rank) < value:
                raise PeerFailed(f"the process of rank {rank} (pid {pid}) has ended")

    def close(self) -> None:
        """Everyone who waits for this rank goes on, now and later."""
        self.raise_to(CLOSED)
