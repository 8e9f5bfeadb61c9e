"""Words in shared memory: stop requests of the driver, and a barrier of the ranks."""

from __future__ import annotations

import os
import time

from backfill.core.errors import BackfillError
from backfill.parallel.memory import create_memory, map_memory

_NUM_WORDS = 64  # more than the steps that are ever in flight
_BARRIER_POLL_S = 0.005
_BARRIER_TIMEOUT_S = 600.0


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

    def __init__(self, num_words: int = _NUM_WORDS, fd: int | None = None) -> None:
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
