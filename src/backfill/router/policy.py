"""Which replica serves a request. Pure: no I/O, and time comes from a clock.

``ReplicaSet`` knows what each replica reported and what it was sent since. A ``RoutingPolicy`` chooses among
the replicas for an online request. Offline lines go where online requests leave room.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from backfill.core.clock import Clock
from backfill.core.errors import ConfigError
from backfill.router.prefixes import CHUNK_TOKENS, PrefixIndex

PolicyName = Literal["slo", "round-robin", "least-loaded", "prefix"]

_WEIGHT = 0.05  # of a new ratio of a measured to a predicted TTFT
_MOST_CORRECTION = 4.0
_LEAST_PREDICTED_S = 0.02  # below, the time of messages counts more than that of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica says of itself.

    Attributes:
        prefill_tokens_per_s: at which it computes prompts when it does nothing else.
        step_s: mean seconds of a recent step, of which an arrival waits for half; 0 while it is idle.
        waiting_prompt_tokens: of online prompts without their first token, all routers' and clients'.
        num_online: online requests that have not ended.
        online_tokens: prompts and outputs of them so far.
        max_num_seqs: most requests in a step.
        kv_tokens: tokens that its KV cache holds.
        ttft_s: its objective for online requests that bring none.
    """

    prefill_tokens_per_s: float
    max_num_seqs: int
    kv_tokens: int
    ttft_s: float = 1.0
    step_s: float = 0.0
    waiting_prompt_tokens: int = 0
    num_online: int = 0
    online_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as the router sees it.

    Attributes:
        num_tokens: of its prompt, estimated.
        keys: of its prompt's chunks (``prefixes``).
        ttft_s: its own objective; None for the replicas'.
    """

    num_tokens: int
    keys: Sequence[int] = ()
    ttft_s: float | None = None


class Placement:
    """A request on a replica, until it ends; made by ``ReplicaSet.place``. Repeated calls do nothing."""

    __slots__ = (
        "_is_open",
        "_waits",
        "num_tokens",
        "predicted_s",
        "replica",
        "sent_at_s",
        "tokens_to_compute",
    )

    def __init__(
        self, replica: Replica, num_tokens: int, tokens_to_compute: int, predicted_s: float, now_s: float
    ) -> None:
        self.replica = replica
        self.num_tokens = num_tokens
        self.tokens_to_compute = tokens_to_compute
        self.predicted_s = predicted_s
        self.sent_at_s = now_s
        self._is_open = self._waits = True
        replica.begin(self)

    def on_first_token(self, now_s: float, *, is_measured: bool = True) -> None:
        """Its prompt is computed, as its first token shows, or by the prediction if not ``is_measured``."""
        if self._waits:
            self._waits = False
            self.replica.end_wait(self, now_s, has_token=is_measured)

    def on_end(self, now_s: float) -> None:
        """It has its whole answer, or was given up."""
        if self._waits:
            self._waits = False
            self.replica.end_wait(self, now_s, has_token=False)
        if self._is_open:
            self._is_open = False
            self.replica.end(self)


class LinePlacement:
    """An offline request on a replica, until it ends; made by ``ReplicaSet.place_line``."""

    __slots__ = ("_is_open", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._is_open = True
        replica.num_lines += 1

    def on_first_token(self, now_s: float) -> None:
        """Nothing waits for an offline request."""

    def on_end(self, now_s: float) -> None:
        if self._is_open:
            self._is_open = False
            self.replica.num_lines -= 1


@dataclass(slots=True)
class _OnlineWork:
    """Of some clients. ``waiting_tokens`` are those to compute before their first tokens."""

    num_online: int = 0
    num_tokens: int = 0
    waiting_tokens: int = 0


@dataclass(slots=True, eq=False)
class Replica:
    """A replica as last reported, and what it was sent by this router.

    Attributes:
        name: unique in its ``ReplicaSet``.
        correction: measured over predicted TTFT, smoothed.
        num_lines: offline lines that it was sent and that have not ended.
        is_open: it may be sent requests; takes_lines: offline ones too.
    """

    name: str
    report: ReplicaReport
    correction: float = 1.0
    num_lines: int = 0
    is_open: bool = True
    takes_lines: bool = True
    _own: _OnlineWork = field(init=False)
    _others: _OnlineWork = field(init=False)
    _num_waiting: int = field(init=False, default=0)  # own requests without a first token
    _progress_since_s: float = field(init=False, default=0.0)  # of the first of them

    def __post_init__(self) -> None:
        self._own = _OnlineWork()
        self.set_report(self.report)

    @property
    def num_online(self) -> int:
        """Online requests, those of other clients as last reported."""
        return self._own.num_online + self._others.num_online

    @property
    def num_online_tokens(self) -> int:
        return self._own.num_tokens + self._others.num_tokens

    def set_report(self, report: ReplicaReport) -> None:
        """What is reported beyond what this router sent is of other clients."""
        self.report = report
        own = self._own
        self._others = _OnlineWork(
            num_online=max(0, report.num_online - own.num_online),
            num_tokens=max(0, report.online_tokens - own.num_tokens),
            waiting_tokens=max(0, report.waiting_prompt_tokens - own.waiting_tokens),
        )

    def wait_s(self, now_s: float) -> float:
        """Predicted seconds until the computation of a prompt that comes now begins."""
        report = self.report
        own = float(self._own.waiting_tokens)
        if self._num_waiting:
            # The first in the queue is partly computed: how far, says the time since the one before it.
            done = (now_s - self._progress_since_s) * report.prefill_tokens_per_s / self.correction
            own -= min(max(done, 0.0), own / self._num_waiting)
        tokens = own + self._others.waiting_tokens
        return self.correction * tokens / report.prefill_tokens_per_s + report.step_s / 2

    def ttft_s(self, tokens_to_compute: int, now_s: float) -> float:
        """Predicted seconds to the first token of a request that comes now."""
        own_s = self.correction * tokens_to_compute / self.report.prefill_tokens_per_s
        return self.wait_s(now_s) + own_s

    def has_place(self, num_tokens: int) -> bool:
        """Whether online requests leave a place in a step and KV for one more."""
        return (
            self.num_online < self.report.max_num_seqs
            and self.num_online_tokens + num_tokens <= self.report.kv_tokens
        )

    @property
    def line_room(self) -> int:
        """Offline lines that it may be sent beside those that it has.

        Twice the requests of a step, so that lines wait in the engine as they would in one server, less the
        share of the KV cache and of the places that online requests have.
        """
        if not (self.is_open and self.takes_lines):
            return 0
        report = self.report
        used = max(self.num_online / report.max_num_seqs, self.num_online_tokens / report.kv_tokens)
        most = max(1, int(2 * report.max_num_seqs * (1.0 - min(used, 1.0))))
        return max(0, most - self.num_lines)

    def begin(self, placement: Placement) -> None:
        """This and the next two are called by ``Placement``."""
        self._own.num_online += 1
        self._own.num_tokens += placement.num_tokens
        if not self._num_waiting:
            self._progress_since_s = placement.sent_at_s
        self._num_waiting += 1
        self._own.waiting_tokens += placement.tokens_to_compute

    def end_wait(self, placement: Placement, now_s: float, *, has_token: bool) -> None:
        self._num_waiting -= 1
        self._own.waiting_tokens -= placement.tokens_to_compute
        if not has_token:
            return
        self._progress_since_s = now_s
        if placement.predicted_s >= _LEAST_PREDICTED_S:
            ratio = self.correction * (now_s - placement.sent_at_s) / placement.predicted_s
            ratio = min(max(ratio, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
            self.correction += _WEIGHT * (ratio - self.correction)

    def end(self, placement: Placement) -> None:
        self._own.num_online -= 1
        self._own.num_tokens -= placement.num_tokens


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


@dataclass(slots=True)
class SloPolicy:
    """Least predicted TTFT, and the replica that has the prefix where that costs no objective.

    A replica that has no place for the request is passed over while another has one. Of the others, those
    are in question whose wait is at most ``imbalance`` of the TTFT objective longer than the shortest, and
    which would meet the objective with ``margin``. Where one of them has at least ``min_match`` of the
    prompt in its cache, the one with most of it is taken: a hit saves work that other requests would wait
    for. Else the request brings a new prefix, and of those whose TTFT is about the least, the one with the
    most room in its cache is taken, so that prefixes spread over all caches. Where no replica would meet the
    objective, the least TTFT is taken.

    Attributes:
        imbalance: share of the TTFT objective that a request may wait longer for its prefix.
        margin: share of the TTFT objective within which a first token is predicted to be in time.
        min_match: share of a prompt from which a match counts as its prefix.
        tie: share of the TTFT objective by which predicted TTFTs differ without meaning.
    """

    imbalance: float = 0.2
    margin: float = 0.8
    min_match: float = 0.5
    tie: float = 0.01

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Candidate:
        placed = [each for each in candidates if each.replica.has_place(request.num_tokens)] or candidates
        least_wait_s = min(each.wait_s for each in placed)
        in_question = [each for each in placed if self._is_in_question(request, each, least_wait_s)]
        if not in_question:
            return min(placed, key=lambda each: (each.ttft_s, each.replica.num_online))
        best = min(in_question, key=lambda each: (each.tokens_to_compute, each.ttft_s))
        if request.num_tokens - best.tokens_to_compute >= self.min_match * request.num_tokens:
            return best
        least = min(in_question, key=lambda each: each.ttft_s)
        most_s = least.ttft_s + self.tie * _objective_s(request, least)
        about_least = [each for each in in_question if each.ttft_s <= most_s]
        return min(about_least, key=lambda each: (each.cache_used, each.replica.num_online, each.ttft_s))

    def _is_in_question(self, request: RoutedRequest, candidate: Candidate, least_wait_s: float) -> bool:
        objective_s = _objective_s(request, candidate)
        return (
            candidate.wait_s <= least_wait_s + self.imbalance * objective_s
            and candidate.ttft_s <= self.margin * objective_s
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
    """Raises: ConfigError."""
    policies = {
        "slo": SloPolicy,
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "prefix": PrefixOnly,
    }
    if name not in policies:
        raise ConfigError(f"must be one of {', '.join(get_args(PolicyName))}, got {name!r}.", field="policy")
    policy: RoutingPolicy = policies[name]()
    return policy


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

    def get(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    def report(self, name: str, report: ReplicaReport) -> Replica:
        """What a replica says of itself; one that is not known is added, with an empty cache."""
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = Replica(name, report)
        replica.set_report(report)
        self._prefixes.add(name, report.kv_tokens)
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

    def place_line(
        self, request: RoutedRequest, besides: Collection[str] = (), *, may_exceed: bool = False
    ) -> LinePlacement | None:
        """Choose a replica for an offline request, and count it there.

        The replica with most of its prompt in the cache, of those with room; else the one with most room.

        Args:
            besides: replicas that are not to be chosen.
            may_exceed: where none has room, the one with the fewest is chosen.

        Returns: None where no replica has room, or there is none.
        """
        takers = [
            replica
            for name, replica in self._replicas.items()
            if replica.is_open and replica.takes_lines and name not in besides
        ]
        found = [replica for replica in takers if replica.line_room > 0]
        if not found and may_exceed and takers:
            found = [min(takers, key=lambda replica: replica.num_lines)]
        if not found:
            return None
        matches = self._prefixes.match(request.keys, [replica.name for replica in found])
        chosen = max(found, key=lambda replica: (matches[replica.name], replica.line_room))
        self._prefixes.note_sent(chosen.name, request.keys)
        return LinePlacement(chosen)

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
    return candidate.replica.report.ttft_s if request.ttft_s is None else request.ttft_s
