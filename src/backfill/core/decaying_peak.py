"""The most that there was lately."""

from __future__ import annotations

import math

_DECAY_S = 60.0  # time constant


class DecayingPeak:
    """The peak of a quantity, which is forgotten within a minute or so: as much may come again soon.

    Attributes:
        value: at the last note.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._noted_at_s = -math.inf

    def note(self, quantity: float, now_s: float) -> float:
        """Returns: the peak now."""
        elapsed_s = max(0.0, now_s - self._noted_at_s)
        self._noted_at_s = now_s
        self.value = max(self.value * math.exp(-elapsed_s / _DECAY_S), quantity)
        return self.value
