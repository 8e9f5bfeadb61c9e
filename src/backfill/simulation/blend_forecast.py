"""How much KV the requests of an engine will need, from their expected outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from backfill.blending.requests import PlannedRequest
from backfill.core.request import Request, RequestId

# Requests that generate less than this part of what a new one does end long before it, and others like them
# take their places.
_MUCH_SHORTER = 0.125


class _Forecast(NamedTuple):
    request: Request
    reused_tokens: int
    output_tokens: float


@dataclass(slots=True, eq=False)
class MemoryForecast:
    """Admits a request if the KV of all fits at every later instant, should outputs end as expected.

    Requests decode one token a step each. So the need is greatest just before one of them ends: for the k
    requests with most tokens to go, the tokens that they have now, and k times those that the k-th has to
    go. Those that are much shorter than the new one count by their mean size all the time. Tokens that
    requests share are not counted.

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

    def fits(self, num_prompt_tokens: int, planned: PlannedRequest) -> bool:
        """Whether a request can be added. Always, if it is alone."""
        if not self._all:
            return True
        outputs = planned.expected_output_tokens
        steady = 0.0
        held = [num_prompt_tokens - planned.reused_tokens + self.slack_tokens]
        left = [outputs]
        least = _MUCH_SHORTER * outputs
        for request, reused_tokens, expected in self._all.values():
            if expected < least:
                steady += request.num_prompt_tokens - reused_tokens + expected / 2 + self.slack_tokens
            else:
                held.append(request.num_tokens - reused_tokens + self.slack_tokens)
                left.append(request.num_prompt_tokens + expected - request.num_tokens)
        now = np.array(held, dtype=np.float64)
        to_go = np.maximum(np.array(left), 1.0)  # one that outlives its expectation may end at any step
        order = np.argsort(-to_go)
        counts = np.arange(1, len(now) + 1)
        peak = (np.cumsum(now[order]) + counts * to_go[order]).max()
        return bool(steady + peak <= self.kv_tokens)
