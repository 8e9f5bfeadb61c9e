"""How far ranks are in a step, in shared memory: what the driver says of one that stands still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from backfill.parallel.shared_memory import SharedWords

_LINE = 8  # words of a cache line, one for each rank
_STEP, _LAYER, _EXCHANGES = range(3)


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        step: that it has begun last; -1 before the first.
        layer: that it has begun last in this step; -1 before the first.
        exchanges: it is in an exchange with other ranks, and perhaps waits for them.
    """

    step: int
    layer: int
    exchanges: bool


class Progress(SharedWords):
    """The places of all ranks. Each writes its own, and the driver reads them."""

    @classmethod
    def of(cls, num_ranks: int) -> Progress:
        return cls(_LINE * num_ranks)

    def of_rank(self, rank: int) -> RankProgress:
        return RankProgress(self._words[_LINE * rank : _LINE * (rank + 1)])

    def snapshot(self) -> bytes:
        """Changes when a rank gets on."""
        return bytes(self._words)

    def part(self, ranks: range) -> bytes:
        """Of some ranks, for ``set_part`` in another process."""
        return bytes(self._words[_LINE * ranks.start : _LINE * ranks.stop])

    def set_part(self, ranks: range, part: bytes) -> None:
        self._words[_LINE * ranks.start : _LINE * ranks.stop] = memoryview(part).cast("q")

    def places(self) -> list[Place]:
        """By rank. One that changes meanwhile may be seen half changed."""
        words = self._words
        return [
            Place(words[first + _STEP] - 1, words[first + _LAYER] - 1, bool(words[first + _EXCHANGES]))
            for first in range(0, self._num_words, _LINE)
        ]


class RankProgress:
    """Writes the place of one rank."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def begin_step(self, step: int) -> None:
        self._words[_LAYER] = 0
        self._words[_STEP] = step + 1

    def begin_layer(self, layer: int) -> None:
        self._words[_LAYER] = layer + 1

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        self._words[_EXCHANGES] = 1
        try:
            yield
        finally:
            self._words[_EXCHANGES] = 0
