"""Which replica serves a request. Pure: no I/O, and time comes from a clock.

``ReplicaSet`` knows what each replica reported and what it was sent since. A ``RoutingPolicy`` chooses among
the replicas for an online request. Offline lines go where online requests leave headroom.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from backfill.core.clock import Clock
from backfill.core.prefixes import CHUNK_TOKENS, PrefixIndex
from backfill.protocol.replica_state import ReplicaState
from backfill.router.replica import Placement, Replica

PolicyName = Literal["slo", "round-robin", "least-loaded", "prefix"]

# Shares of the TTFT objective: that a request may wait longer for its prefix, within which a first token is
# predicted to be in time, and by which predicted TTFTs differ without meaning.
IMBALANCE, MARGIN, _TIE = 0.4, 0.8, 0.01
MIN_MATCH = 0.1  # share of a prompt from which a match counts as its prefix


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as the router sees it.

    Attributes:
        num_tokens: of its prompt, estimated.
        keys: of its prompt's chunks (``prefixes``).
        ttft_s: its own objective; None for the replicas'.
        streams: it asks for server-sent events.
        is_offline: its service tier is flex.
    """

    num_tokens: int
    keys: Sequence[int] = ()
    ttft_s: float | None = None
    streams: bool = False
    is_offline: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica, and what it would be to a request.

    Attributes:
        tokens_to_compute: of its prompt; the others are in the replica's prefix cache.
        wait_s: before its prompt is computed; ttft_s: to its first token. Both predicted.
        cache_used: share of the replica's cache that this router has filled.
    """

    replica: Replica
    tokens_to_compute: int
    wait_s: float
    ttft_s: float
    cache_used: float


class RoutingPolicy(Protocol):
    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Candidate:
        """One of at least one candidate."""
        ...


class SloPolicy:
    """Least predicted TTFT, and the replica that has the prefix where that costs no objective.

    A replica without capacity for the request is passed over while another has one. Of the others, those
    are in question whose wait is at most ``IMBALANCE`` of the TTFT objective longer than the shortest, and
    which would meet the objective with ``MARGIN``. Where one of them has at least ``MIN_MATCH`` of the
    prompt in its cache, the one with most of it is taken: a hit saves work that other requests would wait
    for. Else the request brings a new prefix, and of those whose TTFT is about the least, the one with the
    emptiest cache is taken, so that prefixes spread over all caches. Where no replica would meet the
    objective, the least TTFT is taken.
    """

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Candidate:
        placed = [each for each in candidates if each.replica.has_capacity(request.num_tokens)] or candidates
        least_wait_s = min(each.wait_s for each in placed)
        in_question = [each for each in placed if self._is_in_question(request, each, least_wait_s)]
        if not in_question:
            return min(placed, key=lambda each: (each.ttft_s, each.replica.num_online))
        best = min(in_question, key=lambda each: (each.tokens_to_compute, each.ttft_s))
        if request.num_tokens - best.tokens_to_compute >= MIN_MATCH * request.num_tokens:
            return best
        least = min(in_question, key=lambda each: each.ttft_s)
        most_s = least.ttft_s + _TIE * _objective_s(request, least)
        about_least = [each for each in in_question if each.ttft_s <= most_s]
        return min(about_least, key=lambda each: (each.cache_used, each.replica.num_online, each.ttft_s))

    def _is_in_question(self, request: RoutedRequest, candidate: Candidate, least_wait_s: float) -> bool:
        objective_s = _objective_s(request, candidate)
        return (
            candidate.wait_s <= least_wait_s + IMBALANCE * objective_s
            and candidate.ttft_s <= MARGIN * objective_s
        )


@dataclass(slots=True)
class RoundRobin:
    """Each in turn, whatever it has to do."""

    _last: str = ""

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Candidate:
        ordered = sorted(candidates, key=lambda each: each.replica.name)
        chosen = next((each for each in ordered if each.replica.name > self._last), ordered[0])
        self._last = chosen.replica.name
        return chosen


@dataclass(slots=True)
class LeastLoaded:
    """The one with the fewest online requests."""

    _turns: RoundRobin = field(default_factory=RoundRobin)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Candidate:
        fewest = min(each.replica.num_online for each in candidates)
        return self._turns.choose(request, [each for each in candidates if each.replica.num_online == fewest])


@dataclass(slots=True)
class PrefixOnly:
    """The one with most of the prompt in its cache, whatever it has to do; a new prefix to the emptiest."""

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda each: (each.tokens_to_compute, each.cache_used, each.replica.name))


def create_policy(name: str) -> RoutingPolicy:
    """``name``: one of ``PolicyName``."""
    policies: dict[str, type[RoutingPolicy]] = {
        "slo": SloPolicy,
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "prefix": PrefixOnly,
    }
    return policies[name]()


class ReplicaSet:
    """The replicas that requests are divided among."""

    def __init__(self, policy: RoutingPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._prefixes = PrefixIndex()

    @property
    def replicas(self) -> Collection[Replica]:
        return self._replicas.values()

    def report(self, name: str, state: ReplicaState) -> Replica:
        """What a replica says of itself; one that is not known is added, with an empty cache."""
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = Replica(name, state)
        else:
            replica.report(state)
        self._prefixes.add(name, state.kv_tokens)
        return replica

    def remove(self, name: str) -> None:
        """A replica is gone, and its cache with it. Placements on it may still end."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            replica.is_open = False
            self._prefixes.remove(name)

    def place(self, request: RoutedRequest, besides: Collection[str] = ()) -> Placement | None:
        """Choose a replica for an online request, and count it there.

        Args:
            besides: replicas that are not to be chosen.

        Returns: None where there is no replica.
        """
        now_s = self._clock.now_s()
        names = [name for name, each in self._replicas.items() if each.is_open and name not in besides]
        if not names:
            return None
        chosen = self._policy.choose(request, self._candidates(request, names, now_s))
        replica = chosen.replica
        self._prefixes.note_sent(replica.name, request.keys)
        return Placement(replica, request.num_tokens, chosen.tokens_to_compute, chosen.ttft_s, now_s)

    def takes_lines(self, name: str) -> bool:
        """Whether the replica may get offline requests, now or once it has headroom."""
        replica = self._replicas.get(name)
        return replica is not None and replica.is_open and replica.takes_lines

    def place_line(
        self, request: RoutedRequest, besides: Collection[str] = (), *, may_exceed: bool = False
    ) -> Placement | None:
        """Choose a replica for an offline request, and count it there.

        The replica with most of its prompt in the cache, of those with headroom; else the one with most
        headroom.

        Args:
            besides: replicas that are not to be chosen.
            may_exceed: where none has headroom, the one with the fewest is chosen; where none takes offline
                requests, one that will refuse it.

        Returns: None where no replica has headroom, or there is none.
        """
        is_open = [each for name, each in self._replicas.items() if each.is_open and name not in besides]
        takers = [replica for replica in is_open if replica.takes_lines] or (is_open if may_exceed else [])
        found = [replica for replica in takers if replica.line_headroom > 0]
        if not found and may_exceed and takers:
            found = [min(takers, key=lambda replica: replica.num_lines)]
        if not found:
            return None
        matches = self._prefixes.match(request.keys, [replica.name for replica in found])
        chosen = max(found, key=lambda replica: (matches[replica.name], replica.line_headroom))
        self._prefixes.note_sent(chosen.name, request.keys)
        return Placement(chosen, is_offline=True)

    def _candidates(self, request: RoutedRequest, names: Sequence[str], now_s: float) -> list[Candidate]:
        matches = self._prefixes.match(request.keys, names)
        candidates = []
        for name in names:
            replica = self._replicas[name]
            to_compute = max(1, request.num_tokens - matches[name] * CHUNK_TOKENS)
            wait_s = replica.wait_s(now_s)
            ttft_s = replica.ttft_s(to_compute, now_s)
            used = self._prefixes.share_used(name)
            candidates.append(Candidate(replica, to_compute, wait_s, ttft_s, used))
        return candidates


def _objective_s(request: RoutedRequest, candidate: Candidate) -> float:
    return candidate.replica.state.ttft_slo_s if request.ttft_s is None else request.ttft_s
