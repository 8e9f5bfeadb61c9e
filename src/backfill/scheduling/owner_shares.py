"""Whose waiting request is next, where requests of several owners wait."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

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

    def order(
        self, queues: Mapping[str, Sequence[Request]], started: Iterable[Request], num_most: int
    ) -> Sequence[Request]:
        """The first ``num_most`` requests to start.

        Args:
            queues: of each owner, in its own order. They may change afterwards.
            started: all that have started and not ended, preempted ones that wait among them.
        """
        had = self._had(queues.keys(), started)
        firsts = {owner: queue[:num_most] for owner, queue in queues.items()}
        num_waiting = sum(map(len, firsts.values()))
        return _Ordered(_in_order(firsts, had), min(num_most, num_waiting))

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


def _in_order(queues: Mapping[str, Sequence[Request]], had: Mapping[str, float]) -> Iterator[Request]:
    rests = {owner: iter(queue) for owner, queue in queues.items()}
    heap = [(had[owner], (first := next(rest)).order_key, owner, first) for owner, rest in rests.items()]
    heapq.heapify(heap)
    while heap:
        tokens, _, owner, request = heap[0]
        following = next(rests[owner], None)
        if following is None:
            heapq.heappop(heap)
        else:
            if request.first_scheduled_at_s is None:  # else it is counted already
                tokens += request.num_pending_tokens / request.owner_weight
            heapq.heapreplace(heap, (tokens, following.order_key, owner, following))
        yield request


class _Ordered(Sequence[Request]):
    """Requests that are put into their order as far as they are read: of many, a step starts few."""

    def __init__(self, requests: Iterator[Request], num_requests: int) -> None:
        self._requests = requests
        self._num_requests = num_requests
        self._read: list[Request] = []

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        yield from self._read
        for place in range(len(self._read), self._num_requests):
            yield self._read[place] if place < len(self._read) else self._read_next()

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        places = range(self._num_requests)[index]
        last = places if isinstance(places, int) else max(places, default=-1)
        self._read += itertools.islice(self._requests, max(0, last + 1 - len(self._read)))
        return self._read[places] if isinstance(places, int) else [self._read[place] for place in places]

    def _read_next(self) -> Request:
        request = next(self._requests)
        self._read.append(request)
        return request
