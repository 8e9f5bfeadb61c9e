"""Continuous batching with chunked prefill: plans one step, then commits its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from backfill.core.config import SchedulerConfig
from backfill.core.plan import AdmittedRequest, SampledToken, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import FinishReason, Request, RequestId, RequestStatus, ServiceClass
from backfill.kvcache.block_manager import BlockManager
from backfill.scheduling.queue import RequestQueue


@dataclass(frozen=True, slots=True)
class CommittedToken:
    """One output token that now belongs to its request."""

    request: Request
    sampled: SampledToken
    stop_token_id: int | None  # the requested stop token that ended the output, if one did


@dataclass(slots=True)
class ClassCounters:
    """Totals since the start, of one service class."""

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0


class Scheduler:
    """Decides what each step computes. Never touches a tensor and never reads a clock.

    Running requests come first, those that decode before those that prefill: a decode costs one
    token of the step and its user is reading. Then waiting requests join in order of urgency while
    the step's tokens, the batch's places and the pool's blocks last. When blocks run out, the least
    urgent running request is preempted: its blocks are freed and its tokens recomputed later.

    The most urgent request can take blocks from every other, and ``add`` admits only requests that
    fit the pool alone, so every step makes progress.

    Args:
        end_token_ids: tokens that end any output unless it ignores them.
    """

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, end_token_ids: Collection[int] = ()
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.counters = {service_class: ClassCounters() for service_class in ServiceClass}
        self._end_token_ids = frozenset(end_token_ids)
        self._requests: dict[RequestId, Request] = {}
        self._waiting = RequestQueue()
        self._running: dict[RequestId, Request] = {}
        self._known_to_executor: set[RequestId] = set()
        self._to_release: list[RequestId] = []
        self._num_plans = 0
        self._num_added = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """A step is due: requests are unfinished, or the executor still holds some that have ended."""
        return bool(self._requests or self._to_release)

    def count_by_class(self) -> dict[ServiceClass, tuple[int, int]]:
        """(running, waiting) of each class."""
        running = Counter(request.service_class for request in self._running.values())
        waiting = self._waiting.num_by_class
        return {
            service_class: (running[service_class], waiting[service_class]) for service_class in ServiceClass
        }

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits the pool alone."""
        assert request.request_id not in self._requests, f"{request.request_id} is already known"
        most_tokens = request.num_prompt_tokens + request.sampling.max_tokens
        assert self.blocks.blocks_for(most_tokens) <= self.blocks.num_blocks, (
            f"{request.request_id}: {most_tokens} tokens cannot fit {self.blocks.num_blocks} blocks"
        )
        request.sequence_number = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def finish(self, request_id: RequestId, reason: FinishReason) -> Request | None:
        """End a request from outside (abort, error). None if it has ended already or never existed."""
        request = self._requests.get(request_id)
        if request is not None:
            if request.status is not RequestStatus.RUNNING:
                self._waiting.remove(request)
            self._end(request, reason)
        return request

    def plan_step(self, now_s: float) -> StepPlan:
        """Choose what the next step computes; a plan without slices means there is nothing to do.

        Called once for each step, after the outcome of the step before was committed.
        """
        batch = _Batch(self.config.max_num_batched_tokens)
        preempted_any = self._plan_running(batch)
        admitted = [] if preempted_any else self._plan_waiting(batch, now_s)
        plan = StepPlan(
            step=self._num_plans,
            admitted=tuple(admitted),
            slices=tuple(self._slice_of(request, n) for request, n in batch.members.values()),
            released=tuple(self._to_release),
        )
        self._to_release.clear()
        self._num_plans += 1
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> list[CommittedToken]:
        """Enter a completed step into the requests; the outcome must be that of ``plan``."""
        for piece in plan.slices:
            self._requests[piece.request_id].num_computed_tokens += piece.num_tokens
        committed = []
        for sampled in outcome.sampled:
            request = self._requests[sampled.request_id]
            request.output_token_ids.append(sampled.token_id)
            reason, stop_token_id = self._finish_reason(request, sampled.token_id)
            if reason is not None:
                self._end(request, reason)
            committed.append(CommittedToken(request, sampled, stop_token_id))
        return committed

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, queues and requests disagree."""
        self.blocks.check_integrity()
        assert len(self._running) + len(self._waiting) == len(self._requests)
        for request in self._requests.values():
            held = self.blocks.num_held_blocks(request.request_id)
            is_running = request.status is RequestStatus.RUNNING
            assert is_running == (request.request_id in self._running), f"{request.request_id} is misplaced"
            assert is_running or held == 0, f"{request.request_id} waits and holds {held} blocks"
            assert 0 <= request.num_computed_tokens <= request.num_tokens
            assert held * self.blocks.block_size >= request.num_computed_tokens
        held_in_all = self.blocks.num_blocks - self.blocks.num_free_blocks
        held_by_known = sum(self.blocks.num_held_blocks(request_id) for request_id in self._requests)
        assert held_in_all == held_by_known, f"{held_in_all - held_by_known} blocks belong to no request"

    def _plan_running(self, batch: _Batch) -> bool:
        """Give each running request its tokens, preempting for blocks; True if any was preempted."""
        preempted_any = False
        in_turn = sorted(self._running.values(), key=lambda r: (not r.is_decoding, r.order_key))
        for request in in_turn:
            num_tokens = self._tokens_for(request, batch)
            if num_tokens == 0 or request.status is not RequestStatus.RUNNING:
                continue
            needed = request.num_computed_tokens + num_tokens
            while not self.blocks.can_grow(request.request_id, needed):
                victim = max(self._running.values(), key=lambda r: r.order_key)
                batch.drop(victim)
                self._preempt(victim)
                preempted_any = True
                if victim is request:
                    break
            else:
                self.blocks.grow(request.request_id, needed)
                batch.put(request, num_tokens)
        return preempted_any

    def _plan_waiting(self, batch: _Batch, now_s: float) -> list[AdmittedRequest]:
        """Start waiting requests while all their known tokens fit beside what running ones will need next.

        That is the blocks for the rest of their prompts and one block each to grow into, so that an
        admission does not cause a preemption in the next steps.
        """
        admitted: list[AdmittedRequest] = []
        if len(self._waiting) == 0:
            return admitted
        reserved = sum(map(self._blocks_needed_next, self._running.values()))
        while len(self._running) < self.config.max_num_seqs:
            request = self._waiting.peek()
            if request is None:
                break
            num_tokens = self._tokens_for(request, batch)
            needed = self.blocks.blocks_for(request.num_tokens)
            if num_tokens == 0 or needed + reserved > self.blocks.num_free_blocks:
                break
            self._waiting.pop()
            request.move_to(RequestStatus.RUNNING)
            if request.first_scheduled_at_s is None:
                request.first_scheduled_at_s = now_s
            self._running[request.request_id] = request
            self.blocks.grow(request.request_id, num_tokens)
            reserved += self._blocks_needed_next(request)
            batch.put(request, num_tokens)
            if request.request_id not in self._known_to_executor:
                self._known_to_executor.add(request.request_id)
                admitted.append(
                    AdmittedRequest(request.request_id, tuple(request.prompt_token_ids), request.sampling)
                )
        return admitted

    def _blocks_needed_next(self, request: Request) -> int:
        return 1 + self.blocks.num_missing_blocks(request.request_id, request.num_tokens)

    def _tokens_for(self, request: Request, batch: _Batch) -> int:
        return min(request.num_pending_tokens, self.config.max_prefill_chunk_tokens, batch.num_tokens_left)

    def _slice_of(self, request: Request, num_tokens: int) -> ScheduledSlice:
        return ScheduledSlice(
            request_id=request.request_id,
            start=request.num_computed_tokens,
            num_tokens=num_tokens,
            blocks=self.blocks.table(request.request_id),
            samples=num_tokens == request.num_pending_tokens,
        )

    def _preempt(self, request: Request) -> None:
        """Free the request's blocks and queue it again; its tokens are kept, their KV recomputed."""
        counters = self.counters[request.service_class]
        counters.num_preemptions += 1
        counters.num_recomputed_tokens += request.num_computed_tokens
        self.blocks.release(request.request_id)
        del self._running[request.request_id]
        request.move_to(RequestStatus.PREEMPTED)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.push(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request_id = request.request_id
        self.blocks.release(request_id)
        self._running.pop(request_id, None)
        del self._requests[request_id]
        if request_id in self._known_to_executor:
            self._known_to_executor.remove(request_id)
            self._to_release.append(request_id)
        request.finish(reason)

    def _finish_reason(self, request: Request, token_id: int) -> tuple[FinishReason | None, int | None]:
        sampling = request.sampling
        if len(request.output_token_ids) >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return FinishReason.STOP, token_id
            if not sampling.ignore_eos and token_id in self._end_token_ids:
                return FinishReason.STOP, None
        if len(request.output_token_ids) >= sampling.max_tokens:
            return FinishReason.LENGTH, None
        return None, None


class _Batch:
    """The members of the step being planned and the tokens left to give out."""

    def __init__(self, max_num_tokens: int) -> None:
        self.num_tokens_left = max_num_tokens
        self.members: dict[RequestId, tuple[Request, int]] = {}

    def put(self, request: Request, num_tokens: int) -> None:
        self.members[request.request_id] = (request, num_tokens)
        self.num_tokens_left -= num_tokens

    def drop(self, request: Request) -> None:
        member = self.members.pop(request.request_id, None)
        if member is not None:
            self.num_tokens_left += member[1]
