"""Blocks for requests: what an allocation may evict, and who is preempted when that does not suffice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from backfill.core.counters import ClassCounters
from backfill.core.request import PriorityLevel, Request, RequestStatus, ServiceClass
from backfill.kvcache.content import Evictable, Match
from backfill.kvcache.manager import KVCacheManager
from backfill.scheduling.batch import Batch
from backfill.scheduling.in_flight import StepsInFlight
from backfill.scheduling.policy import Policy, PreemptionKey
from backfill.scheduling.queues import UnfinishedRequests
from backfill.scheduling.suspension import Suspension

# Preemptions after which a relegated request keeps its blocks. Else prompts that can be in time could take
# them again and again, and a long one would never come to its first token.
_MAX_RELEGATED_PREEMPTIONS = 3
_MAX_FOR_OWNER = 3  # preemptions of a request whose owner holds more than its part, or gives way


class Preemptible(NamedTuple):
    """Whom a waiting request may preempt.

    Attributes:
        levels: requests of these.
        owner: gives way to the one that waits, so also its requests that are in time, of each a few times;
            None for nobody.
    """

    levels: Collection[PriorityLevel]
    owner: str | None = None


def may_be_preempted(request: Request, preemptible: Preemptible) -> bool:
    levels, owner = preemptible
    level = request.priority_level
    if level is PriorityLevel.ONLINE and request.owner == owner:
        return request.num_given_way < _MAX_FOR_OWNER
    is_owed = level is PriorityLevel.RELEGATED and request.num_preemptions >= _MAX_RELEGATED_PREEMPTIONS
    return level in levels and not is_owed


@dataclass(slots=True, eq=False)
class Preemption:
    """Frees blocks for requests, in the policy's order, and counts preemptions.

    An allocation takes first what loses no KV, then the KV of preempted offline requests that has no host
    copy yet. Under a policy that protects the online requests' cache, only they may take it, and only once no
    offline request is left to preempt.

    A request in flight is not preempted. Who needs its blocks waits until its step has committed.
    """

    policy: Policy
    requests: UnfinishedRequests
    kv: KVCacheManager
    suspension: Suspension
    counters: Mapping[ServiceClass, ClassCounters]
    in_flight: StepsInFlight

    @property
    def block_holders(self) -> tuple[Request, ...]:
        """Running and restoring requests: those that hold device blocks."""
        return (*self.requests.running.values(), *self.requests.restoring.values())

    def _by_key(self, requests: Iterable[Request]) -> list[Request]:
        """Those to preempt, the first one last.

        Of one priority level those go first whose owners hold more blocks of it than their part: else one
        owner's growth, or its urgent priorities, would end what another is owed. A few times each: an owner
        with one large request is above its part by that alone, and has to end it.
        """
        if self.requests.num_owners < 2 or not self.policy.has_levels:
            return sorted(requests, key=self.key)
        above = self._owners_above_their_part()

        def key(request: Request) -> PreemptionKey:
            level, *rest = self.key(request)
            is_first = request.num_preemptions < _MAX_FOR_OWNER
            return (level, is_first and (request.priority_level, request.owner) in above, *rest)

        return sorted(requests, key=key)

    def _owners_above_their_part(self) -> Collection[tuple[PriorityLevel, str]]:
        """Of several owners in a level: those with more of its blocks than their weight's part."""
        held, weights = Counter[tuple[PriorityLevel, str]](), dict[tuple[PriorityLevel, str], float]()
        for each in self.block_holders:
            name = each.priority_level, each.owner
            held[name] += self.kv.counts.held(each.request_id)
            weights[name] = each.owner_weight
        above = set[tuple[PriorityLevel, str]]()
        for level in {level for level, _ in held}:
            names = [name for name in held if name[0] is level]
            part = sum(held[name] for name in names) / sum(weights[name] for name in names)
            above.update(name for name in names if held[name] > part * weights[name])
        return above

    def key(self, request: Request) -> PreemptionKey:
        """Of one owner, the request with the greatest key is preempted first."""
        lost = 0.0
        if request.status is RequestStatus.RUNNING:
            lost = self.kv.num_unsecured_tokens(request) + self.suspension.lost_tokens(request.request_id)
        return self.policy.preemption_key(request, lost)

    def free_shared_slots(self, request: Request, num_tokens: int, batch: Batch) -> bool:
        """Let a running request write its first ``num_tokens`` tokens into the last block that it shares.

        Returns: False if it has to wait for a copy in flight, or was preempted itself.
        """
        victim = self.kv.sharing.to_preempt(request, num_tokens)
        if victim is not None:
            if victim.request_id in self.in_flight.slices:
                self.in_flight.blocked.add(request.request_id)
                return False
            self.preempt(victim, batch)
        return victim is not request and self.kv.sharing.reserve_slots(request, num_tokens)

    def free_for_running(self, request: Request, num_tokens: int, batch: Batch) -> Evictable | None:
        """What a running request may evict for its first ``num_tokens`` tokens; preempts until that suffices.

        Returns: None if the request has to wait for copies or a step in flight, or was preempted itself.
        """
        kv, protects = self.kv, self.policy.protects_online_cache
        is_online = request.service_class is ServiceClass.ONLINE
        while (lack := kv.growth_shortage(request, num_tokens, Evictable.LOSING_NOTHING)) > 0:
            if not is_online and lack <= kv.counts.becoming_available:
                return None
            if kv.growth_shortage(request, num_tokens, Evictable.OFFLINE) <= 0:
                return Evictable.OFFLINE
            may_take_all = kv.growth_shortage(request, num_tokens, Evictable.ALL) <= 0
            if may_take_all and not protects:
                return Evictable.ALL
            holders = self.block_holders
            victim = self._by_key(holders)[-1]
            # Alone, it would be preempted for a cache that is of use to nobody until more requests arrive.
            is_last = victim is request and len(holders) == 1
            if may_take_all and (is_last or (is_online and victim.service_class is ServiceClass.ONLINE)):
                return Evictable.ALL
            if victim.request_id in self.in_flight.slices:
                self.in_flight.blocked.add(request.request_id)
                return None
            self.preempt(victim, batch)
            if victim is request:
                return None
        return Evictable.LOSING_NOTHING

    def free_for_waiting(
        self,
        request: Request,
        match: Match,
        num_reserved: int,
        preemptible: Preemptible,
        batch: Batch,
    ) -> tuple[Match, Evictable] | None:
        """The waiting request's match and what it may evict for all its tokens; None if it does not fit.

        ``preemptible`` requests are preempted if that suffices. If it does only once those in flight are
        preempted too, none that may be preempted joins the step. ``num_reserved`` blocks must be left.
        """
        kv = self.kv
        limit, last_limit = self._limits(request)
        lack = kv.shortage(request, match, num_reserved, Evictable.LOSING_NOTHING)
        if lack <= 0:
            return match, Evictable.LOSING_NOTHING
        if request.priority_level is not PriorityLevel.ONLINE and lack <= kv.counts.becoming_available:
            return None  # the copies in flight will free as many
        if kv.shortage(request, match, num_reserved, limit) <= 0:
            return match, limit
        lack = kv.shortage(request, match, num_reserved, last_limit)
        victims = [each for each in self.block_holders if may_be_preempted(each, preemptible)]
        names = [each.request_id for each in victims]
        if victims and kv.counts.would_free(lack, names, match, last_limit):
            if self.in_flight.slices:
                victims = [each for each in victims if each.request_id not in self.in_flight.slices]
                if lack > kv.counts.num_freed((each.request_id for each in victims), match, last_limit):
                    batch.paused_levels = frozenset((*batch.paused_levels, *preemptible.levels))
                    batch.paused_owner = preemptible.owner or batch.paused_owner
                    return None
            victims = self._by_key(victims)
            while victims:
                victim = victims.pop()
                if (
                    victim.service_class is ServiceClass.ONLINE
                    and kv.shortage(request, match, num_reserved, last_limit) <= 0
                ):
                    return match, last_limit  # its KV would be no easier to take than what is cached
                victim.num_given_way += victim.owner == preemptible.owner
                self.preempt(victim, batch)
                match = kv.match(request)  # a preemption may evict host copies
                if kv.shortage(request, match, num_reserved, limit) <= 0:
                    return match, limit
            lack = kv.shortage(request, match, num_reserved, last_limit)
        return (match, last_limit) if lack <= 0 else None

    def preempt(self, request: Request, batch: Batch | None = None) -> None:
        """Drop the request's references to its blocks, queue it again, and take it out of the batch."""
        assert request.request_id not in self.in_flight.slices, f"{request.request_id} is in flight"
        self.in_flight.forget(request.request_id)
        if batch is not None:
            batch.remove(request)
            batch.has_preempted = True
        if request.status is RequestStatus.RUNNING:
            self._count(request)
        self.kv.preempt(request)
        self.requests.requeue(request)

    def preempt_without_kv(self, request: Request) -> None:
        """Queue a running request again as if it had never run."""
        self.in_flight.forget(request.request_id)
        self._count(request)
        self.kv.free(request)
        request.num_computed_tokens = 0
        self.requests.requeue(request)

    def _count(self, request: Request) -> None:
        self.counters[request.service_class].num_preemptions += 1
        request.pause(self.requests.now_s)
        self.suspension.discard(request.request_id)

    def _limits(self, request: Request) -> tuple[Evictable, Evictable]:
        """What a waiting request may evict before requests are preempted for it, and after."""
        if not self.policy.protects_online_cache:
            return Evictable.ALL, Evictable.ALL
        if request.service_class is ServiceClass.ONLINE:
            return Evictable.OFFLINE, Evictable.ALL
        if not self.block_holders:  # else nothing would run until the protection ends
            return Evictable.ALL, Evictable.ALL
        return Evictable.OFFLINE, Evictable.OFFLINE
