"""Requests that wait to join the batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

from backfill.core.request import Request, ServiceClass


class RequestQueue:
    """Waiting and preempted requests by ``Request.order_key``, most urgent first.

    A preempted request keeps its key, so it returns to its old place and not to the end.
    """

    def __init__(self) -> None:
        self.num_by_class: Counter[ServiceClass] = Counter()
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_order_key)
        self.num_by_class[request.service_class] += 1

    def peek(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def pop(self) -> Request:
        request = self._requests.pop(0)
        self.num_by_class[request.service_class] -= 1
        return request

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue, wherever it stands."""
        index = bisect_left(self._requests, request.order_key, key=_order_key)
        assert self._requests[index] is request, f"{request.request_id} is not where its key says"
        del self._requests[index]
        self.num_by_class[request.service_class] -= 1


def _order_key(request: Request) -> tuple[int, int, float, int]:
    return request.order_key
