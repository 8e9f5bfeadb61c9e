"""How much KV the requests of an engine will need, from their expected outputs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from backfill.blending.resources import Floats

SLACK_BLOCKS = 2
"""KV blocks whose tokens an output leaves unused at most."""

# Requests that generate less than this part of what the longest one does end long before it, and others like
# them follow.
_MUCH_SHORTER = 1 / 32
# The KV kept for compute-bound requests beside memory-bound ones, over what they need in the mean.
_RESERVE_FACTOR = 1.5


def reserve_frac(compute_bound_memory_frac: float) -> float:
    """Of the KV, the part kept for compute-bound requests; see ``OfflinePool.compute_bound_memory_frac``."""
    return min(_RESERVE_FACTOR * compute_bound_memory_frac, 1.0)


class _Column(IntEnum):
    """Of a request: tokens of its prompt, its outputs, and tokens of each of them as expected and so far."""

    PROMPT, CHOICES, EXPECTED, SO_FAR = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class FreeKV:
    """The KV that is expected to be free at each later instant. Instants are steps from now.

    Attributes:
        ends: instants at which requests end, ascending; the last is infinite.
        free_tokens: just before each end, without what the requests that run then will have grown by: between
            two ends it is constant.
        num_running: outputs that grow by a token a step up to each end.
    """

    ends: Floats
    free_tokens: Floats
    num_running: Floats

    def most_output_tokens(self, num_prompt_tokens: int) -> float:
        """Longest output of one more request such that all fit at every later instant; 0 for none."""
        until = (self.free_tokens - num_prompt_tokens) / (self.num_running + 1)
        first = int(np.argmax(until < self.ends))
        begins = self.ends[first - 1] if first else 0.0
        return float(max(until[first], begins))


class MemoryForecast:
    """The need for KV of requests, should their outputs end as expected.

    Requests decode one token a step each. Those that are much shorter than the longest one count by their
    mean size all the time.

    Attributes:
        kv_tokens: of the device's pool.
        slack_tokens: of an output, that its last KV blocks leave unused.
        online_tokens: KV that is left to online requests, which may come again.
        kept_tokens: KV that they have now, or that is kept for them in the prefix cache.

        All but ``slack_tokens`` may be set at any time.
    """

    def __init__(self, kv_tokens: int, slack_tokens: int) -> None:
        self.kv_tokens, self.online_tokens, self.kept_tokens = kv_tokens, 0, 0
        self.slack_tokens = slack_tokens
        # ``free`` is asked for with each request that is taken, so it loops over none.
        self._columns = np.empty((len(_Column), 64))
        self._ids: list[Hashable] = []  # by column
        self._index_of: dict[Hashable, int] = {}

    @property
    def offline_tokens(self) -> int:
        """KV beside online requests."""
        return max(self.kv_tokens - max(self.online_tokens, self.kept_tokens), 0)

    def add(
        self, request_id: Hashable, num_prompt_tokens: int, output_tokens: float, num_choices: int = 1
    ) -> None:
        """
        Args:
            request_id: not in use.
            num_prompt_tokens: without those whose KV others hold as well.
            output_tokens: expected, of each choice.
        """
        index = self._index_of[request_id] = len(self._ids)
        self._ids.append(request_id)
        if index == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        self._columns[:, index] = num_prompt_tokens, num_choices, output_tokens, 0

    def note_progress(
        self, request_id: Hashable, num_output_tokens: int, expected_tokens: float | None = None
    ) -> None:
        """A request has generated so many tokens of each choice. An unknown one is ignored.

        Args:
            expected_tokens: of each choice in all, if that was corrected.
        """
        index = self._index_of.get(request_id)
        if index is not None:
            self._columns[_Column.SO_FAR, index] = num_output_tokens
            if expected_tokens is not None:
                self._columns[_Column.EXPECTED, index] = expected_tokens

    def remove(self, request_id: Hashable) -> None:
        """An unknown one is ignored."""
        index = self._index_of.pop(request_id, None)
        if index is None:
            return
        last_id = self._ids.pop()
        if last_id != request_id:
            self._columns[:, index] = self._columns[:, len(self._ids)]
            self._ids[index] = last_id
            self._index_of[last_id] = index

    def free(self) -> FreeKV:
        columns = self._columns[:, : len(self._ids)]
        expected = columns[_Column.EXPECTED]
        is_short = expected < _MUCH_SHORTER * expected.max(initial=0.0)
        prompts, choices, expected, _ = columns[:, is_short]
        means = prompts + choices * (expected / 2 + self.slack_tokens)
        free = self.offline_tokens - self.slack_tokens - float(means.sum())
        prompts, choices, expected, so_far = columns[:, ~is_short]
        to_go = np.maximum(expected - so_far, 1.0)  # one that outlives its expectation may end at any step
        order = np.argsort(to_go)
        held = prompts + choices * (so_far + self.slack_tokens)
        return FreeKV(
            np.append(to_go[order], math.inf),
            free - _from_here(held[order]),
            _from_here(choices[order]),
        )


def _from_here(values: Floats) -> Floats:
    """At each index, the sum of what is there and behind it; 0 in the end."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)
