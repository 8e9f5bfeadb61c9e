"""Words of memory through which the steps of an executor are told to stop."""

from __future__ import annotations

import numpy as np

from backfill.kernels.stop_signal import StopSignal


class StopWords:
    """Which steps are to stop: a word for each step in flight. Requests may come from any thread or process.

    Args:
        words: of 64 bits, all 0 at first.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def request(self, step: int) -> None:
        """Stop the step at its next safepoint. One that has ended does not notice."""
        word = step % len(self._words)
        # Steps count from 0 and a new word is 0. A late call for an earlier step must not undo it.
        self._words[word] = max(self._words[word], step + 1)

    def signal(self, step: int) -> StopSignal:
        """Set once the step is to stop."""
        word = step % len(self._words)
        return StopSignal(np.frombuffer(self._words[word : word + 1], np.int64), step + 1)
