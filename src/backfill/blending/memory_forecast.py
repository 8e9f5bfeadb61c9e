"""How much KV the requests of an engine will need, from their expected outputs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SLACK_BLOCKS = 2
"""KV blocks whose tokens an output leaves unused at most."""

# Requests that generate less than this part of what the longest one does end long before it, and others like
# them take their places.
_MUCH_SHORTER = 1 / 32
# The KV kept for compute-bound requests beside memory-bound ones, over what they need in the mean.
_RESERVE_FACTOR = 1.5


def reserve_frac(compute_bound_memory_frac: float) -> float:
    """Of the KV, the part kept for compute-bound requests; see ``OfflinePool.compute_bound_memory_frac``."""
    return min(_RESERVE_FACTOR * compute_bound_memory_frac, 1.0)


@dataclass(slots=True, eq=False)
class _Need:
    """A request: tokens of its prompt, and of each of its outputs as expected and so far."""

    num_prompt_tokens: int
    output_tokens: float
    num_choices: int
    num_so_far: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """The KV that is expected to be free at each later instant. Instants are steps from now.

    Attributes:
        ends: instants at which requests end, ascending; the last is infinite.
        free_tokens: just before each end, without what the requests that run then will have grown by: between
            two ends it is constant.
        num_running: outputs that grow by a token a step up to each end.
    """

    ends: NDArray[np.float64]
    free_tokens: NDArray[np.float64]
    num_running: NDArray[np.int64]

    def most_output_tokens(self, num_prompt_tokens: int) -> float:
        """Longest output of one more request such that all fit at every later instant; 0 for none."""
        until = (self.free_tokens - num_prompt_tokens) / (self.num_running + 1)
        first = int(np.argmax(until < self.ends))
        begins = self.ends[first - 1] if first else 0.0
        return float(max(until[first], begins))


@dataclass(slots=True, eq=False)
class MemoryForecast:
    """The need for KV of requests, should their outputs end as expected.

    Requests decode one token a step each. Those that are much shorter than the longest one count by their
    mean size all the time.

    Attributes:
        online_tokens: KV that is left to online requests. It may be set at any time.

    Args:
        kv_tokens: of the device's pool.
        slack_tokens: of an output, that its last KV blocks leave unused.
    """

    kv_tokens: int
    slack_tokens: int
    online_tokens: int = 0
    _needs: dict[Hashable, _Need] = field(default_factory=dict)

    @property
    def offline_tokens(self) -> int:
        """KV beside online requests."""
        return max(self.kv_tokens - self.online_tokens, 0)

    def add(
        self, request_id: Hashable, num_prompt_tokens: int, output_tokens: float, num_choices: int = 1
    ) -> None:
        """
        Args:
            num_prompt_tokens: without those whose KV others hold as well.
            output_tokens: expected, of each choice.
        """
        self._needs[request_id] = _Need(num_prompt_tokens, output_tokens, num_choices)

    def note_progress(
        self, request_id: Hashable, num_output_tokens: int, expected_tokens: float | None = None
    ) -> None:
        """A request has generated so many tokens of each choice. An unknown one is ignored.

        Args:
            expected_tokens: of each choice in all, if that was corrected.
        """
        need = self._needs.get(request_id)
        if need is not None:
            need.num_so_far = num_output_tokens
            if expected_tokens is not None:
                need.output_tokens = expected_tokens

    def remove(self, request_id: Hashable) -> None:
        """An unknown one is ignored."""
        self._needs.pop(request_id, None)

    def room(self) -> Room:
        least = _MUCH_SHORTER * max((need.output_tokens for need in self._needs.values()), default=0.0)
        free = float(self.offline_tokens - self.slack_tokens)
        held, left, num_choices = [], [], []
        for need in self._needs.values():
            if need.output_tokens < least:
                mean_tokens = need.output_tokens / 2 + self.slack_tokens
                free -= need.num_prompt_tokens + need.num_choices * mean_tokens
            else:
                output_tokens = need.num_so_far + self.slack_tokens
                held.append(need.num_prompt_tokens + need.num_choices * output_tokens)
                left.append(need.output_tokens - need.num_so_far)
                num_choices.append(need.num_choices)
        to_go = np.maximum(np.array(left), 1.0)  # one that outlives its expectation may end at any step
        order = np.argsort(to_go)
        # Of the requests that end at an instant or later.
        held_then = np.append(np.cumsum(np.array(held, np.float64)[order][::-1])[::-1], 0.0)
        num_then = np.append(np.cumsum(np.array(num_choices, np.int64)[order][::-1])[::-1], 0)
        return Room(np.append(to_go[order], math.inf), free - held_then, num_then)
