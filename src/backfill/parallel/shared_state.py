"""What a driver and its ranks share of a step, in memory: stop requests, and how far each rank is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from backfill.core.errors import BackfillError
from backfill.execution.stop_words import StopWords
from backfill.parallel.shared_memory import create_memory, map_memory

_NUM_STOP_WORDS = 64  # more than the steps that are ever in flight
_LINE = 8  # words of a cache line, one for each rank
_STEP, _LAYER, _EXCHANGES, _PLANNED = range(4)
_POLL_S = 0.005
_PLAN_TIMEOUT_S = 600.0


class Position(NamedTuple):
    """Where a rank is.

    Attributes:
        step: that it has begun last; -1 before the first.
        layer: that it has begun last in this step; -1 before the first.
        exchanges: it waits for other ranks.
    """

    step: int
    layer: int
    exchanges: bool


class SharedState:
    """Words of 64 bits, all 0 at first. May be pickled for a process that inherits the file descriptor.

    Attributes:
        stops: written by the driver at any time, read by ranks at safepoints.
    """

    def __init__(self, num_ranks: int, fd: int | None = None) -> None:
        self._num_ranks = num_ranks
        self.fd = create_memory(8 * (_NUM_STOP_WORDS + _LINE * num_ranks)) if fd is None else fd
        words = map_memory(self.fd).cast("q")
        self.stops = StopWords(words[:_NUM_STOP_WORDS])
        self._places = words[_NUM_STOP_WORDS:]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._num_ranks, self.fd)

    def of_rank(self, rank: int) -> RankProgress:
        return RankProgress(self._places[_LINE * rank : _LINE * (rank + 1)])

    def positions(self) -> list[Position]:
        """By rank. One that changes meanwhile may be seen half changed."""
        return [self.of_rank(rank).position for rank in range(self._num_ranks)]

    def snapshot(self) -> bytes:
        """Changes when a rank gets on."""
        return bytes(self._places)

    def wait_planned(self, ranks: Sequence[int], rank: int, timeout_s: float = _PLAN_TIMEOUT_S) -> None:
        """Say that a rank has planned its memory, and wait until all of ``ranks`` have.

        Raises: BackfillError, which names those that have not in this time.
        """
        self.of_rank(rank).set_planned()
        until_s = time.monotonic() + timeout_s
        while missing := [each for each in ranks if not self._places[_LINE * each + _PLANNED]]:
            if time.monotonic() > until_s:
                raise BackfillError(
                    f"Rank {rank} has waited {timeout_s:g} s for these ranks to begin to load: "
                    f"{', '.join(map(str, missing))}."
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the file; the words stay usable here. May be called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class RankProgress:
    """How far one rank is. The rank writes it."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def set_planned(self) -> None:
        self._words[_PLANNED] = 1

    def begin_step(self, step: int) -> None:
        self._words[_LAYER] = 0
        self._words[_STEP] = step + 1

    def begin_layer(self, layer: int) -> None:
        self._words[_LAYER] = layer + 1

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """While the rank waits for others."""
        self._words[_EXCHANGES] = 1
        try:
            yield
        finally:
            self._words[_EXCHANGES] = 0

    @property
    def position(self) -> Position:
        words = self._words
        return Position(words[_STEP] - 1, words[_LAYER] - 1, bool(words[_EXCHANGES]))

    def data(self) -> bytes:
        """For ``set_data`` in another process."""
        return bytes(self._words)

    def set_data(self, data: bytes) -> None:
        """Raises: ValueError for what ``data`` has not returned."""
        if len(data) != self._words.nbytes:
            raise ValueError(f"{len(data)} bytes, and not the {self._words.nbytes} of a rank's progress")
        self._words[:] = memoryview(data).cast("q")
