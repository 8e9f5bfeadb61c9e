"""The unfinished requests by status, and when they are promoted."""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence

from backfill.core.request import PriorityLevel, Request, RequestId, RequestStatus, ServiceClass

_MIN_PROMOTIONS = 64  # a smaller heap of promotions is not worth clearing

order_key = operator.attrgetter("order_key")


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
        insort(self._requests, request, key=order_key)

    def remove(self, request: Request) -> None:
        """Remove a request that is in the queue, at any position."""
        index = bisect_left(self._requests, request.order_key, key=order_key)
        assert self._requests[index] is request, f"{request.request_id} is not where its key says"
        del self._requests[index]


class UnfinishedRequests:
    """Every unfinished request, by id and by status.

    Attributes:
        by_id: all of them.
        waiting: waiting and preempted requests, by priority level.
        restoring: requests that hold blocks to which KV is being copied, in the order of their admission.
        running: requests that take part in steps.
        num_online: online requests among ``by_id``.
    """

    def __init__(self) -> None:
        self.by_id: dict[RequestId, Request] = {}
        self.waiting = {level: RequestQueue() for level in PriorityLevel}
        self.restoring: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Request] = {}
        self.num_online = 0
        self._num_added = 0
        self._promotions: list[tuple[float, int, Request]] = []  # a heap; may hold finished requests

    def running_by_level(self, excluded: Collection[RequestId]) -> dict[PriorityLevel, list[Request]]:
        by_level: dict[PriorityLevel, list[Request]] = {level: [] for level in PriorityLevel}
        for request in self.running.values():
            if request.request_id not in excluded:
                by_level[request.priority_level].append(request)
        return by_level

    def add(self, request: Request, promote_at_s: float) -> None:
        """Queue a new request. It becomes ``PROMOTED`` at ``promote_at_s``; inf for never."""
        assert request.request_id not in self.by_id, f"{request.request_id} is already known"
        request.enqueue(self._num_added)
        self._num_added += 1
        self.by_id[request.request_id] = request
        self.num_online += request.service_class is ServiceClass.ONLINE
        self.waiting[request.priority_level].push(request)
        if promote_at_s < math.inf and request.priority_level is PriorityLevel.OFFLINE:
            if len(self._promotions) > 2 * len(self.by_id) + _MIN_PROMOTIONS:
                self._promotions = [
                    entry for entry in self._promotions if entry[2].status is not RequestStatus.FINISHED
                ]
                heapq.heapify(self._promotions)
            heapq.heappush(self._promotions, (promote_at_s, self._num_added, request))

    def take(self, request: Request) -> None:
        """Take a request out of its queue, to restore or to run it."""
        self.waiting[request.priority_level].remove(request)

    def restore(self, request: Request) -> None:
        """A request that is in no queue waits for its KV."""
        request.move_to(RequestStatus.RESTORING)
        self.restoring[request.request_id] = request

    def run(self, request: Request) -> None:
        """A request that is in no queue takes part in steps from now on."""
        self.restoring.pop(request.request_id, None)
        request.move_to(RequestStatus.RUNNING)
        self.running[request.request_id] = request

    def requeue(self, request: Request) -> None:
        """A running or restoring request was preempted: queue it again."""
        self.running.pop(request.request_id, None)
        self.restoring.pop(request.request_id, None)
        request.move_to(RequestStatus.PREEMPTED)
        self.waiting[request.priority_level].push(request)

    def remove(self, request: Request) -> None:
        """Forget a request that is about to finish."""
        if _is_queued(request):
            self.waiting[request.priority_level].remove(request)
        self.running.pop(request.request_id, None)
        self.restoring.pop(request.request_id, None)
        del self.by_id[request.request_id]
        self.num_online -= request.service_class is ServiceClass.ONLINE

    def promote(self, now_s: float) -> None:
        """Raise offline requests near their deadline to the priority level above."""
        while self._promotions and self._promotions[0][0] <= now_s:
            request = heapq.heappop(self._promotions)[2]
            if request.status is RequestStatus.FINISHED:
                continue
            is_queued = _is_queued(request)
            if is_queued:
                self.waiting[request.priority_level].remove(request)
            request.priority_level = PriorityLevel.PROMOTED
            if is_queued:
                self.waiting[request.priority_level].push(request)


def _is_queued(request: Request) -> bool:
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
