"""Whose waiting request is next, where requests of several owners wait."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from backfill.core.request import Request


class OwnerShares:
    """The owner that has had the fewest tokens over its weight is next, with the first request of its own.

    Tokens count as in VTC (arXiv 2401.00588), while at least two owners wait: those of requests in service,
    and of those that have ended meanwhile. Tokens found in the prefix cache do not. An owner that comes to
    wait is raised to the one that has had the least, so it gains nothing by having asked for nothing before.
    A request counts whole when it starts, as its prompt; VTC counts the steps. Nothing is counted while one
    owner waits alone, and what was counted is then forgotten.
    """

    def __init__(self) -> None:
        self._waiting: set[str] = set()  # owners, when the order was last asked for
        self._ended: dict[str, float] = {}  # tokens over weight

    def forget(self) -> None:
        """No two owners wait."""
        self._waiting.clear()
        self._ended.clear()

    def on_end(self, request: Request) -> None:
        if self._waiting:
            self._ended[request.owner] = self._ended.get(request.owner, 0.0) + _tokens_in_service(request)

    def order(self, waiting: Sequence[Request], running: Iterable[Request], num_most: int) -> list[Request]:
        """The first ``num_most`` requests to start.

        Args:
            waiting: in the order that they have among those of one owner.
            running: the others that have started.
        """
        queues: dict[str, list[Request]] = {}
        for request in waiting:
            queues.setdefault(request.owner, []).append(request)
        had = self._had(queues.keys(), (*running, *waiting))
        heap = [(had[owner], queue[0].order_key, owner) for owner, queue in queues.items()]
        heapq.heapify(heap)
        num_taken, ordered = Counter[str](), list[Request]()
        while heap and len(ordered) < num_most:
            tokens, _, owner = heap[0]
            queue, index = queues[owner], num_taken[owner]
            ordered.append(queue[index])
            if index + 1 == len(queue):
                heapq.heappop(heap)
                continue
            num_taken[owner] += 1
            if queue[index].first_scheduled_at_s is None:  # else it is counted already
                tokens += queue[index].num_pending_tokens / queue[index].owner_weight
            heapq.heapreplace(heap, (tokens, queue[index + 1].order_key, owner))
        return ordered

    def _had(self, owners: Iterable[str], requests: Iterable[Request]) -> defaultdict[str, float]:
        """Tokens over weight of each owner, after those that came to wait are raised."""
        had = defaultdict(float, self._ended)
        for request in requests:
            had[request.owner] += _tokens_in_service(request)
        now_waiting = set(owners)
        waited = self._waiting & now_waiting
        least = min((had[owner] for owner in waited), default=0.0)
        for owner in now_waiting - waited:
            if (missing := least - had[owner]) > 0:
                self._ended[owner] = self._ended.get(owner, 0.0) + missing
                had[owner] = least
        for owner in self._ended.keys() - now_waiting:
            if had[owner] <= least:  # it would be raised if it came back
                del self._ended[owner]
        self._waiting = now_waiting
        return had


def _tokens_in_service(request: Request) -> float:
    """Over the weight; 0 for a request that has not started."""
    if request.first_scheduled_at_s is None:
        return 0.0
    return (request.num_tokens - request.num_cached_tokens) / request.owner_weight
