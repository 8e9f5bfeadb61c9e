"""Whose waiting request is next, where requests of several owners wait."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from heapq import merge
from typing import TypeVar, overload

from backfill.core.request import PriorityLevel, Request, order_key
from backfill.scheduling.policy import R, RequestView, Snapshot, split

Q = TypeVar("Q", bound=RequestView)

_FLOOD_SHARE = 0.8  # of the online requests


class OwnerShares:
    """Tokens over weight that each owner was served; the one with the fewest is next.

    They count as in VTC (arXiv 2401.00588), while at least two owners compete: the prompt of a request when
    it starts, without what the prefix cache had, and each output token. An owner that comes to compete is
    raised to the least served of those that do, so it gains nothing by having asked for nothing before. With
    one owner nothing is counted, and what was counted is forgotten.
    """

    def __init__(self) -> None:
        self._competing: set[str] = set()  # owners, when it was last asked who was served
        self._ended: dict[str, float] = {}  # tokens over weight

    def on_end(self, request: Request) -> None:
        if self._competing:
            self._ended[request.owner] = self._ended.get(request.owner, 0.0) + _tokens_in_service(request)

    def served(self, owners: Set[str], started: Iterable[Request]) -> Mapping[str, float]:
        """Tokens over weight of each owner that competes, after those that came are raised; empty for one.

        Args:
            owners: that compete: of requests that wait, and of prompts that are being computed.
            started: all requests that have started and not ended, preempted ones that wait among them.
        """
        if len(owners) < 2:
            self._competing = set()
            self._ended.clear()
            return {}
        served = defaultdict(float, self._ended)
        for request in started:
            served[request.owner] += _tokens_in_service(request)
        least = min((served[owner] for owner in self._competing & owners), default=0.0)
        for owner in owners - self._competing:
            if (missing := least - served[owner]) > 0:
                self._ended[owner] = self._ended.get(owner, 0.0) + missing
                served[owner] = least
        for owner in self._ended.keys() - owners:
            if served[owner] <= least:  # it would be raised if it came back
                del self._ended[owner]
        self._competing = set(owners)
        return served


def _tokens_in_service(request: Request) -> float:
    """Over the weight; 0 for a request that has not started."""
    if not request.has_started:
        return 0.0
    return (request.num_tokens - request.num_cached_tokens) / request.owner_weight


def in_turn(queues: Mapping[str, Sequence[R]], served: Mapping[str, float]) -> Iterator[R]:
    """Requests of several owners, of each in its order: the next is of the owner that was served the least.

    Args: served: tokens over weight, with all that started requests are to compute.
    """
    rests = {owner: iter(queue) for owner, queue in queues.items()}
    heap = [(served[owner], (first := next(rest)).order_key, owner, first) for owner, rest in rests.items()]
    heapq.heapify(heap)
    while heap:
        tokens, _, owner, request = heap[0]
        following = next(rests[owner], None)
        if following is None:
            heapq.heappop(heap)
        else:
            if not request.has_started:  # else it is counted already
                tokens += request.num_pending_tokens / request.owner_weight
            heapq.heapreplace(heap, (tokens, following.order_key, owner, following))
        yield request


def prompts_in_turn(prefills: Sequence[R], waiting: Sequence[R], served: Mapping[str, float]) -> Sequence[R]:
    """Begun and waiting prompts: of each owner in their order, and several owners in turn.

    Here a prompt counts as far as it is computed: one that has begun gives the next chunk to an owner that
    was served less. Else one long prompt would hold up all that others send while it is computed.

    Args: served: see ``Snapshot``.
    """
    prompts = list(merge(prefills, waiting, key=order_key))
    queues: dict[str, list[R]] = {}
    for each in sorted(prompts, key=order_key):  # those that wait may be in turn already
        queues.setdefault(each.owner, []).append(each)
    if len(queues) < 2:
        return prompts
    computed = {owner: served.get(owner, 0.0) for owner in queues}
    for each in prompts:
        if each.has_started:
            computed[each.owner] -= each.num_pending_tokens / each.owner_weight
    return list(in_turn(queues, computed))


def yielding_owners(view: Snapshot[RequestView]) -> Collection[str]:
    """Owners that were served more than one whose prompt is in time, and whose own requests come late.

    They ask for more than they get. Without late requests, an owner's objectives count like the others'.
    """
    if not view.served or not view.late_owners:
        return ()
    online = PriorityLevel.ONLINE
    prompts = [*split(view.running[online])[1], *view.waiting[online][:1]]
    least = min((view.served.get(each.owner, 0.0) for each in prompts), default=math.inf)
    return {owner for owner in view.late_owners if view.served.get(owner, 0.0) > least}


def relegating(view: Snapshot[R], owners: Collection[str]) -> Snapshot[R]:
    """The same with online requests of these owners among the relegated ones, but for those that wait."""
    if not owners:
        return view
    online, relegated = PriorityLevel.ONLINE, PriorityLevel.RELEGATED

    def moved(by_level: Mapping[PriorityLevel, Sequence[Q]]) -> Mapping[PriorityLevel, Sequence[Q]]:
        yielding = [each for each in by_level.get(online, ()) if each.owner in owners]
        return {
            **by_level,
            online: _without(by_level.get(online, ()), owners),
            relegated: [*yielding, *by_level.get(relegated, ())],
        }

    return replace(
        view,
        running=moved(view.running),
        in_other_steps=moved(view.in_other_steps),
        waiting={**view.waiting, online: _without(view.waiting[online], owners)},
    )


def flooding_owner(num_of_owner: Mapping[str, int]) -> str | None:
    """Who has nearly all of these requests, also beside one more of another owner; None if nobody has."""
    owner = max(num_of_owner, key=num_of_owner.__getitem__, default=None)
    if owner is None or num_of_owner[owner] <= _FLOOD_SHARE * (sum(num_of_owner.values()) + 1):
        return None
    return owner


def leaving_out(view: Snapshot[R], owners: Collection[str]) -> Snapshot[R]:
    """The same without online requests of these owners, who flood it. It is shared if several others compete.

    ``relegating`` lets them go behind the others.
    """
    levels = PriorityLevel.ONLINE, PriorityLevel.RELEGATED
    return replace(
        view,
        running={**view.running, **{each: _without(view.running[each], owners) for each in levels}},
        restoring=_without(view.restoring, owners),
        in_other_steps={
            **view.in_other_steps,
            **{each: _without(view.in_other_steps.get(each, ()), owners) for each in levels},
        },
        waiting={**view.waiting, **{each: _without(view.waiting[each], owners) for each in levels}},
        is_shared=len(view.served.keys() - owners) > 1,
        is_flooded=False,
    )


def of_owner(requests: Sequence[R], owner: str | None) -> tuple[Sequence[R], Sequence[R]]:
    """(those of this owner, those of others), in their order."""
    if owner is None:
        return (), requests
    return [each for each in requests if each.owner == owner], _without(requests, (owner,))


def _without(requests: Sequence[R], owners: Collection[str]) -> Sequence[R]:
    """Those of other owners."""
    if isinstance(requests, ReadInTurn):  # not read: of many, a step weighs few
        return requests.without(owners)
    return [each for each in requests if each.owner not in owners]


def in_places_of_owners(places: Sequence[R], requests: Sequence[R]) -> Sequence[R]:
    """The requests in this order, of each owner, where ``places`` has any of that owner."""
    owners = {each.owner for each in places}
    if len(owners) < 2:
        return requests
    rests = {owner: iter([each for each in requests if each.owner == owner]) for owner in owners}
    return [next(rests[each.owner]) for each in places]


class ReadInTurn(Sequence[R]):
    """The first ``num_most`` requests ``in_turn``, put into their order as far as they are read.

    Of many, a step starts few.
    """

    def __init__(self, queues: Mapping[str, Sequence[R]], served: Mapping[str, float], num_most: int) -> None:
        self._queues, self._served, self._num_most = queues, served, num_most
        self._requests = in_turn(queues, served)
        self._num_requests = min(num_most, sum(map(len, queues.values())))
        self._read: list[R] = []

    def without(self, owners: Collection[str]) -> ReadInTurn[R]:
        """The same of the other owners alone."""
        queues = {owner: queue for owner, queue in self._queues.items() if owner not in owners}
        return ReadInTurn(queues, self._served, self._num_most)

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[R]:
        yield from self._read
        for place in range(len(self._read), self._num_requests):
            yield self._read[place] if place < len(self._read) else self._read_next()

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[R]: ...
    def __getitem__(self, index: int | slice) -> R | Sequence[R]:
        places = range(self._num_requests)[index]
        last = places if isinstance(places, int) else max(places, default=-1)
        self._read += itertools.islice(self._requests, max(0, last + 1 - len(self._read)))
        return self._read[places] if isinstance(places, int) else [self._read[place] for place in places]

    def _read_next(self) -> R:
        request = next(self._requests)
        self._read.append(request)
        return request
