"""The interface of policies: a frozen snapshot of the requests, and a builder of the next step's batch.

A policy is one file in ``policies/``, to be read beside its paper. It knows requests by ``RequestView`` and
the engine by ``BatchBuilder`` alone, so that it can drive any engine that offers the two.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import merge
from typing import Generic, Protocol, TypeAlias, TypeVar

from backfill.core.request import OrderKey, PriorityLevel, RequestId, order_key
from backfill.core.slo import SLO
from backfill.scheduling.batch import Batch

PreemptionKey: TypeAlias = tuple[float, ...]

# The smallest prefill chunk that is scheduled in a step that is over its time.
MIN_PREFILL_CHUNK_TOKENS = 16


class RequestView(Protocol):
    """What a policy knows of a request. It reads, and changes nothing."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def priority_level(self) -> PriorityLevel: ...
    @property
    def order_key(self) -> OrderKey:
        """The smaller is the more urgent among requests of one priority level."""

    @property
    def owner(self) -> str: ...
    @property
    def owner_weight(self) -> float: ...
    @property
    def has_started(self) -> bool:
        """It has been in a step."""

    @property
    def slo(self) -> SLO | None:
        """None for requests without objectives, as all offline ones are."""

    @property
    def arrived_at_s(self) -> float: ...
    @property
    def last_token_at_s(self) -> float | None:
        """When its latest output token was sampled; None before the first."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is there. Of a waiting request: those that the cache had when it was last asked."""

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute before the next token can be sampled; at least 1."""

    @property
    def num_ever_computed_tokens(self) -> int:
        """The most that ``num_computed_tokens`` has been while it ran; 0 before it first ran."""

    @property
    def is_decoding(self) -> bool: ...
    @property
    def next_token_by_s(self) -> float:
        """The deadline of its next token; inf without objectives."""

    @property
    def banked_s(self) -> float:
        """Seconds by which its tokens so far came sooner than one a TPOT objective; negative if later."""


R = TypeVar("R", bound=RequestView)
R_co = TypeVar("R_co", bound=RequestView, covariant=True)
R_contra = TypeVar("R_contra", bound=RequestView, contravariant=True)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[R_co]):
    """What a policy sees before a step.

    Attributes:
        now_s: when the step can begin. With steps in flight: when the first stage is predicted to be free.
        running: requests that can take part in the step, by priority level, the most urgent first.
            Those with a suspended slice are left out.
        restoring: requests that hold blocks to which KV is being copied.
        waiting: requests without device blocks, by priority level, the most urgent first; not more than can
            be tried in one step.
        num_blocks: blocks in the device's pool.
        online_blocks: device blocks of running and restoring online requests.
        reclaimable_blocks: blocks that an online request can have at once though they are not empty:
            checkpointed ones of offline requests, and those that are protected from offline requests.
        in_other_steps: requests that could run but for the steps in flight: those in one of them, as they
            will be when it ends, and those that are left to the next step. The step delays their next tokens
            too.
        is_shared: several owners have unfinished online requests, or had some lately.
        is_flooded: it is shared, and one owner has nearly all of the online requests.
        yielding_owner: has nearly all of the online requests, and gives way to others (``GivingWay``);
            None if nobody does.
        stopped_owners: of online requests with slices that were suspended for another owner's.
        were_passed_over: the last step went before these slices, and had no prompt that they gave way to.
        served: of owners that compete with online requests: tokens over weight (``OwnerShares``). Empty where
            no two do.
        late_owners: of relegated requests that wait.
    """

    now_s: float
    running: Mapping[PriorityLevel, Sequence[R_co]]
    restoring: Sequence[R_co]
    waiting: Mapping[PriorityLevel, Sequence[R_co]]
    num_blocks: int
    online_blocks: int
    reclaimable_blocks: int = 0
    in_other_steps: Mapping[PriorityLevel, Sequence[RequestView]] = field(default_factory=dict)
    is_shared: bool = False
    is_flooded: bool = False
    yielding_owner: str | None = None
    stopped_owners: Collection[str] = ()
    were_passed_over: bool = False
    served: Mapping[str, float] = field(default_factory=dict)
    late_owners: Collection[str] = ()

    def holders(self, level: PriorityLevel) -> Sequence[R_co]:
        """Requests of a level that hold blocks: those that run, then those that are being restored."""
        running = self.running[level]
        if not self.restoring:
            return running
        return [*running, *(each for each in self.restoring if each.priority_level is level)]

    @property
    def delayed_online(self) -> Sequence[RequestView]:
        """Those of both levels of online requests."""
        return [*self.delayed(PriorityLevel.ONLINE), *self.delayed(PriorityLevel.RELEGATED)]

    def delayed(self, level: PriorityLevel) -> Sequence[RequestView]:
        """Requests of a level whose next tokens the step delays: holders of blocks, and those in other steps.

        Those that are late and still being restored are left out: no step that begins now brings their token.
        """
        others, holders = self.in_other_steps.get(level, ()), self.holders(level)
        if not (others or self.restoring):
            return holders
        late = {each.request_id for each in self.restoring if each.next_token_by_s <= self.now_s}
        delayed: list[RequestView] = [*holders, *others]
        return [each for each in delayed if each.request_id not in late]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """How many pending tokens of one request a step takes.

    Attributes:
        max_step_s: of the predicted time of the whole step with the chunk. The first slice of a step is
            exempt: it gets ``MIN_PREFILL_CHUNK_TOKENS`` in any case.
        step_sizes: tokens, ascending. The chunk fills the step up to the first size that leaves at least half
            of the smallest size to prefills, and ``MIN_PREFILL_CHUNK_TOKENS``. Empty: up to the step's limit.
        guarantees_progress: the step's first prefill gets ``MIN_PREFILL_CHUNK_TOKENS`` even past
            ``max_step_s``.
        is_whole: the chunk is not cut for time: it has all the tokens that the step's limits leave, or none.
            The first slice of a step has them in any case.
    """

    max_step_s: float = math.inf
    step_sizes: Sequence[int] = ()
    guarantees_progress: bool = False
    is_whole: bool = False


NO_LIMITS = ChunkLimits()


class Admission(Enum):
    """What became of a waiting request that a policy tried to admit."""

    ADMITTED = "admitted"  # it holds its blocks, and is in the step if its KV is on the device
    DEFERRED = "deferred"  # the next step finds more of its prefix in the cache; others may be tried
    REFUSED = "refused"  # no blocks, time or sequences are left: less urgent requests need not be tried


class BatchBuilder(Protocol[R_contra]):
    """Builds a step's batch. Every call leaves the batch and the requests in a state that can run."""

    @property
    def batch(self) -> Batch:
        """The step as it is now. A policy reads it, and changes it by the methods here alone."""

    def time_with_s(self, request: R_contra) -> float:
        """Predicted seconds of the step with all the tokens of one more request that its limits leave."""

    def num_absent_blocks(self, request: R_contra) -> int:
        """Blocks' worth of tokens of a waiting request that were computed and are not on the device any more.

        They are restored from host memory or computed again before it continues. Less than a block is none:
        it is computed again in the step of the next token.
        """

    def restore_s(self, request: R_contra) -> float:
        """Seconds that restoring a waiting request from host memory takes; 0 for others, or if not known."""

    def add_decodes(self, requests: Sequence[R_contra], max_step_s: float = math.inf) -> int:
        """Add one token each of running requests that decode, the most urgent first.

        As many as fit the limit; the first slice of a step is exempt. Less urgent requests are preempted
        where blocks run out. Returns: how many of them fitted the time and the step's limits.
        """

    def try_add(self, request: R_contra, limits: ChunkLimits = NO_LIMITS) -> int:
        """Add pending tokens of a running request. Returns: how many; 0 where none fits."""

    def try_admit(
        self,
        request: R_contra,
        limits: ChunkLimits = NO_LIMITS,
        *,
        reserved_blocks: int = 0,
        may_preempt: Collection[PriorityLevel] = (),
    ) -> Admission:
        """Give a waiting request blocks for all its tokens, and add a chunk of them.

        What running requests need next, and ``reserved_blocks``, are left free. Requests of the levels
        ``may_preempt`` are preempted for it if that suffices.
        """

    def remove(self, request: R_contra) -> None:
        """Take a request out of the step. It keeps its blocks."""

    def preempt(self, request: R_contra) -> None:
        """Take a running or restoring request's blocks, and queue it again; nothing if it has none.

        Nor if a chunk of it is in flight.
        """


class Policy(ABC):
    """Builds each step's batch, and says which request is preempted when blocks run out.

    The defaults are those of a policy without objectives: the clock and the cost model play no part.
    """

    stops_steps = False  # an arriving online request may stop a running step
    stops_online_steps = True  # also one with online requests in it, of which these go on
    protects_online_cache = False  # offline requests may not evict what online ones used a short time ago
    promotes = False  # offline requests are promoted near the end of their window
    relegates = False  # online requests that cannot meet their TTFT objective any more are relegated
    orders_by_deadline = False  # online requests, by that of their first token; else by arrival
    has_levels = True  # ``preemption_key`` begins with a level; within it, owners above their part go first

    @property
    def most_given_s(self) -> float:
        """Seconds that an owner with nearly all online requests gives to others before it had its part again.

        Until then its slices can be stopped for other owners' requests. 0: it gives nothing.
        """
        return 0.0

    @abstractmethod
    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        """Fill the step's batch. Called again, with a new snapshot, if preemptions have left it empty.

        What it decides depends on the snapshot, and on what the policy has learned from steps before.
        """

    def resume_s(self, view: Snapshot[RequestView]) -> float:
        """Seconds for which suspended slices may run now; 0: not now, inf: to their end.

        Called only where slices are suspended, before ``build``. If they resume, ``build`` is not called.
        """
        return math.inf

    def preemption_key(self, request: RequestView, lost_tokens: float) -> PreemptionKey:
        """The request with the greatest key is preempted first; by default the least urgent.

        ``lost_tokens`` would be recomputed. A token of a suspended slice counts by the share of the layers
        that it has passed.
        """
        return (request.priority_level is not PriorityLevel.ONLINE, *request.order_key)

    def step_limit_s(self, view: Snapshot[RequestView], num_tokens: Mapping[RequestId, int]) -> float:
        """The longest that a step may take, as predicted, for online requests; inf where nothing bounds it.

        Copies between device and host may slow a step as far as it stays within this.

        Args: num_tokens: that the step computes of each of its requests.
        """
        return math.inf

    def set_default_slo(self, slo: SLO) -> None:
        """From now on these are the objectives of online requests that bring none."""
        return


def serve(
    view: Snapshot[R],
    builder: BatchBuilder[R],
    levels: Collection[PriorityLevel],
    limits: ChunkLimits = NO_LIMITS,
    *,
    reserved_blocks: int = 0,
    may_preempt: Collection[PriorityLevel] = (),
) -> None:
    """Serve requests of these levels: those that run first, decodes before prefills, then those that wait.

    Requests wait in order: the first that does not fit ends the round.
    """
    decodes, prefills = split(_merged([view.running[level] for level in levels]))
    builder.add_decodes(decodes, limits.max_step_s)
    for request in prefills:
        if not builder.batch.has_headroom:
            break
        builder.try_add(request, limits)
    waiting = _merged([view.waiting[level] for level in levels])
    if waiting and (may_preempt or not builder.batch.has_preempted):
        admit(builder, waiting, limits, reserved_blocks=reserved_blocks, may_preempt=may_preempt)


def admit(
    builder: BatchBuilder[R],
    waiting: Iterable[R],
    limits: ChunkLimits = NO_LIMITS,
    *,
    reserved_blocks: int = 0,
    may_preempt: Collection[PriorityLevel] = (),
) -> None:
    """Admit waiting requests until one does not fit."""
    for request in waiting:
        admission = builder.try_admit(
            request, limits, reserved_blocks=reserved_blocks, may_preempt=may_preempt
        )
        if admission is Admission.REFUSED:
            break


def split(requests: Sequence[R]) -> tuple[Sequence[R], Sequence[R]]:
    """(those that decode, those with more tokens to compute), in their order."""
    decodes = [request for request in requests if request.is_decoding]
    if len(decodes) == len(requests):
        return decodes, ()
    return decodes, [request for request in requests if not request.is_decoding]


def _merged(levels: Sequence[Sequence[R]]) -> Sequence[R]:
    """Requests of several levels by their order within a level."""
    some = [requests for requests in levels if requests]
    if len(some) < 2:
        return some[0] if some else ()
    return list(merge(*some, key=order_key))
