"""Continuous batching with chunked prefill: plans one step, then commits its outcome."""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.core.plan import (
    AdmittedRequest,
    CopyDirections,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
)
from backfill.core.request import FinishReason, PriorityLevel, Request, RequestId, RequestStatus, ServiceClass
from backfill.costs.model import CostModel
from backfill.kvcache.block_manager import BlockManager
from backfill.kvcache.checkpointing import create_checkpoint_policy
from backfill.kvcache.host_tier import HostTier
from backfill.scheduling.batch import Batch
from backfill.scheduling.policy import Policy, StepBudget, StepView
from backfill.scheduling.queue import RequestQueue
from backfill.scheduling.suspension import Suspension


@dataclass(frozen=True, slots=True)
class CommittedToken:
    """One output token that now belongs to its request."""

    request: Request
    sampled: SampledToken
    stop_token_id: int | None  # the requested stop token that ended the output, if one did


_MIN_PROMOTIONS = 64  # the heap is not worth clearing below
_MOST_UNTIMED_COPIES = 64  # copies under way at once where it is not known how long they take

_ORDER_KEY = operator.attrgetter("order_key")


class Scheduler:
    """Builds each step in the budgets a policy gives, then commits its outcome. Never touches a tensor.

    Within a budget, running requests come first, those that decode before those that prefill: a decode costs
    one token of the step and its user is reading. Then waiting requests join in order of urgency while the
    step's tokens and time, the batch's places and the pool's blocks last. When a running request lacks a
    block, the policy's victim is preempted: its blocks are freed; what of its KV is in host memory is copied
    back later, while others run, and the rest recomputed.

    A request whose step has no time or place left for it keeps its blocks and waits. ``add`` admits only
    requests that fit the pool alone, and the first slice of a step is never held to a time, so every step
    with a request that the policy serves makes progress.

    Args:
        end_token_ids: tokens that end any output unless it ignores them.
        cost: predicts steps for policies that bound their time; None for policies that do not.
        block_copy_s: seconds that a copy of one block between device and host takes; None if not known.
        num_layers: of the model; None where the executor cannot stop a step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        policy: Policy,
        *,
        cost: CostModel | None = None,
        block_copy_s: float | None = None,
        num_layers: int | None = None,
        end_token_ids: Collection[int] = (),
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.policy = policy
        self.cost = cost
        self._suspension: Suspension | None = None
        if num_layers is not None and cost is not None and policy.stops_steps:
            self._suspension = Suspension(config, policy, cost, num_layers, self._count_lost)
        self.counters = {service_class: ClassCounters() for service_class in ServiceClass}
        self._block_copy_s = block_copy_s
        self._host = HostTier(blocks, create_checkpoint_policy(config.checkpointing or "none"), self.counters)
        self._end_token_ids = frozenset(end_token_ids)
        self._requests: dict[RequestId, Request] = {}
        self._num_online = 0
        self._waiting = {level: RequestQueue() for level in PriorityLevel}
        self._running: dict[RequestId, Request] = {}
        self._known_to_executor: set[RequestId] = set()
        self._to_release: list[RequestId] = []
        self._to_promote: list[tuple[float, int, Request]] = []  # a heap; may hold requests that have ended
        self._num_plans = 0
        self._num_added = 0

    @property
    def _suspended(self) -> Collection[RequestId]:
        return () if self._suspension is None else self._suspension.requests

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """A step is due: for requests that are unfinished, or to clear up after some that have ended."""
        return bool(self._requests or self._to_release or self.blocks.num_copies_under_way)

    @property
    def has_online(self) -> bool:
        """An online request is unfinished."""
        return self._num_online > 0

    def set_cost_model(self, cost: CostModel) -> None:
        """Predict with this model from now on. Called between two steps."""
        self.cost = cost
        self.policy.set_cost_model(cost)
        if self._suspension is not None:
            self._suspension.set_cost_model(cost)

    def count_by_class(self) -> dict[ServiceClass, tuple[int, int]]:
        """(running, waiting) of each class; those that are restored hold blocks and count as running."""
        holders = (*self._running.values(), *self._host.restoring)
        running = Counter(request.service_class for request in holders)
        waiting = {level: len(queue) for level, queue in self._waiting.items()}
        return {
            ServiceClass.ONLINE: (running[ServiceClass.ONLINE], waiting[PriorityLevel.ONLINE]),
            ServiceClass.OFFLINE: (
                running[ServiceClass.OFFLINE],
                waiting[PriorityLevel.OFFLINE] + waiting[PriorityLevel.PROMOTED],
            ),
        }

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits the pool alone."""
        assert request.request_id not in self._requests, f"{request.request_id} is already known"
        most_tokens = request.num_prompt_tokens + request.sampling.max_tokens
        assert self.blocks.blocks_for(most_tokens) <= self.blocks.num_blocks, (
            f"{request.request_id}: {most_tokens} tokens cannot fit {self.blocks.num_blocks} blocks"
        )
        request.enqueue(self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._num_online += request.service_class is ServiceClass.ONLINE
        self._waiting[request.priority_level].push(request)
        promote_at_s = self.policy.promote_at_s(request)
        if promote_at_s < math.inf and request.priority_level is PriorityLevel.OFFLINE:
            if len(self._to_promote) > 2 * len(self._requests) + _MIN_PROMOTIONS:
                self._to_promote = [
                    entry for entry in self._to_promote if entry[2].status is not RequestStatus.FINISHED
                ]
                heapq.heapify(self._to_promote)
            heapq.heappush(self._to_promote, (promote_at_s, self._num_added, request))

    def finish(self, request_id: RequestId, reason: FinishReason) -> Request | None:
        """End a request from outside (abort, error). None if it has ended already or never existed."""
        request = self._requests.get(request_id)
        if request is not None:
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                self._waiting[request.priority_level].remove(request)
            self._end(request, reason)
        return request

    def plan_step(self, now_s: float) -> StepPlan:
        """Choose what the next step computes; a plan without slices means there is nothing to do.

        Called once for each step, after the outcome of the step before was committed.
        """
        self._promote(now_s)
        for restored in self._host.take_restored():
            restored.move_to(RequestStatus.RUNNING)
            self._running[restored.request_id] = restored
        by_level: dict[PriorityLevel, list[Request]] = {level: [] for level in PriorityLevel}
        for each in self._running.values():
            if each.request_id not in self._suspended:
                by_level[each.priority_level].append(each)
        view = self._view(by_level, now_s)
        self._host.allow_copies(self._most_copies(view))
        if self._suspension is not None and self._suspended:
            resumption = self._suspension.resume(self.policy.resume_s(view))
            if resumption is not None:
                return self._next_plan(
                    slices=resumption.slices,
                    predicted_s=resumption.predicted_s,
                    safepoints=resumption.safepoints,
                    resumes=True,
                    max_layers=resumption.num_layers,
                )
        budgets = self.policy.next_budgets(view)
        batch = Batch(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        admitted: list[AdmittedRequest] = []
        preempted_any = False
        for index, budget in enumerate(budgets):
            if budget.only_if_empty and batch.members:
                continue
            if batch.num_prefill_tokens and not budget.mixes_with_prefill:
                continue
            running = [request for level in budget.levels for request in by_level[level]]
            preempted_any |= self._schedule_running(budget, running, batch)
            if budget.may_preempt or not preempted_any:
                later = {level for after in budgets[index + 1 :] for level in after.levels}
                admitted += self._schedule_waiting(budget, later, batch, now_s)
        predicted_s = 0.0 if self.cost is None else self.cost.step_time_s(batch.load)
        return self._next_plan(
            admitted=tuple(admitted),
            slices=tuple(self._slice_of(request, n) for request, n in batch.members.values()),
            predicted_s=predicted_s,
            safepoints=None if self._suspension is None else self._suspension.safepoints(batch, predicted_s),
            keeps_suspended=bool(self._suspended),
        )

    def commit(self, plan: StepPlan, outcome: StepOutcome, now_s: float) -> list[CommittedToken]:
        """Enter the outcome of ``plan`` into the requests. What was stopped in it is as it was before."""
        self.blocks.complete(outcome.completed_copies)
        stopped = set(outcome.stopped)
        if self._suspension is not None:
            self._suspension.commit(plan, outcome)
        for scheduled in plan.slices:
            if scheduled.request_id in stopped:
                continue
            request = self._requests[scheduled.request_id]
            counters = self.counters[request.service_class]
            counters.num_computed_tokens += scheduled.num_tokens
            end = request.num_computed_tokens = scheduled.start + scheduled.num_tokens
            if end // self.blocks.block_size > scheduled.start // self.blocks.block_size:
                self._host.add_candidate(request)
            known = request.num_ever_computed_tokens
            if scheduled.start < known:
                counters.num_recomputed_tokens += min(known, end) - scheduled.start
            if end > known:
                request.num_ever_computed_tokens = end
        committed = []
        for sampled in outcome.sampled:
            request = self._requests[sampled.request_id]
            request.append(sampled.token_id)
            request.last_token_at_s = now_s
            reason, stop_token_id = self._finish_reason(request, sampled.token_id)
            if reason is not None:
                self._end(request, reason)
            committed.append(CommittedToken(request, sampled, stop_token_id))
        return committed

    def fail(self, plan: StepPlan) -> list[Request]:
        """The executor raised in ``plan``: nothing it computed counts.

        Requests of the step without output tokens are preempted to run once more; the others end with ERROR.
        It is not known which requests the executor took in before it raised, so it is told anew of those that
        go on. That tells it of their prompts only: hence none with output tokens, and no KV is kept.

        Returns: the requests that ended.
        """
        for admitted in plan.admitted:
            self._release(admitted.request_id)
        ended = []
        for scheduled in plan.slices:
            request = self._requests[scheduled.request_id]
            if request.output_token_ids or request.was_retried:
                self._end(request, FinishReason.ERROR)
                ended.append(request)
            else:
                request.was_retried = True
                self._release(request.request_id)
                self._preempt(request, None)
        return ended

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, queues and requests disagree."""
        self.blocks.check_integrity()
        restoring = {request.request_id for request in self._host.restoring}
        assert len(self._running) + len(restoring) + self.num_waiting == len(self._requests)
        num_online = sum(each.service_class is ServiceClass.ONLINE for each in self._requests.values())
        assert num_online == self._num_online, f"{num_online} are online, {self._num_online} were counted"
        for request in self._requests.values():
            request_id, status = request.request_id, request.status
            held = self.blocks.num_held_blocks(request_id)
            is_running, is_restoring = request_id in self._running, request_id in restoring
            assert (status is RequestStatus.RUNNING) == is_running, f"{request_id} is misplaced"
            assert (status is RequestStatus.RESTORING) == is_restoring, f"{request_id} is misplaced"
            is_on_device = status in (RequestStatus.RUNNING, RequestStatus.RESTORING)
            assert is_on_device or held == 0, f"{request_id} waits and holds {held} blocks"
            assert 0 <= request.num_computed_tokens <= request.num_tokens
            if status is not RequestStatus.RUNNING:
                held = self.blocks.num_host_blocks_of(request_id)
                assert bool(held) == (self._host.has_host_copy(request) or request_id in restoring)
            assert held * self.blocks.block_size >= request.num_computed_tokens
        assert all(each in self._running for each in self._suspended), "a suspended slice has no blocks"
        held_in_all = (
            self.blocks.num_blocks - self.blocks.num_free_blocks - self.blocks.num_unreferenced_blocks
        )
        held_by_known = sum(self.blocks.num_held_blocks(request_id) for request_id in self._requests)
        assert held_in_all == held_by_known, f"{held_in_all - held_by_known} blocks belong to no request"

    def _promote(self, now_s: float) -> None:
        """Raise the offline requests whose time has come to the priority level above."""
        while self._to_promote and self._to_promote[0][0] <= now_s:
            request = heapq.heappop(self._to_promote)[2]
            if request.status is RequestStatus.FINISHED:
                continue
            is_waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            if is_waiting:
                self._waiting[request.priority_level].remove(request)
            request.priority_level = PriorityLevel.PROMOTED
            if is_waiting:
                self._waiting[request.priority_level].push(request)

    def _next_plan(self, *, slices: tuple[ScheduledSlice, ...], **fields: Any) -> StepPlan:
        self._host.continue_restores()
        self._host.start_checkpoints()
        checkpoint, restore = self.blocks.take_copies()
        plan = StepPlan(
            step=self._num_plans,
            slices=slices,
            released=tuple(self._to_release),
            checkpoint=checkpoint,
            restore=restore,
            blocking_copies=self.blocks.blocking,
            is_idle_until_copy=not slices and self.blocks.num_copies_under_way > 0,
            **{"admitted": (), **fields},
        )
        self._to_release.clear()
        self._num_plans += 1
        return plan

    def _drop_suspended(self, request_id: RequestId) -> None:
        if self._suspension is not None:
            self._suspension.drop(request_id)

    def _count_lost(self, request_id: RequestId, num_tokens: float) -> None:
        self.counters[self._requests[request_id].service_class].num_discarded_tokens += num_tokens

    def _view(self, by_level: dict[PriorityLevel, list[Request]], now_s: float) -> StepView:
        restoring = tuple(self._host.restoring)
        online = [
            *by_level[PriorityLevel.ONLINE],
            *(each for each in restoring if each.priority_level is PriorityLevel.ONLINE),
        ]
        return StepView(
            now_s=now_s,
            running=by_level,
            waiting={level: queue.requests for level, queue in self._waiting.items()},
            num_blocks=self.blocks.num_blocks,
            online_blocks=sum(self.blocks.num_held_blocks(each.request_id) for each in online),
            suspended_s=0.0 if self._suspension is None else self._suspension.left_s(),
            restoring=restoring,
            reclaimable_blocks=self._num_reclaimable(online),
        )

    def _num_reclaimable(self, online: list[Request]) -> int:
        blocks = self.blocks
        if not blocks.num_checkpointed_blocks:
            return 0
        of_online = sum(blocks.num_host_blocks_of(request.request_id) for request in online)
        return max(0, blocks.num_checkpointed_blocks - blocks.num_copies_under_way - of_online)

    def _most_copies(self, view: StepView) -> int:
        """Copies that may be under way at once: what the policy has time for."""
        if self._block_copy_s is None:
            return _MOST_UNTIMED_COPIES
        return max(1, int(self.policy.copy_s(view) / self._block_copy_s))

    def _schedule_running(self, budget: StepBudget, running: list[Request], batch: Batch) -> bool:
        """Schedule the budget's running requests; True if one was preempted for blocks."""
        running.sort(key=_ORDER_KEY)
        preempted_any = False
        decodes = [request for request in running if request.is_decoding]
        prefills = [request for request in running if not request.is_decoding]
        for request in decodes:
            if request.status is RequestStatus.RUNNING and batch.has_headroom:
                preempted_any |= self._grow(request, 1, batch)
        self._trim(budget, decodes, batch)
        for request in prefills:
            if request.status is RequestStatus.RUNNING and batch.has_headroom:
                num_tokens = self._prefill_tokens(request, budget, batch)
                if num_tokens:
                    preempted_any |= self._grow(request, num_tokens, batch)
        return preempted_any

    def _trim(self, budget: StepBudget, decodes: list[Request], batch: Batch) -> None:
        """Take the budget's least urgent decodes out again while the step is over its time."""
        if budget.max_step_s < math.inf and not budget.guarantees_progress:
            assert self.cost is not None
            while (
                decodes and len(batch.members) > 1 and self.cost.step_time_s(batch.load) > budget.max_step_s
            ):
                batch.drop(decodes.pop())

    def _grow(self, request: Request, num_tokens: int, batch: Batch) -> bool:
        """Put the request in with the blocks it needs, preempting for them; True if any was preempted."""
        needed = request.num_computed_tokens + num_tokens
        missing = self.blocks.num_missing_blocks(request.request_id, needed)
        preempted_any = False
        while missing > self.blocks.num_free_blocks:
            victim = max((*self._running.values(), *self._host.restoring), key=self._preemption_key)
            soon_free = self.blocks.num_free_blocks + self.blocks.num_unreferenced_blocks
            if missing <= soon_free and (
                request.priority_level is not PriorityLevel.ONLINE
                or victim.priority_level is PriorityLevel.ONLINE
            ):
                return preempted_any  # copies are about to free enough: the request waits for them
            batch.drop(victim)
            self._preempt(victim, missing - self.blocks.num_free_blocks)
            preempted_any = True
            if victim is request:
                return True
        if missing:
            self.blocks.grow(request.request_id, needed)
        batch.put(request, num_tokens)
        return preempted_any

    def _schedule_waiting(
        self, budget: StepBudget, later: set[PriorityLevel], batch: Batch, now_s: float
    ) -> list[AdmittedRequest]:
        """Schedule waiting requests while their known tokens fit beside what running ones need next.

        That is the blocks for the rest of their prompts and one block each to grow into, so that an
        admission does not cause a preemption in the next steps. What a displacing budget may take from later
        budgets does not count as needed.
        """
        admitted: list[AdmittedRequest] = []
        queues = [self._waiting[level] for level in budget.levels if len(self._waiting[level])]
        if not queues:
            return admitted
        preemptible = later if budget.may_preempt else set()
        if not preemptible and all(self._is_too_large(queue) for queue in queues):
            return admitted  # the common case where memory is full, before anything is summed
        holders = (*self._running.values(), *self._host.restoring)
        kept = [request for request in holders if request.priority_level not in preemptible]
        promised = sum(map(self._blocks_needed_next, kept))
        num_kept = len(kept)
        while num_kept < self.config.max_num_seqs:
            queue = min((q for q in queues if len(q)), key=RequestQueue.head_key, default=None)
            request = None if queue is None else queue.peek()
            if queue is None or request is None:
                break
            is_restored = self._host.has_host_copy(request)
            if is_restored and not self._host.can_begin_restore(request):
                break
            num_tokens = self._prefill_tokens(request, budget, batch)
            reserved = promised + (budget.reserved_blocks if self._running else 0)
            needed = self.blocks.blocks_for(request.num_tokens)
            takes_part = not is_restored or CopyDirections.RESTORE in self.blocks.blocking
            if (num_tokens == 0 and takes_part) or not self._free_up(needed + reserved, preemptible, batch):
                break
            queue.pop()
            num_kept += 1
            if is_restored and not self._host.begin_restore(request):
                request.move_to(RequestStatus.RESTORING)
                promised += self._blocks_needed_next(request)
                continue
            request.move_to(RequestStatus.RUNNING)
            if request.first_scheduled_at_s is None:
                request.first_scheduled_at_s = now_s
            self._running[request.request_id] = request
            self.blocks.grow(request.request_id, request.num_computed_tokens + num_tokens)
            promised += self._blocks_needed_next(request)
            batch.put(request, num_tokens)
            if request.request_id not in self._known_to_executor:
                self._known_to_executor.add(request.request_id)
                admitted.append(
                    AdmittedRequest(request.request_id, tuple(request.prompt_token_ids), request.sampling)
                )
        return admitted

    def _is_too_large(self, queue: RequestQueue) -> bool:
        head = queue.peek()
        return head is not None and self.blocks.blocks_for(head.num_tokens) > self.blocks.num_free_blocks

    def _free_up(self, num_needed: int, preemptible: set[PriorityLevel], batch: Batch) -> bool:
        """Whether ``num_needed`` blocks are free, preempting the given levels if that suffices."""
        if num_needed <= self.blocks.num_free_blocks:
            return True
        holders = (*self._running.values(), *self._host.restoring)
        victims = [request for request in holders if request.priority_level in preemptible]
        at_once = sum(self.blocks.num_idle_blocks(request.request_id) for request in victims)
        if num_needed > self.blocks.num_free_blocks + at_once:
            return False
        victims.sort(key=self._preemption_key)
        while victims and num_needed > self.blocks.num_free_blocks:
            victim = victims.pop()
            batch.drop(victim)
            self._preempt(victim, num_needed - self.blocks.num_free_blocks)
        return num_needed <= self.blocks.num_free_blocks

    def _preemption_key(self, request: Request) -> Any:
        lost = 0.0
        if request.status is RequestStatus.RUNNING:
            lost += self._host.lost_tokens(request)
            if self._suspension is not None:
                lost += self._suspension.lost_tokens(request.request_id)
        return self.policy.preemption_key(request, lost)

    def _blocks_needed_next(self, request: Request) -> int:
        return 1 + self.blocks.num_missing_blocks(request.request_id, request.num_tokens)

    def _prefill_tokens(self, request: Request, budget: StepBudget, batch: Batch) -> int:
        """Tokens of a prompt, or of what is recomputed of a request, that the step has room and time for."""
        if not batch.has_headroom:
            return 0
        pending = request.num_pending_tokens
        most = min(pending, self.config.max_prefill_chunk_tokens, batch.num_tokens_left)
        least = min(most, budget.min_chunk_tokens)
        if budget.step_sizes:
            least_size = batch.load.num_tokens - batch.num_prefill_tokens + budget.step_sizes[0] // 2
            index = min(bisect_left(budget.step_sizes, least_size), len(budget.step_sizes) - 1)
            most = min(most, max(0, budget.step_sizes[index] - batch.load.num_tokens))
        if budget.max_step_s < math.inf:
            assert self.cost is not None
            most = self.cost.max_tokens(
                batch.load, request.num_computed_tokens, pending, budget.max_step_s, most
            )
        if most >= least:
            return most
        is_owed = not batch.members or (budget.guarantees_progress and not batch.num_prefill_tokens)
        return least if is_owed else 0

    def _slice_of(self, request: Request, num_tokens: int) -> ScheduledSlice:
        return ScheduledSlice(
            request_id=request.request_id,
            start=request.num_computed_tokens,
            num_tokens=num_tokens,
            blocks=self.blocks.table(request.request_id),
            samples=num_tokens == request.num_pending_tokens,
            preemptible=request.priority_level is not PriorityLevel.ONLINE,
        )

    def _preempt(self, request: Request, needed: int | None) -> None:
        """Take the request's blocks, ``needed`` of them at once, and queue it again; its tokens are kept.

        None needs none, and keeps nothing of its KV.
        """
        if request.status is RequestStatus.RESTORING:
            self._host.cancel_restore(request)
        else:
            self.counters[request.service_class].num_preemptions += 1
            request.num_preemptions += 1
            self._drop_suspended(request.request_id)
            del self._running[request.request_id]
            if needed is None:
                self._host.forget(request.request_id)
                request.num_computed_tokens = 0
            else:
                self._host.reclaim(request, needed, self._running.values())
        request.move_to(RequestStatus.PREEMPTED)
        self._waiting[request.priority_level].push(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request_id = request.request_id
        self._drop_suspended(request_id)
        self._host.forget(request_id)
        self._running.pop(request_id, None)
        del self._requests[request_id]
        self._num_online -= request.service_class is ServiceClass.ONLINE
        self._release(request_id)
        request.finish(reason)

    def _release(self, request_id: RequestId) -> None:
        """Let the next plan tell the executor to drop the request's state, if it may have any."""
        if request_id in self._known_to_executor:
            self._known_to_executor.remove(request_id)
            self._to_release.append(request_id)

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
