"""Requests that wait to join the batch."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Sequence

from backfill.core.request import OrderKey, Request

_order_key = operator.attrgetter("order_key")


class RequestQueue:
    """Waiting and preempted requests of one priority level by ``Request.order_key``, most urgent first.

    A preempted request keeps its key, so it returns to its old place and not to the end.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Sequence[Request]:
        """In their order."""
        return self._requests

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_order_key)

    def peek(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def head_key(self) -> OrderKey:
        """Key of the most urgent; only when there is one."""
        return self._requests[0].order_key

    def pop(self) -> Request:
        return self._requests.pop(0)

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue, wherever it stands."""
        index = bisect_left(self._requests, request.order_key, key=_order_key)
        assert self._requests[index] is request, f"{request.request_id} is not where its key says"
        del self._requests[index]
