"""Counters in shared memory by which ranks wait for each other."""

from __future__ import annotations

import os
import time

from backfill.execution.collectives import PeerFailed
from backfill.ipc.python_process import is_running
from backfill.parallel.futex import Futex, fence

_LINE_BYTES = 64
_NUM_POLLS = 40
_NUM_YIELDS = 20
_ALIVE_CHECK_S = 0.25
CLOSED = 2**62


class Signals:
    """A counter, a process id and some words for each rank; each rank writes its own.

    A wait looks a few times, then yields, then sleeps, so that ranks that share cores do not slow down the
    one they wait for.

    Args:
        memory: zeros when the first rank comes; ``num_bytes`` of it are used.
        num_words: words of each rank for the user of this.
    """

    def __init__(self, memory: memoryview, rank: int, size: int, num_words: int) -> None:
        stride = self._stride(size, num_words)
        self.words = memory[: 8 * stride * size].cast("q")
        self._futex = Futex(memory)
        self.rank = rank
        self.size = size
        self._counters = [stride * other for other in range(size)]
        # Of each rank, a word for every rank that may sleep until its counter changes.
        self._sleepers = [stride * other + 2 for other in range(size)]
        self.first_words = [stride * other + 2 + size for other in range(size)]
        self.words[self._counters[rank] + 1] = os.getpid()

    @staticmethod
    def _stride(size: int, num_words: int) -> int:
        words_of_line = _LINE_BYTES // 8
        return -(-(2 + size + num_words) // words_of_line) * words_of_line

    @classmethod
    def num_bytes(cls, size: int, num_words: int) -> int:
        return 8 * cls._stride(size, num_words) * size

    def count(self, rank: int) -> int:
        return self.words[self._counters[rank]]

    def raise_to(self, value: int) -> None:
        """Set this rank's counter. What it has written before is seen by those who see the counter."""
        words, counter = self.words, self._counters[self.rank]
        fence()
        words[counter] = value
        fence()  # either this sees the flag of a rank that goes to sleep, or that rank sees the new counter
        first = self._sleepers[self.rank]
        if any(words[first : first + self.size]):
            self._futex.wake(counter)

    def wait_for(self, rank: int, value: int) -> None:
        """Until the rank's counter has reached ``value``. Raises: PeerFailed if its process has ended."""
        words, counter = self.words, self._counters[rank]
        for _ in range(_NUM_POLLS):
            if words[counter] >= value:
                fence()
                return
        for _ in range(_NUM_YIELDS):
            os.sched_yield()
            if words[counter] >= value:
                fence()
                return
        self._sleep(rank, value)

    def _sleep(self, rank: int, value: int) -> None:
        words, counter, flag = self.words, self._counters[rank], self._sleepers[rank] + self.rank
        checks_at = time.monotonic() + _ALIVE_CHECK_S
        words[flag] = 1
        fence()
        try:
            while (seen := words[counter]) < value:
                self._futex.wait(counter, seen, _ALIVE_CHECK_S)
                if time.monotonic() >= checks_at:
                    self._check_alive(rank, value)
                    checks_at = time.monotonic() + _ALIVE_CHECK_S
        finally:
            words[flag] = 0
        fence()

    def _check_alive(self, rank: int, value: int) -> None:
        pid = self.words[self._counters[rank] + 1]
        if pid and not is_running(pid) and self.words[self._counters[rank]] < value:
            raise PeerFailed(f"the process of rank {rank} (pid {pid}) has ended")

    def close(self) -> None:
        """Everyone who waits for this rank goes on, now and later."""
        self.raise_to(CLOSED)
