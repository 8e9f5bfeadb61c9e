"""Stop requests in shared memory: written by the driver at any time, read by ranks at safepoints."""

from __future__ import annotations

import os

from backfill.parallel.memory import create_memory, map_memory

_NUM_WORDS = 64  # more than the steps that are ever in flight


class StopWords:
    """One word for each step in flight, holding the number of the step to stop.

    It may be pickled to a process that inherits its file descriptor.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = create_memory(8 * _NUM_WORDS) if fd is None else fd
        self._words = map_memory(self.fd).cast("q")

    def __reduce__(self) -> tuple[type[StopWords], tuple[int]]:
        return StopWords, (self.fd,)

    def request(self, step: int) -> None:
        """Stop the step at its next safepoint. One that has ended does not notice."""
        word = step % _NUM_WORDS
        # Steps count from 0 and a new word is 0. A late call for an earlier step must not undo it.
        self._words[word] = max(self._words[word], step + 1)

    def is_requested(self, step: int) -> bool:
        return self._words[step % _NUM_WORDS] == step + 1

    def close(self) -> None:
        """Close the file; the words stay readable here. May be called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
