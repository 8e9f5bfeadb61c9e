"""BROS's own policy, to be read beside the paper and docs/bros.md: algorithm 1 (section 4.2)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain
from typing import ClassVar, Generic

from backfill.core.request import PriorityLevel
from backfill.costs.load import StepLoad
from backfill.scheduling.policy import (
    NO_LIMITS,
    Admission,
    BatchBuilder,
    ChunkLimits,
    Policy,
    PreemptionKey,
    R,
    RequestView,
    Snapshot,
    split,
)
from backfill.scheduling.prediction import StepPredictor

# The batch size to begin with. The paper's is lost in print. A step of so few decodes takes about as long as
# one of a single decode, because reading the weights bounds it.
INITIAL_BATCH_SIZE = 32


class BrosPolicy(Policy):
    """Algorithm 1: the most urgent online requests, then offline requests in order of their swap cost.

    A step holds at most ``batch_size`` requests, and its predicted time, computing or restoring, whichever
    takes longer, stays within the least residual time of the online requests that can still be in time. The
    most urgent request is in the step in any case.
    Where the batch is full, an offline request replaces the least urgent online one that can wait. Prompts
    are computed whole, up to the limits of tokens in a step.

    The formulas, and where this differs from the print: docs/bros.md.

    Args:
        max_num_seqs: bounds the batch size.
        max_chunk_tokens: of one prompt in a step.

    Attributes:
        batch_size: most requests of the next step (adaptive batch sizing).
    """

    orders_by_deadline = True
    may_preempt: ClassVar[Collection[PriorityLevel]] = (PriorityLevel.OFFLINE,)  # for waiting online requests

    def __init__(
        self,
        predictor: StepPredictor,
        *,
        max_num_seqs: int,
        max_chunk_tokens: int,
    ) -> None:
        self.batch_size = min(INITIAL_BATCH_SIZE, max_num_seqs)
        self._predictor = predictor
        self._max_num_seqs = max_num_seqs
        self._max_chunk_tokens = max_chunk_tokens

    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        average_s = self._predictor.average_step_s
        residuals = Residuals(self._predictor, view.now_s, average_s, self._max_chunk_tokens)
        step = _Step(view, builder, self.batch_size, residuals, self.may_preempt)
        is_violated = step.add_online()  # lines 3 to 15
        if not is_violated:
            step.add_offline()  # lines 17 to 33
        if builder.batch.num_seqs:  # adaptive batch sizing: additive increase, reset on a violation
            grown = min(self.batch_size + 1, self._max_num_seqs)
            self.batch_size = min(INITIAL_BATCH_SIZE, self._max_num_seqs) if is_violated else grown

    def preemption_key(self, request: RequestView, lost_tokens: float) -> PreemptionKey:
        """First offline requests, then online ones by most remaining time (section 5.2).

        Of the offline ones the paper preempts the blocks with the most empty slots: here, the requests that
        lose the fewest tokens.
        """
        if request.priority_level is PriorityLevel.ONLINE:
            return (0, request.next_token_by_s, *request.order_key)
        return (1, -lost_tokens, *request.order_key)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Constraint (6): what is left of the time to the deadlines of next tokens.

    All seconds are observed ones: predictions are multiplied by ``StepPredictor.time_scale``.

    Args:
        average_s: moving average of observed steps; each step after the one that is built counts so long.
    """

    predictor: StepPredictor
    now_s: float
    average_s: float
    max_chunk_tokens: int

    def residual_s(self, request: RequestView) -> float:
        """The longest this step may take with the request in it, for its next token to be in time."""
        later_s = (self._num_steps(request) - 1) * self.average_s
        return request.next_token_by_s - self.now_s - later_s

    def start_by_s(self, request: RequestView) -> float:
        """When the first of the steps to its next token must begin, for that token to be in time."""
        first_s = self.average_s if request.is_decoding else self._alone_s(request)
        return request.next_token_by_s - first_s - (self._num_steps(request) - 1) * self.average_s

    def urgency(self, request: RequestView) -> tuple[int, float]:
        """The smaller is the more urgent: by the client's priority, then by the latest start."""
        return request.order_key[0], self.start_by_s(request)

    def can_wait(self, request: RequestView, step_s: float) -> bool:
        """Whether its next token can be in time if it is left out of a step predicted to take this long."""
        return self.start_by_s(request) >= self.now_s + self.predictor.time_scale * step_s

    def must_start(self, request: RequestView, step_s: float) -> bool:
        """Whether its next token can be in time, but not if it is left out of such a step."""
        return self._can_be_in_time(request) and not self.can_wait(request, step_s)

    def bound_s(self, view: Snapshot[R]) -> float:
        """The least residual time, as a bound of the step's predicted time; inf without any.

        Requests that are late already, or will be in any case, do not count: no step would satisfy them. Of
        the waiting requests the first one that can be in time counts.
        """
        online, least_s = PriorityLevel.ONLINE, math.inf
        for request in chain[RequestView](view.holders(online), view.in_other_steps.get(online, ())):
            residual_s = self.residual_s(request)
            if 0.0 < residual_s < least_s and self._can_be_in_time(request):
                least_s = residual_s
        for request in view.waiting[online]:
            residual_s = self.residual_s(request)
            if residual_s > 0.0 and self._can_be_in_time(request):
                least_s = min(least_s, residual_s)
                break
        return least_s / self.predictor.time_scale

    def fits_alone(self, request: RequestView, bound_s: float) -> bool:
        """A step of the request alone keeps to this bound of its predicted time."""
        return self._alone_s(request) <= bound_s * self.predictor.time_scale

    def _can_be_in_time(self, request: RequestView) -> bool:
        return self._alone_s(request) <= self.residual_s(request)

    def _num_steps(self, request: RequestView) -> int:
        return -(-request.num_pending_tokens // self.max_chunk_tokens)

    def _alone_s(self, request: RequestView) -> float:
        """Of a step with the request alone."""
        pending = request.num_pending_tokens
        num_tokens = min(pending, self.max_chunk_tokens)
        load = StepLoad.of([(request.num_computed_tokens, num_tokens, num_tokens == pending)])
        return self.predictor.time_scale * self.predictor.cost.step_time_s(load)


@dataclass(slots=True)
class _Step(Generic[R]):
    """One run of algorithm 1."""

    view: Snapshot[R]
    builder: BatchBuilder[R]
    batch_size: int
    residuals: Residuals
    may_preempt: Collection[PriorityLevel]
    _bound_s: float = field(init=False, default=math.inf)
    _swap_s: float = field(init=False, default=0.0)  # of restoring what was admitted, as a predicted time
    _owners_begun: set[str] = field(init=False, default_factory=set)  # with a prompt that is computed
    _online: list[R] = field(init=False, default_factory=list)  # in the batch, the most urgent first

    @property
    def _time_s(self) -> float:
        """T = max(T_compute, T_swap), constraint (2)."""
        return max(self.builder.batch.predicted_s, self._swap_s)

    def add_online(self) -> bool:
        """Lines 3 to 15. Returns: whether the least residual time is violated.

        It is if a request does not fit that can be in time, but not if it waits, or if the most urgent one
        alone takes longer.

        The waiting queue is in order already, so the next request is pulled from it or from the sorted
        running ones, whichever is the more urgent (figure 8). Once a waiting request does not fit, those
        behind it wait too.
        """
        batch, urgency = self.builder.batch, self.residuals.urgency
        keyed = sorted(
            (*urgency(each), each.order_key, each) for each in self.view.running[PriorityLevel.ONLINE]
        )
        running, waiting = deque([each for *_, each in keyed]), deque(self._waiting_online())
        self._owners_begun = {each.owner for each in running if not each.is_decoding}
        self._bound_s = self.residuals.bound_s(self.view)
        limits = ChunkLimits(max_step_s=self._bound_s, is_whole=True)
        while batch.num_seqs < self.batch_size and batch.has_headroom and (running or waiting):
            if decodes := self._pull_decodes(running, waiting):
                num_added = self.builder.add_decodes(decodes, self._bound_s)
                self._online += decodes[:num_added]
                if num_added < len(decodes):
                    return self.residuals.must_start(decodes[num_added], self._time_s)
                continue
            if not running or (waiting and self._goes_before(waiting[0], running[0])):
                request = waiting.popleft()
                admission = self._admit(request, limits, self.may_preempt)
                is_added = admission is Admission.ADMITTED
                self._owners_begun.add(request.owner)
                if admission is Admission.DEFERRED:
                    continue
                if admission is Admission.REFUSED:
                    waiting.clear()
            else:
                request = running.popleft()
                is_added = self.builder.try_add(request, limits) > 0
            if is_added:
                self._online.append(request)
            elif self._lacks_time(request) and self.residuals.must_start(request, self._time_s):
                return True
        return self._time_s > self._bound_s

    def _goes_before(self, waiting: R, running: R) -> bool:
        """By urgency, but for a request whose owner has begun others: those of several owners take turns."""
        urgency = self.residuals.urgency
        has_turn = waiting.owner == running.owner or waiting.owner not in self._owners_begun
        return has_turn and urgency(waiting) < urgency(running)

    def add_offline(self) -> None:
        """Lines 17 to 33: by swap cost. Requests on the device have none; of them, decodes come first."""
        batch = self.builder.batch
        decodes, prefills = split(self.view.running[PriorityLevel.OFFLINE])
        num_left = max(0, self.batch_size - batch.num_seqs)
        num_added = self.builder.add_decodes(decodes[:num_left], self._bound_s)
        for request in chain(decodes[num_added:], prefills):
            if not self._add_offline(request, is_waiting=False):
                return
        if not batch.has_preempted:
            for request in self._waiting_offline():
                if not self._add_offline(request, is_waiting=True):
                    return

    def _add_offline(self, request: R, *, is_waiting: bool) -> bool:
        """Add the request, or replace an online one by it. Returns: whether to try others.

        A prompt that would not fit the bound even alone is cut to the time that is left.
        """
        builder, batch = self.builder, self.builder.batch
        is_whole = self.residuals.fits_alone(request, self._bound_s)
        limits = ChunkLimits(max_step_s=self._bound_s, is_whole=is_whole)
        if batch.num_seqs < self.batch_size:
            if self._try(request, limits, is_waiting):
                return True
            if not self._lacks_time(request):
                return not is_waiting
        while len(self._online) > 1:
            online, num_seqs = self._online.pop(), batch.num_seqs
            builder.remove(online)
            if batch.num_seqs == num_seqs:
                continue  # it was preempted meanwhile, or is being restored
            if (
                not self._lacks_time(request)
                and self.residuals.can_wait(online, builder.time_with_s(request))
                and self._try(request, limits, is_waiting)
            ):
                return True
            builder.try_add(online, NO_LIMITS)
            return False
        return False

    def _try(self, request: R, limits: ChunkLimits, is_waiting: bool) -> bool:
        if is_waiting:
            return self._admit(request, limits) is not Admission.REFUSED
        return self.builder.try_add(request, limits) > 0

    def _admit(
        self, request: R, limits: ChunkLimits, may_preempt: Collection[PriorityLevel] = ()
    ) -> Admission:
        swap_s = self._swap_s_of(request)
        if self.builder.batch.num_seqs and swap_s and self._swap_s + swap_s > self._bound_s:
            return Admission.REFUSED
        admission = self.builder.try_admit(request, limits, may_preempt=may_preempt)
        if admission is Admission.ADMITTED:
            self._swap_s += swap_s
        return admission

    def _swap_s_of(self, request: R) -> float:
        return self.builder.restore_s(request) / self.residuals.predictor.time_scale

    def _lacks_time(self, request: R) -> bool:
        """Time is what keeps the request out of the batch. The first one gets all that it needs."""
        time_s = max(self.builder.time_with_s(request), self._swap_s + self._swap_s_of(request))
        return self.builder.batch.num_seqs > 0 and time_s > self._bound_s

    def _pull_decodes(self, running: deque[R], waiting: deque[R]) -> Sequence[R]:
        """The next requests, as far as they are running decodes and the batch may have more."""
        urgency, num_left = self.residuals.urgency, self.batch_size - self.builder.batch.num_seqs
        limit = urgency(waiting[0]) if waiting else (math.inf, math.inf)
        decodes: list[R] = []
        while running and len(decodes) < num_left and running[0].is_decoding and urgency(running[0]) <= limit:
            decodes.append(running.popleft())
        return decodes

    def _waiting_online(self) -> Sequence[R]:
        """In order. Preempted requests are queued among them by the deadlines of their first tokens."""
        waiting = self.view.waiting[PriorityLevel.ONLINE]
        preempted = [each for each in waiting if each.last_token_at_s is not None]
        if not preempted:
            return waiting
        new = [each for each in waiting if each.last_token_at_s is None]
        urgency = self.residuals.urgency
        return list(merge(new, sorted(preempted, key=urgency), key=urgency))

    def _waiting_offline(self) -> Sequence[R]:
        """By the blocks to restore or to compute again: new requests have none."""
        waiting, absent_blocks = self.view.waiting[PriorityLevel.OFFLINE], self.builder.num_absent_blocks
        costs = {each.request_id: absent_blocks(each) for each in waiting if each.num_ever_computed_tokens}
        return sorted(waiting, key=lambda each: costs.get(each.request_id, 0))
