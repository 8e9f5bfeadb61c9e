"""The unfinished requests by status, and the instants at which they change their priority level."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from backfill.core.request import (
    PriorityLevel,
    Request,
    RequestId,
    RequestStatus,
    ServiceClass,
    order_key,
)
from backfill.scheduling.owner_shares import OwnerShares, ReadInTurn, flooding_owner
from backfill.scheduling.prediction import StepPredictor

_LEVELS = tuple(PriorityLevel)  # to iterate over the Enum takes longer
_MIN_CHANGES = 64  # a smaller heap of changes is not worth clearing
_MAX_RETURNING = 16  # relegated requests that are looked up in a step
# Part of its completion window that a request may spend promoted.
_MAX_PROMOTED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class LevelRule:
    """Promotes offline requests near the end of their window; relegates online ones that come too late.

    An online request is relegated when it cannot meet its TTFT objective any more, even alone on the device:
    it is served with what the others leave, and is left out of the rule that bounds steps (the idea of
    arXiv 2503.22562). It returns only if it finds more of its prompt in the cache while it waits, and can be
    in time with that. Relegation is between requests of one owner (``UnfinishedRequests``).

    Attributes:
        promote_before_s: an offline request is promoted this long before its completion window ends, or
            after half of the window if that is later; 0 is never.
        relegates: online requests are relegated.
        predictor: predicts how long a prompt takes; None where nothing is relegated.
        chunk_tokens: of one prompt in a step, at most.
    """

    promote_before_s: float
    relegates: bool
    predictor: StepPredictor | None
    chunk_tokens: int

    def changes_at_s(self, request: Request) -> float:
        """When the request moves to its next level if it makes no progress until then; inf for never."""
        match request.priority_level:
            case PriorityLevel.OFFLINE:
                if request.complete_by_s is None or self.promote_before_s == 0.0:
                    return math.inf
                window_s = request.complete_by_s - request.arrived_at_s
                return request.complete_by_s - min(self.promote_before_s, _MAX_PROMOTED_SHARE * window_s)
            case PriorityLevel.ONLINE if self.relegates and request.last_token_at_s is None:
                return self.must_start_by_s(request)
            case _:
                return math.inf

    def must_start_by_s(self, request: Request) -> float:
        """The last moment at which the request, alone on the device, can still be in time."""
        return request.next_token_by_s - self._prefill_s(request)

    def next_level(self, request: Request) -> PriorityLevel:
        is_online = request.priority_level is PriorityLevel.ONLINE
        return PriorityLevel.RELEGATED if is_online else PriorityLevel.PROMOTED

    def _prefill_s(self, request: Request) -> float:
        """Predicted seconds to the first token of what is left of the prompt, alone on the device."""
        predictor = self.predictor
        assert predictor is not None, "only policies that predict relegate"
        seconds = predictor.cost.prefill_time_s(
            request.num_tokens, self.chunk_tokens, num_computed_tokens=request.num_computed_tokens
        )
        return predictor.time_scale * seconds


class RequestQueue:
    """Waiting and preempted requests of one priority level by ``Request.order_key``, most urgent first.

    A preempted request keeps its key, so it goes before those that arrived after it.

    Attributes:
        preempted: those that have started.
        served: of the owners that compete, when ``first`` was last asked (``OwnerShares``).
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._of_owner: dict[str, list[Request]] = {}
        self.preempted: dict[RequestId, Request] = {}
        self._shares = OwnerShares()
        self.served: Mapping[str, float] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Sequence[Request]:
        """In their order."""
        return self._requests

    def first(
        self, num_most: int, running: Iterable[Request], preempted: Iterable[Request]
    ) -> Sequence[Request]:
        """Those to start next: in their order, and where several owners wait, their owners in turn.

        What was served to an owner is counted over ``running`` and ``preempted``, and what has ended.
        """
        prompts = (each.owner for each in running if each.last_token_at_s is None)
        self.served = self._shares.served(self._of_owner.keys() | prompts, [*running, *preempted])
        if len(self._of_owner) < 2:
            return self._requests[:num_most]
        queues = {owner: queue[:num_most] for owner, queue in self._of_owner.items()}
        return ReadInTurn(queues, self.served, num_most)

    def first_of_owners(self) -> list[Request]:
        """Of each owner the first in its own order."""
        return [queue[0] for queue in self._of_owner.values()]

    def num_of_owner(self, owner: str) -> int:
        return len(self._of_owner.get(owner, ()))

    @property
    def owners(self) -> Collection[str]:
        return self._of_owner.keys()

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=order_key)
        insort(self._of_owner.setdefault(request.owner, []), request, key=order_key)
        if request.has_started:
            self.preempted[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Remove a request that is in the queue, at any position."""
        of_owner = self._of_owner[request.owner]
        for queue in (self._requests, of_owner):
            index = bisect_left(queue, request.order_key, key=order_key)
            assert queue[index] is request, f"{request.request_id} is not where its key says"
            del queue[index]
        if not of_owner:
            del self._of_owner[request.owner]
        self.preempted.pop(request.request_id, None)

    def on_end(self, request: Request) -> None:
        """A request of this level is about to finish."""
        self._shares.on_end(request)


class UnfinishedRequests:
    """Every unfinished request, by id and by status.

    Attributes:
        by_id: all of them.
        waiting: waiting and preempted requests, by priority level.
        restoring: requests that hold blocks to which KV is being copied, in the order of their admission.
        running: requests that take part in steps.
        num_online: online requests among ``by_id``.
        now_s: when the latest step was planned.

    Args:
        rule: when a request changes its priority level.
        num_cached: tokens of a request without blocks whose KV exists.
        orders_by_deadline: online requests, by that of their first token.
    """

    def __init__(
        self,
        rule: LevelRule,
        num_cached: Callable[[Request], int] = lambda _: 0,
        *,
        orders_by_deadline: bool = False,
    ) -> None:
        self.by_id: dict[RequestId, Request] = {}
        self.waiting = {level: RequestQueue() for level in PriorityLevel}
        self.restoring: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Request] = {}
        self.num_online = 0
        self.now_s = 0.0
        self._num_of_owner, self._num_online_of_owner = Counter[str](), Counter[str]()
        self._rule = rule
        self._num_cached = num_cached
        self._orders_by_deadline = orders_by_deadline
        self._num_added = 0
        self._changes: list[tuple[float, int, Request]] = []  # a heap; may hold finished requests
        # Relegated before their deadline, and the tokens that the cache had for them then.
        self._relegated: dict[RequestId, int] = {}

    @property
    def num_owners(self) -> int:
        return len(self._num_of_owner)

    @property
    def num_online_owners(self) -> int:
        return len(self._num_online_of_owner)

    @property
    def flooding_owner(self) -> str | None:
        """See ``flooding_owner``."""
        return flooding_owner(self._num_online_of_owner)

    def running_by_level(self, excluded: Collection[RequestId]) -> dict[PriorityLevel, list[Request]]:
        """Each level's in its order."""
        by_level: dict[PriorityLevel, list[Request]] = {level: [] for level in _LEVELS}
        running: Iterable[Request] = self.running.values()
        if excluded:
            running = [each for each in running if each.request_id not in excluded]
        for request in running:
            by_level[request.priority_level].append(request)
        for requests in by_level.values():
            requests.sort(key=order_key)
        return by_level

    def first_waiting(self, level: PriorityLevel, num_most: int) -> Sequence[Request]:
        """The requests of a level to start next."""
        levels = {level, PriorityLevel.RELEGATED} if level is PriorityLevel.ONLINE else {level}
        holders = itertools.chain(self.running.values(), self.restoring.values())
        running = [each for each in holders if each.priority_level in levels]
        preempted = [each for other in levels for each in self.waiting[other].preempted.values()]
        return self.waiting[level].first(num_most, running, preempted)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        assert request.request_id not in self.by_id, f"{request.request_id} is already known"
        request.enqueue(self._num_added, by_deadline=self._orders_by_deadline)
        self._num_added += 1
        self.by_id[request.request_id] = request
        self._num_of_owner[request.owner] += 1
        self.waiting[request.priority_level].push(request)
        if request.service_class is ServiceClass.ONLINE:
            self.num_online += 1
            self._num_online_of_owner[request.owner] += 1
            self.look_up(request)
        self._await_change(request, -math.inf)

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
        request.resume(self.now_s)
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
        level = request.priority_level
        self.waiting[level].on_end(request)
        if level is PriorityLevel.RELEGATED:
            self.waiting[PriorityLevel.ONLINE].on_end(request)
        self.running.pop(request.request_id, None)
        self.restoring.pop(request.request_id, None)
        del self.by_id[request.request_id]
        _take_one(self._num_of_owner, request.owner)
        if request.service_class is ServiceClass.ONLINE:
            self.num_online -= 1
            _take_one(self._num_online_of_owner, request.owner)

    def started_of_owners(self) -> Counter[str]:
        """Of each owner the online prompts in steps that are in time."""
        return Counter(request.owner for request in self.running.values() if _is_online_prompt(request))

    def change_levels(self, now_s: float, in_flight: Collection[RequestId] = ()) -> None:
        """Promote and relegate the requests that are due. Those in flight keep their level until later."""
        self.now_s = now_s
        self._return_relegated(now_s)
        started = self.started_of_owners()
        self._give_turns(now_s, in_flight, started)
        put_off = []
        while self._changes and self._changes[0][0] <= now_s:
            request = heapq.heappop(self._changes)[2]
            if request.status is RequestStatus.FINISHED:
                continue
            if request.request_id in in_flight:
                put_off.append(request)
                continue
            if request.priority_level is PriorityLevel.ONLINE:
                self.look_up(request)
            if self._rule.changes_at_s(request) > now_s:  # it has come further since
                self._await_change(request, now_s)
                continue
            if request.priority_level is PriorityLevel.ONLINE and self._has_turn(request, started):
                put_off.append(request)
                continue
            started[request.owner] -= _is_online_prompt(request)
            self._move(request, self._rule.next_level(request))
            if request.priority_level is PriorityLevel.RELEGATED and _is_queued(request):
                self._relegated[request.request_id] = request.num_computed_tokens
            self._await_change(request, now_s)
        for request in put_off:
            self._await_change(request, now_s)

    def _return_relegated(self, now_s: float) -> None:
        """Let relegated requests be in time again for which the cache has come to hold enough."""
        for request_id, num_before in list(itertools.islice(self._relegated.items(), _MAX_RETURNING)):
            request = self.by_id.get(request_id)
            if request is None or not _is_queued(request) or request.next_token_by_s <= now_s:
                del self._relegated[request_id]
                continue
            self.look_up(request)
            if request.num_computed_tokens > num_before and self._rule.must_start_by_s(request) > now_s:
                del self._relegated[request_id]
                self._move(request, PriorityLevel.ONLINE)
                self._await_change(request, now_s)
            else:  # behind those that were not looked up
                self._relegated[request_id] = self._relegated.pop(request_id)

    def _give_turns(self, now_s: float, in_flight: Collection[RequestId], started: Counter[str]) -> None:
        """Relegation is between the prompts of one owner: one of each comes back where it has no others.

        ``started``: as ``started_of_owners`` has it; it is kept up to date.

        Else who floods the server would keep a late request of another owner waiting for as long as it does.
        """
        relegated = PriorityLevel.RELEGATED
        for request in (
            *(each for each in self.running.values() if each.priority_level is relegated),
            *self.waiting[relegated].first_of_owners(),
        ):
            # The KV of a preempted answer is computed like a prompt's.
            is_prompt = request.last_token_at_s is None or _is_queued(request)
            if is_prompt and request.request_id not in in_flight and self._has_turn(request, started):
                self._relegated.pop(request.request_id, None)
                self._move(request, PriorityLevel.ONLINE)
                started[request.owner] += _is_online_prompt(request)
                self._await_change(request, now_s)

    def _has_turn(self, request: Request, started: Counter[str]) -> bool:
        """Other owners have online prompts that are in time, and the request's owner has none but this."""
        waiting, owner = self.waiting[PriorityLevel.ONLINE], request.owner
        is_waiting = _is_queued(request) and request.priority_level is PriorityLevel.ONLINE
        num_own = waiting.num_of_owner(owner) + started[owner]
        if num_own > is_waiting + _is_online_prompt(request):
            return False
        is_alone = len(waiting.owners) == (waiting.num_of_owner(owner) > 0)
        return not is_alone or started.total() > started[owner]

    def look_up(self, request: Request) -> None:
        """Ask the cache what it has of a request without blocks."""
        if _is_queued(request):
            request.num_computed_tokens = self._num_cached(request)

    def _move(self, request: Request, level: PriorityLevel) -> None:
        is_queued = _is_queued(request)
        if is_queued:
            self.waiting[request.priority_level].remove(request)
        request.priority_level = level
        if is_queued:
            self.waiting[level].push(request)

    def _await_change(self, request: Request, now_s: float) -> None:
        """Note when the request changes its level, if it does."""
        at_s = self._rule.changes_at_s(request)
        if at_s == math.inf:
            return
        if len(self._changes) > 2 * len(self.by_id) + _MIN_CHANGES:
            self._changes = [
                entry for entry in self._changes if entry[2].status is not RequestStatus.FINISHED
            ]
            heapq.heapify(self._changes)
        heapq.heappush(self._changes, (max(at_s, now_s), request.order_key[2], request))


def _is_online_prompt(request: Request) -> bool:
    """It is in steps, and has yet to give its first token."""
    is_running = request.status is RequestStatus.RUNNING and request.priority_level is PriorityLevel.ONLINE
    return is_running and request.last_token_at_s is None


def _is_queued(request: Request) -> bool:
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _take_one(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
