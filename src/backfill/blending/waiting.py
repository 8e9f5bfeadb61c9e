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

    The nearest waiting neighbours of an index are found in almost constant time (union-find with path
    halving).
    """

    def __init__(self, prompts: Sequence[bytes], is_waiting: NDArray[np.bool_]) -> None:
        self._prompts = prompts
        self._flags = bytearray(is_waiting.tobytes())
        indices = np.arange(len(prompts) + 1)
        # Entry i of `_next` leads to the first waiting prompt at or after i; n means none.
        self._next = array("q", np.where(np.append(is_waiting, True), indices, indices + 1).tobytes())
        # Entry i of `_previous` leads to the last waiting prompt before i, plus 1; 0 means none.
        self._previous = array("q", np.where(np.insert(is_waiting, 0, True), indices, indices - 1).tobytes())
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
        index = bisect_left(self._prompts, prompt)
        after = _root(self._next, index)
        before = _root(self._previous, index) - 1
        longest = 0
        if after < len(self._prompts):
            longest = shared_prefix_tokens(prompt, self._prompts[after])
        if before >= 0:
            longest = max(longest, shared_prefix_tokens(prompt, self._prompts[before]))
        return longest


def _root(links: array[int], index: int) -> int:
    while links[index] != index:
        links[index] = links[links[index]]
        index = links[index]
    return index
