"""Plans each step: fills the budgets of the policy, or resumes the suspended step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from backfill.core.config import SchedulerConfig
from backfill.core.plan import AdmittedRequest, CopyDirections, Safepoints, ScheduledSlice, StepPlan
from backfill.core.request import PriorityLevel, Request, RequestId, RequestStatus
from backfill.costs.model import CostModel
from backfill.kvcache.block_manager import BlockManager
from backfill.kvcache.host_tier import HostTier
from backfill.scheduling.batch import Batch
from backfill.scheduling.policy import MIN_PREFILL_CHUNK_TOKENS, Policy, StepBudget, StepView
from backfill.scheduling.preemption import Preemption
from backfill.scheduling.queues import RequestQueue, UnfinishedRequests, order_key
from backfill.scheduling.suspension import Resumption, Suspension

_MAX_UNTIMED_COPIES = 64  # in flight at once where the time of a copy is not known


@dataclass(slots=True, eq=False)
class StepPlanner:
    """Decides which requests compute which tokens in a step.

    Within a budget, running requests come first, decodes before prefills: a decode costs one token, and its
    user is reading. Then waiting requests join, the most urgent first, until the step's tokens or time, the
    limit on requests or the free blocks run out. When a running request lacks a block, the policy's victim is
    preempted: its blocks are freed, its KV in host memory is restored later, and the rest is recomputed.

    A request for which the step has no time or no headroom keeps its blocks and waits. Every request fits the
    pool alone, and the first slice of a step has no time limit, so every step with a request that the policy
    serves makes progress.

    Args:
        cost: predicts steps for policies that bound their time; None for policies that do not.
        block_copy_s: seconds that a copy of one block between device and host takes; None if not known.
    """

    config: SchedulerConfig
    blocks: BlockManager
    policy: Policy
    requests: UnfinishedRequests
    host: HostTier
    suspension: Suspension
    preemption: Preemption
    cost: CostModel | None
    block_copy_s: float | None
    _known_to_executor: set[RequestId] = field(init=False, default_factory=set)
    _to_release: list[RequestId] = field(init=False, default_factory=list)
    _num_plans: int = field(init=False, default=0)

    @property
    def has_releases(self) -> bool:
        """The executor has state that the next plan releases."""
        return bool(self._to_release)

    def release(self, request_id: RequestId) -> None:
        """Let the next plan tell the executor to drop the request's state, if it may have any."""
        if request_id in self._known_to_executor:
            self._known_to_executor.remove(request_id)
            self._to_release.append(request_id)

    def plan(self, now_s: float) -> StepPlan:
        """See ``Scheduler.plan_step``."""
        self.requests.promote(now_s)
        for restored in self.host.take_restored():
            self.requests.run(restored)
        running = self.requests.running_by_level(excluded=self.suspension.requests)
        view = self._view(running, now_s)
        self.host.limit_copies(self._max_copies(view))
        if self.suspension.requests:
            resumed = self.suspension.resume(self.policy.resume_s(view))
            if resumed is not None:
                return self._plan_of(resumed.slices, resumed.predicted_s, resumed.safepoints, resumed=resumed)
        batch = Batch(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        admitted = self._fill(batch, self.policy.next_budgets(view), running, now_s)
        predicted_s = 0.0 if self.cost is None else self.cost.step_time_s(batch.load)
        return self._plan_of(
            tuple(self._slice_of(request, num_tokens) for request, num_tokens in batch.members.values()),
            predicted_s,
            self.suspension.safepoints(batch, predicted_s),
            tuple(admitted),
        )

    def _fill(
        self,
        batch: Batch,
        budgets: Sequence[StepBudget],
        running: dict[PriorityLevel, list[Request]],
        now_s: float,
    ) -> list[AdmittedRequest]:
        """Fill the batch budget by budget; returns the requests that are new to the executor."""
        admitted: list[AdmittedRequest] = []
        preempted_any = False
        for index, budget in enumerate(budgets):
            if budget.only_if_empty and batch.members:
                continue
            if batch.num_prefill_tokens and not budget.mixes_with_prefill:
                continue
            of_budget = [request for level in budget.levels for request in running[level]]
            preempted_any |= self._schedule_running(budget, of_budget, batch)
            if budget.may_preempt or not preempted_any:
                later = {level for after in budgets[index + 1 :] for level in after.levels}
                admitted += self._schedule_waiting(budget, later, batch, now_s)
        return admitted

    def _plan_of(
        self,
        slices: tuple[ScheduledSlice, ...],
        predicted_s: float,
        safepoints: Safepoints | None,
        admitted: tuple[AdmittedRequest, ...] = (),
        resumed: Resumption | None = None,
    ) -> StepPlan:
        """The next plan: these slices, and the copies that begin beside them."""
        self.host.continue_restores()
        self.host.start_checkpoints()
        checkpoint, restore = self.blocks.take_copies()
        plan = StepPlan(
            step=self._num_plans,
            admitted=admitted,
            slices=slices,
            released=tuple(self._to_release),
            predicted_s=predicted_s,
            safepoints=safepoints,
            resumes=resumed is not None,
            max_layers=None if resumed is None else resumed.num_layers,
            keeps_suspended=resumed is None and bool(self.suspension.requests),
            checkpoint=checkpoint,
            restore=restore,
            blocking_copies=self.blocks.blocking,
            is_idle_until_copy=not slices and self.blocks.num_copies_in_flight > 0,
        )
        self._to_release.clear()
        self._num_plans += 1
        return plan

    def _view(self, running: dict[PriorityLevel, list[Request]], now_s: float) -> StepView:
        blocks = self.blocks
        online = [
            *running[PriorityLevel.ONLINE],
            *(each for each in self.host.restoring if each.priority_level is PriorityLevel.ONLINE),
        ]
        return StepView(
            now_s=now_s,
            online=online,
            waiting={level: queue.requests for level, queue in self.requests.waiting.items()},
            num_blocks=blocks.num_blocks,
            online_blocks=sum(blocks.num_held_blocks(each.request_id) for each in online),
            suspended_s=self.suspension.left_s(),
            reclaimable_blocks=self._num_reclaimable(online),
        )

    def _num_reclaimable(self, online: list[Request]) -> int:
        blocks = self.blocks
        if not blocks.num_checkpointed_blocks:
            return 0
        of_online = sum(blocks.num_host_blocks_of(request.request_id) for request in online)
        return max(0, blocks.num_checkpointed_blocks - blocks.num_copies_in_flight - of_online)

    def _max_copies(self, view: StepView) -> int:
        """Copies that may be in flight at once: as many as the policy has time for."""
        if self.block_copy_s is None:
            return _MAX_UNTIMED_COPIES
        return max(1, int(self.policy.copy_s(view) / self.block_copy_s))

    def _schedule_running(self, budget: StepBudget, running: list[Request], batch: Batch) -> bool:
        """Schedule the budget's running requests; True if one was preempted for blocks."""
        running.sort(key=order_key)
        preempted_any = False
        decodes = [request for request in running if request.is_decoding]
        prefills = [request for request in running if not request.is_decoding]
        for request in decodes:
            if request.status is RequestStatus.RUNNING and batch.has_headroom:
                preempted_any |= self._schedule(request, 1, batch)
        self._trim(budget, decodes, batch)
        for request in prefills:
            if request.status is RequestStatus.RUNNING and batch.has_headroom:
                num_tokens = self._prefill_tokens(request, budget, batch)
                if num_tokens:
                    preempted_any |= self._schedule(request, num_tokens, batch)
        return preempted_any

    def _trim(self, budget: StepBudget, decodes: list[Request], batch: Batch) -> None:
        """Remove the budget's least urgent decodes again while the step is over its time."""
        if budget.max_step_s < math.inf and not budget.guarantees_progress:
            assert self.cost is not None
            while (
                decodes and len(batch.members) > 1 and self.cost.step_time_s(batch.load) > budget.max_step_s
            ):
                batch.remove(decodes.pop())

    def _schedule(self, request: Request, num_tokens: int, batch: Batch) -> bool:
        """Add a running request and allocate its blocks, preempting for them; True if any was preempted."""
        blocks = self.blocks
        needed = request.num_computed_tokens + num_tokens
        missing = blocks.num_missing_blocks(request.request_id, needed)
        preempted_any = False
        while missing > blocks.num_free_blocks:
            victim = max(self.preemption.block_holders, key=self.preemption.key)
            if missing <= blocks.num_free_blocks + blocks.num_unreferenced_blocks and (
                request.priority_level is not PriorityLevel.ONLINE
                or victim.priority_level is PriorityLevel.ONLINE
            ):
                return preempted_any  # copies in flight will free enough: the request waits for them
            self._preempt(victim, missing - blocks.num_free_blocks, batch)
            preempted_any = True
            if victim is request:
                return True
        if missing:
            blocks.grow(request.request_id, needed)
        batch.add(request, num_tokens)
        return preempted_any

    def _schedule_waiting(
        self, budget: StepBudget, later: set[PriorityLevel], batch: Batch, now_s: float
    ) -> list[AdmittedRequest]:
        """Schedule waiting requests while their known tokens fit beside what running ones need next.

        That is the blocks for the rest of their prompts and one more block each, so that an admission does
        not cause a preemption in the next steps. Requests that this budget may preempt do not count.
        """
        admitted: list[AdmittedRequest] = []
        queues = [self.requests.waiting[level] for level in budget.levels if self.requests.waiting[level]]
        if not queues:
            return admitted
        preemptible = later if budget.may_preempt else set()
        if not preemptible and all(self._is_too_large(queue) for queue in queues):
            return admitted  # the common case where memory is full, before anything is summed
        kept = [each for each in self.preemption.block_holders if each.priority_level not in preemptible]
        promised = sum(map(self._blocks_needed_next, kept))
        num_kept = len(kept)
        while num_kept < self.config.max_num_seqs:
            queue = min(filter(len, queues), key=lambda queue: queue.peek().order_key, default=None)
            if queue is None:
                break
            request = queue.peek()
            is_restored = self.host.has_host_copy(request)
            if is_restored and not self.host.can_begin_restore(request):
                break
            num_tokens = self._prefill_tokens(request, budget, batch)
            reserved = promised + (budget.reserved_blocks if self.requests.running else 0)
            needed = self.blocks.blocks_for(request.num_tokens)
            takes_part = not is_restored or CopyDirections.RESTORE in self.blocks.blocking
            if (num_tokens == 0 and takes_part) or not self._free_up(needed + reserved, preemptible, batch):
                break
            queue.pop()
            num_kept += 1
            if is_restored and not self.host.begin_restore(request):
                request.move_to(RequestStatus.RESTORING)
                promised += self._blocks_needed_next(request)
                continue
            self.requests.run(request)
            if request.first_scheduled_at_s is None:
                request.first_scheduled_at_s = now_s
            self.blocks.grow(request.request_id, request.num_computed_tokens + num_tokens)
            promised += self._blocks_needed_next(request)
            batch.add(request, num_tokens)
            if request.request_id not in self._known_to_executor:
                self._known_to_executor.add(request.request_id)
                admitted.append(
                    AdmittedRequest(request.request_id, tuple(request.prompt_token_ids), request.sampling)
                )
        return admitted

    def _is_too_large(self, queue: RequestQueue) -> bool:
        return self.blocks.blocks_for(queue.peek().num_tokens) > self.blocks.num_free_blocks

    def _free_up(self, num_needed: int, preemptible: set[PriorityLevel], batch: Batch) -> bool:
        """Whether ``num_needed`` blocks are free, after preempting the given levels if that suffices."""
        blocks = self.blocks
        if num_needed <= blocks.num_free_blocks:
            return True
        victims = [each for each in self.preemption.block_holders if each.priority_level in preemptible]
        num_freeable = sum(blocks.num_idle_blocks(request.request_id) for request in victims)
        if num_needed > blocks.num_free_blocks + num_freeable:
            return False
        victims.sort(key=self.preemption.key)
        while victims and num_needed > blocks.num_free_blocks:
            self._preempt(victims.pop(), num_needed - blocks.num_free_blocks, batch)
        return num_needed <= blocks.num_free_blocks

    def _preempt(self, victim: Request, num_needed: int, batch: Batch) -> None:
        batch.remove(victim)
        self.preemption.preempt(victim, num_needed)

    def _blocks_needed_next(self, request: Request) -> int:
        return 1 + self.blocks.num_missing_blocks(request.request_id, request.num_tokens)

    def _prefill_tokens(self, request: Request, budget: StepBudget, batch: Batch) -> int:
        """Pending tokens of a request, at most, for which the step has headroom and time; 0 for none."""
        if not batch.has_headroom:
            return 0
        pending = request.num_pending_tokens
        most = min(pending, self.config.max_prefill_chunk_tokens, batch.num_tokens_left)
        least = min(most, MIN_PREFILL_CHUNK_TOKENS)
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
        is_guaranteed = not batch.members or (budget.guarantees_progress and not batch.num_prefill_tokens)
        return least if is_guaranteed else 0

    def _slice_of(self, request: Request, num_tokens: int) -> ScheduledSlice:
        return ScheduledSlice(
            request_id=request.request_id,
            start=request.num_computed_tokens,
            num_tokens=num_tokens,
            blocks=self.blocks.table(request.request_id),
            samples=num_tokens == request.num_pending_tokens,
            preemptible=request.priority_level is not PriorityLevel.ONLINE,
        )
