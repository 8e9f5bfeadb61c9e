"""How a pass is told to stop between two of its layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StopSignal(NamedTuple):
    """A word that another thread or process writes to stop a pass between two layers.

    Attributes:
        word: int64 ``[1]``, which holds ``value`` once the pass is to stop.
        layers_apart: it may stop after every so many of its layers.
    """

    word: NDArray[np.int64]
    value: int
    layers_apart: int = 1

    def is_set(self) -> bool:
        return bool(self.word[0] == self.value)
