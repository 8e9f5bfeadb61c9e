"""Plans each step: fills the budgets of the policy, or resumes the suspended step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice

from backfill.core.config import SchedulerConfig
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    CopyDirections,
    ScheduledSlice,
    StepPlan,
    WaitForCopies,
    Work,
)
from backfill.core.request import PriorityLevel, Request, RequestId, RequestStatus
from backfill.costs.model import CostModel
from backfill.kvcache.content import BlockKey, Evictable, Match
from backfill.kvcache.manager import KVCacheManager
from backfill.scheduling.batch import Batch
from backfill.scheduling.policy import MIN_PREFILL_CHUNK_TOKENS, Policy, StepBudget, StepView
from backfill.scheduling.preemption import Preemption
from backfill.scheduling.queues import UnfinishedRequests, order_key
from backfill.scheduling.suspension import Suspension

_MAX_UNTIMED_COPIES = 64  # in flight at once where the time of a copy is not known
# Waiting requests that a step passes over because another one in it computes their next block: in all, and
# of those that were not looked up before, for which keys must be made.
_MAX_CANDIDATES = 1024
_MAX_LOOKED_UP = 64
# Steps that a request waits in vain for others to compute its next blocks, before it computes them too.
_MAX_PREFIX_WAITS = 32


@dataclass(slots=True, eq=False)
class StepPlanner:
    """Decides which requests compute which tokens in a step.

    Within a budget, running requests come first, decodes before prefills: a decode costs one token, and its
    user is reading. Then waiting requests join, the most urgent first, until the step's tokens or time, the
    limit on requests or the blocks run out. When a running request lacks a block, the policy's victim is
    preempted: its KV stays in the cache until its blocks are needed, and it finds there later what is left.

    A prompt whose next block is computed in the same step, by a request of its level or a more urgent one,
    waits for the next step, where it finds the block in the cache.

    A request for which the step has no time or no headroom keeps its blocks and waits. Every request fits the
    pool alone, and the first slice of a step has no time limit, so every step with a request that the policy
    serves makes progress.

    Args:
        cost: predicts steps for policies that bound their time; None for policies that do not.
        block_copy_s: seconds that a copy of one block between device and host takes; None if not known.
    """

    config: SchedulerConfig
    kv: KVCacheManager
    policy: Policy
    requests: UnfinishedRequests
    suspension: Suspension
    preemption: Preemption
    cost: CostModel | None
    block_copy_s: float | None
    _known_to_executor: set[RequestId] = field(init=False, default_factory=set)
    _to_admit: dict[RequestId, Request] = field(init=False, default_factory=dict)
    _to_release: list[RequestId] = field(init=False, default_factory=list)
    # The blocks that this step computes, each with the most urgent request that does, and the indices where
    # its prompts begin.
    _in_step: dict[BlockKey, Request] = field(init=False, default_factory=dict)
    _starts: set[int] = field(init=False, default_factory=set)
    _num_plans: int = field(init=False, default=0)
    _now_s: float = field(init=False, default=0.0)

    @property
    def has_releases(self) -> bool:
        """The executor has state that the next plan releases."""
        return bool(self._to_release)

    def release(self, request_id: RequestId) -> None:
        """Let the next plan tell the executor to drop the request's state, if it may have any."""
        self._to_admit.pop(request_id, None)
        if request_id in self._known_to_executor:
            self._known_to_executor.remove(request_id)
            self._to_release.append(request_id)

    def plan(self, now_s: float) -> StepPlan:
        """See ``Scheduler.plan_step``."""
        self.requests.promote(now_s)
        self.kv.advance(now_s)
        for request in [each for each in self.requests.restoring.values() if self.kv.is_restored(each)]:
            self._run(request)
        running = self.requests.running_by_level(excluded=self.suspension.requests)
        view = self._view(running, now_s)
        self.kv.max_copies = self._max_copies(view)
        if self.suspension.requests:
            resumed = self.suspension.resume(self.policy.resume_s(view))
            if resumed is not None:
                return self._plan_of(resumed)
        batch = Batch(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self._now_s = now_s
        budgets = self.policy.next_budgets(view)
        self._fill(batch, budgets, running)
        if batch.has_preempted and not batch.members:  # others may run in its place
            batch = Batch(self.config.max_num_seqs, self.config.max_num_batched_tokens)
            self._fill(batch, budgets, self.requests.running_by_level(excluded=self.suspension.requests))
        predicted_s = 0.0 if self.cost is None else self.cost.step_time_s(batch.load)
        work = Compute(
            self._slices_of(batch),
            predicted_s,
            self.suspension.safepoints(batch, predicted_s),
            keeps_suspended=bool(self.suspension.requests),
        )
        return self._plan_of(work, self._take_admitted(batch))

    def _run(self, request: Request) -> None:
        """The request takes part in steps from now on."""
        self.requests.run(request)
        self.kv.start(request)
        if request.request_id not in self._known_to_executor:
            self._to_admit[request.request_id] = request

    def _take_admitted(self, batch: Batch) -> tuple[AdmittedRequest, ...]:
        """Requests of the batch that are new to the executor."""
        admitted = [each for each in self._to_admit.values() if each.request_id in batch.members]
        for request in admitted:
            del self._to_admit[request.request_id]
            self._known_to_executor.add(request.request_id)
        return tuple(
            AdmittedRequest(each.request_id, tuple(each.prompt_token_ids), each.sampling) for each in admitted
        )

    def _fill(
        self, batch: Batch, budgets: Sequence[StepBudget], running: dict[PriorityLevel, list[Request]]
    ) -> None:
        """Fill the batch budget by budget."""
        self._in_step.clear()
        self._starts.clear()
        for index, budget in enumerate(budgets):
            if budget.only_if_empty and batch.members:
                continue
            if batch.num_prefill_tokens and not budget.mixes_with_prefill:
                continue
            of_budget = [request for level in budget.levels for request in running[level]]
            self._schedule_running(budget, of_budget, batch)
            if budget.may_preempt or not batch.has_preempted:
                later = {level for after in budgets[index + 1 :] for level in after.levels}
                self._schedule_waiting(budget, later, batch)

    def _plan_of(self, work: Work, admitted: tuple[AdmittedRequest, ...] = ()) -> StepPlan:
        """The next plan: this work, or a wait for copies in its place if it has no slices."""
        checkpoint, restore = self.kv.take_copies()
        if isinstance(work, Compute) and not work.slices and self.kv.num_copies_in_flight:
            work = WaitForCopies(work.keeps_suspended)
        plan = StepPlan(
            step=self._num_plans,
            work=work,
            admitted=admitted,
            released=tuple(self._to_release),
            copies=BlockCopies(checkpoint, restore, self.kv.blocking),
        )
        self._to_release.clear()
        self._num_plans += 1
        return plan

    def _view(self, running: dict[PriorityLevel, list[Request]], now_s: float) -> StepView:
        kv = self.kv
        online = [
            *running[PriorityLevel.ONLINE],
            *(
                each
                for each in self.requests.restoring.values()
                if each.priority_level is PriorityLevel.ONLINE
            ),
        ]
        return StepView(
            now_s=now_s,
            online=online,
            waiting={level: queue.requests for level, queue in self.requests.waiting.items()},
            num_blocks=kv.num_blocks,
            online_blocks=kv.num_online_blocks,
            suspended_s=self.suspension.left_s(),
            reclaimable_blocks=kv.num_reclaimable_blocks + kv.num_protected_blocks,
        )

    def _max_copies(self, view: StepView) -> int:
        """Copies that may be in flight at once: as many as the policy has time for."""
        if self.block_copy_s is None:
            return _MAX_UNTIMED_COPIES
        return max(1, int(self.policy.copy_s(view) / self.block_copy_s))

    def _schedule_running(self, budget: StepBudget, running: list[Request], batch: Batch) -> None:
        running.sort(key=order_key)
        decodes = [request for request in running if request.is_decoding]
        prefills = [] if len(decodes) == len(running) else [each for each in running if not each.is_decoding]
        self._schedule_decodes(decodes, batch)
        self._trim(budget, decodes, batch)
        for request in prefills:
            if request.status is RequestStatus.RUNNING and batch.has_headroom:
                self.kv.match_more(request)
                if not self._waits_for_next_block(request, batch):
                    num_tokens = self._prefill_tokens(request, budget, batch)
                    if num_tokens:
                        self._schedule(request, num_tokens, batch)

    def _schedule_decodes(self, decodes: list[Request], batch: Batch) -> None:
        size, has_headroom = self.kv.block_size, batch.has_headroom_for(len(decodes))
        for request in decodes:
            # Where all of them fit, those whose last block has a slot follow together.
            if has_headroom and request.num_computed_tokens % size:
                continue
            if request.status is RequestStatus.RUNNING and batch.has_headroom:
                self._schedule(request, 1, batch)
        if has_headroom:
            running = RequestStatus.RUNNING  # and not preempted for a block of another one
            batch.add_decodes(
                [each for each in decodes if each.num_computed_tokens % size and each.status is running]
            )

    def _trim(self, budget: StepBudget, decodes: list[Request], batch: Batch) -> None:
        """Remove the budget's least urgent decodes again while the step is over its time."""
        if budget.max_step_s < math.inf and not budget.guarantees_progress:
            assert self.cost is not None
            while (
                decodes and len(batch.members) > 1 and self.cost.step_time_s(batch.load) > budget.max_step_s
            ):
                batch.remove(decodes.pop())

    def _schedule(self, request: Request, num_tokens: int, batch: Batch) -> None:
        """Add a running request and allocate its blocks, preempting for them."""
        needed = request.num_computed_tokens + num_tokens
        missing = self.kv.num_missing_blocks(request.request_id, needed)
        if missing:
            may_evict = self.preemption.make_room(request, missing, batch)
            if may_evict is None:
                return
            self.kv.grow(request, needed, may_evict)
        self._add(request, num_tokens, batch)

    def _add(self, request: Request, num_tokens: int, batch: Batch) -> None:
        batch.add(request, num_tokens)
        if num_tokens >= self.kv.block_size:
            start, level = request.num_computed_tokens, request.priority_level.value
            self._starts.add(start // self.kv.block_size)
            for key in self.kv.keys_of(request, start, start + num_tokens):
                known = self._in_step.get(key)
                if known is None or level < known.priority_level.value:
                    self._in_step[key] = request

    def _waits_for_prefix(self, request: Request, index: int, batch: Batch) -> bool:
        """Whether another request computes this one's block in this step; the next step then finds it.

        A request never waits for one that is less urgent. It waits a bounded number of steps beyond those
        that found it a block: who is waited for may be stopped.
        """
        key = self.kv.key_of(request.request_id, index)
        other = None if key is None else self._in_step.get(key)
        if other is None or other.priority_level.value > request.priority_level.value:
            return False
        if other.request_id not in batch.members:  # it was preempted meanwhile
            return False
        request.num_prefix_waits += 1
        return request.num_prefix_waits <= _MAX_PREFIX_WAITS + index

    def _waits_for_next_block(self, request: Request, batch: Batch) -> bool:
        index, offset = divmod(request.num_computed_tokens, self.kv.block_size)
        return not offset and self._waits_for_prefix(request, index, batch)

    def _schedule_waiting(self, budget: StepBudget, later: set[PriorityLevel], batch: Batch) -> None:
        """Schedule waiting requests while their known tokens fit beside what running ones need next.

        That is the blocks for the rest of their prompts and one more block each, so that an admission does
        not cause a preemption in the next steps. Requests that this budget may preempt do not count.
        """
        preemptible = later if budget.may_preempt else set()
        kept: list[Request] | None = None
        promised = num_looked_up = 0
        for request in self._candidates(budget):
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                continue  # preempted for another one in this step, and moved within its queue
            if any(self._waits_for_prefix(request, index, batch) for index in self._starts):
                continue  # it has been looked up before, and has all blocks before this one in common
            match = self.kv.match(request)
            request.num_computed_tokens = match.num_tokens
            if kept is None:
                if not preemptible and not self._may_fit(request, match):
                    break  # the common case where memory is full, before anything is summed
                kept = [
                    each for each in self.preemption.block_holders if each.priority_level not in preemptible
                ]
                if len(kept) < self.config.max_num_seqs:
                    promised = sum(map(self._blocks_needed_next, kept))
            if len(kept) >= self.config.max_num_seqs:
                break
            if self._waits_for_next_block(request, batch):
                num_looked_up += 1
                if num_looked_up == _MAX_LOOKED_UP:
                    break
                continue
            takes_part = match.is_on_device or CopyDirections.RESTORE in self.kv.blocking
            num_tokens = self._prefill_tokens(request, budget, batch)
            if not num_tokens and takes_part:
                break
            reserved = promised + (budget.reserved_blocks if self.requests.running else 0)
            room = self.preemption.make_room_for_waiting(request, match, reserved, preemptible, batch)
            if room is None:
                break
            self._admit(request, *room, budget, batch)
            kept.append(request)
            promised += self._blocks_needed_next(request)

    def _admit(
        self, request: Request, match: Match, may_evict: Evictable, budget: StepBudget, batch: Batch
    ) -> None:
        """Give a waiting request its blocks; it takes part in this step if all its KV is on the device."""
        self.requests.take(request)
        is_restored = self.kv.allocate(request, match, may_evict)
        if request.first_scheduled_at_s is None:
            request.first_scheduled_at_s = self._now_s
        if not is_restored:
            self.requests.restore(request)
            return
        self._run(request)
        num_tokens = self._prefill_tokens(request, budget, batch)
        if num_tokens:
            self.kv.grow(request, request.num_computed_tokens + num_tokens, may_evict)
            self._add(request, num_tokens, batch)

    def _candidates(self, budget: StepBudget) -> Iterator[Request]:
        """Waiting requests of the budget's levels, the most urgent first."""
        queues = [queue.requests for level in budget.levels if (queue := self.requests.waiting[level])]
        num_most = self.config.max_num_seqs + _MAX_CANDIDATES
        merged = queues[0] if len(queues) == 1 else merge(*queues, key=order_key)
        return iter(list(islice(merged, num_most)))

    def _may_fit(self, request: Request, match: Match) -> bool:
        needed = self.kv.blocks_for(request.num_tokens) - match.num_device_blocks
        return needed <= self.kv.num_available(Evictable.ALL)

    def _blocks_needed_next(self, request: Request) -> int:
        return 1 + self.kv.num_missing_blocks(request.request_id, request.num_tokens)

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
            # Behind another prompt, a chunk ends with a block: the next one can then begin with what the
            # other one, which may have the same prefix, has computed meanwhile.
            over = (request.num_computed_tokens + most) % self.kv.block_size
            is_behind = batch.num_prefill_tokens > 0 and most < pending
            return most - over if is_behind and most - over >= least else most
        is_guaranteed = not batch.members or (budget.guarantees_progress and not batch.num_prefill_tokens)
        return least if is_guaranteed else 0

    def _slices_of(self, batch: Batch) -> tuple[ScheduledSlice, ...]:
        table, online = self.kv.table, PriorityLevel.ONLINE
        return tuple(
            [
                ScheduledSlice(
                    request.request_id,
                    request.num_computed_tokens,
                    num_tokens,
                    table(request.request_id),
                    request.num_computed_tokens + num_tokens == request.num_tokens,  # samples
                    request.priority_level is not online,  # preemptible
                )
                for request, num_tokens in batch.members.values()
            ]
        )
