"""How much KV the requests of an engine will need, from their expected outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backfill.blending.requests import PlannedRequest
from backfill.core.request import Request, RequestId

# Requests that generate less than this part of what the longest one does end long before it, and others like
# them take their places.
_MUCH_SHORTER = 1 / 32


class _Forecast(NamedTuple):
    request: Request
    reused_tokens: int
    output_tokens: float


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """The KV that is expected to be free at each later instant. Instants are steps from now.

    Attributes:
        ends: instants at which requests end, ascending; the last is infinite.
        free_tokens: just before each end, less what the requests that run then will have grown by: between
            two ends it is constant.
        num_running: requests that grow by a token a step up to each end.
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
    """The need for KV of the requests that were admitted, should their outputs end as expected.

    Requests decode one token a step each. Those that are much shorter than the longest one count by their
    mean size all the time. Tokens that requests share are not counted.

    Args:
        kv_tokens: of the device's pool.
        slack_tokens: of a request, that its last KV blocks leave unused.
    """

    kv_tokens: int
    slack_tokens: int
    _all: dict[RequestId, _Forecast] = field(default_factory=dict)

    def add(self, request: Request, planned: PlannedRequest) -> None:
        self._all[request.request_id] = _Forecast(
            request, planned.reused_tokens, planned.expected_output_tokens
        )

    def remove(self, request_id: RequestId) -> None:
        del self._all[request_id]

    def room(self) -> Room:
        least = _MUCH_SHORTER * max((each.output_tokens for each in self._all.values()), default=0.0)
        free = float(self.kv_tokens - self.slack_tokens)
        held, left = [], []
        for request, reused_tokens, expected in self._all.values():
            if expected < least:
                free -= request.num_prompt_tokens - reused_tokens + expected / 2 + self.slack_tokens
            else:
                held.append(request.num_tokens - reused_tokens + self.slack_tokens)
                left.append(request.num_prompt_tokens + expected - request.num_tokens)
        to_go = np.maximum(np.array(left), 1.0)  # one that outlives its expectation may end at any step
        order = np.argsort(to_go)
        # Of the requests that end at an instant or later.
        held_then = np.append(np.cumsum(np.array(held, np.float64)[order][::-1])[::-1], 0.0)
        return Room(
            np.append(to_go[order], math.inf), free - held_then, np.arange(len(order), -1, -1, dtype=np.int64)
        )
