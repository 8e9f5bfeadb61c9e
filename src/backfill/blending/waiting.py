"""Which prompts of a tree wait, and the nearest ones that do."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backfill.blending.tree import shared_prefix_tokens


class Waiting:
    """The waiting ones among sorted prompts. All wait at first; one that left does not come back.

    The nearest waiting neighbours of a place are found in almost constant time (union-find with path
    halving).
    """

    def __init__(self, prompts: Sequence[bytes], is_waiting: NDArray[np.bool_]) -> None:
        self._prompts = prompts
        self._flags = bytearray(is_waiting.tobytes())
        places = np.arange(len(prompts) + 1)
        # Place i of `_next` leads to the first waiting prompt at or after i; n means none.
        self._next = array("q", np.where(np.append(is_waiting, True), places, places + 1).tobytes())
        # Place i of `_previous` leads to the last waiting prompt before i, plus 1; 0 means none.
        self._previous = array("q", np.where(np.insert(is_waiting, 0, True), places, places - 1).tobytes())
        self.count = int(is_waiting.sum())

    def __contains__(self, index: int) -> bool:
        return bool(self._flags[index])

    @property
    def mask(self) -> NDArray[np.bool_]:
        return np.frombuffer(self._flags, np.bool_).copy()

    def remove(self, index: int) -> None:
        assert self._flags[index], f"{index} does not wait"
        self._flags[index] = 0
        self._next[index] = index + 1
        self._previous[index + 1] = index
        self.count -= 1

    def longest_shared(self, prompt: bytes) -> int:
        """Leading tokens of the prompt that any waiting prompt begins with too."""
        place = bisect_left(self._prompts, prompt)
        after = _root(self._next, place)
        before = _root(self._previous, place) - 1
        longest = 0
        if after < len(self._prompts):
            longest = shared_prefix_tokens(prompt, self._prompts[after])
        if before >= 0:
            longest = max(longest, shared_prefix_tokens(prompt, self._prompts[before]))
        return longest


def _root(links: array[int], place: int) -> int:
    while links[place] != place:
        links[place] = links[links[place]]
        place = links[place]
    return place
