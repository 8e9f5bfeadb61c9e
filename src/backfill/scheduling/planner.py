"""Plans each step: lets the policy build a batch, or resumes the suspended step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from backfill.core.config import SchedulerConfig
from backfill.core.plan import (
    AdmittedRequest,
    Compute,
    Resume,
    ScheduledSlice,
    StepPlan,
    WaitForCopies,
)
from backfill.core.request import PriorityLevel, Request, RequestId, ServiceClass
from backfill.costs.load import StepLoad
from backfill.kvcache.copies import CopyLimits
from backfill.kvcache.manager import KVCacheManager
from backfill.scheduling.batch import Batch
from backfill.scheduling.builder import StepBuilder
from backfill.scheduling.giving_way import GivingWay
from backfill.scheduling.in_flight import StepsInFlight
from backfill.scheduling.kept_cache import KeptCache
from backfill.scheduling.memory_division import OFFLINE_LEVELS, MemoryChanges, MemoryDivision
from backfill.scheduling.owner_shares import prompts_in_turn
from backfill.scheduling.policy import Policy, RequestView, Snapshot, split
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.preemption import Preemption
from backfill.scheduling.queues import UnfinishedRequests
from backfill.scheduling.suspension import Suspension

_MAX_UNTIMED_COPIES = 64  # in flight at once where the time of a copy is not known
# A step that computes nothing waits for copies. No more begin than the link moves in this time, so that the
# copies of a request that arrives meanwhile do not queue for longer.
_IDLE_STEP_S = 0.05
# For so long, steps leave room for an owner whose last online request has ended.
_SHARED_FOR_S = 10.0
# Waiting requests of one level that a policy sees, beyond those that a step can hold: some are passed over
# because another one in the step computes their next block.
_MAX_PASSED_OVER = 1024
# Each step asks the cache again what it has of so many waiting online prompts, in turn among so many first
# ones, until it has walked so many blocks.
_NUM_LOOKED_UP, _NUM_FIRST, _MAX_WALKED_BLOCKS = 4, 64, 512


@dataclass(slots=True, eq=False)
class StepPlanner:
    """Decides which requests compute which tokens in a step.

    The policy fills the batch (``StepBuilder``). When a running request lacks a block, the policy's victim is
    preempted: its KV stays in the cache until its blocks are needed, and it finds there later what is left.

    A request for which the step has no time or no headroom keeps its blocks and waits. Every request fits the
    pool alone, and the first slice of a step has no time limit, so every step with a request that the policy
    serves makes progress.

    With several steps in flight, a step gets its share of the requests of each priority level. So as many
    batches of about one size are in rotation as there may be steps in flight, and all stages have work.

    Args:
        predictor: predicts steps for policies that bound their time; None for policies that do not.
        block_copy_s: seconds that a copy of one block between device and host takes; None if not known.
        copy_interference: seconds by which a step becomes longer for each second of copying beside it.
        division: divides device memory between weights and KV; None where that does not change.
        in_flight: steps whose outcomes are to come.
    """

    config: SchedulerConfig
    kv: KVCacheManager
    policy: Policy
    requests: UnfinishedRequests
    suspension: Suspension
    preemption: Preemption
    predictor: StepPredictor | None
    block_copy_s: float | None
    copy_interference: float
    division: MemoryDivision | None
    in_flight: StepsInFlight
    _known_to_executor: set[RequestId] = field(init=False, default_factory=set)
    _to_admit: dict[RequestId, Request] = field(init=False, default_factory=dict)
    _to_release: list[RequestId] = field(init=False, default_factory=list)
    _num_plans: int = field(init=False, default=0)
    _num_looked_up: int = field(init=False, default=0)
    _shared_at_s: float = field(init=False, default=-math.inf)  # when several owners last had online ones
    giving: GivingWay = field(init=False, default_factory=GivingWay)
    _kept_cache: KeptCache | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.policy.protects_online_cache and self.predictor is not None:
            self._kept_cache = KeptCache(
                self.config, self.kv, self.requests, self.preemption, self.predictor, self.in_flight
            )

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
        self.requests.change_levels(now_s, self.in_flight.closed)
        if self._kept_cache is not None:
            self._kept_cache.decide(now_s)
        self.kv.advance(now_s)
        if self.division is not None:
            self.division.prepare(now_s)
            if self.division.waits_for_steps:
                return self._plan_of(self._snapshot(now_s), Compute(()))
        for request in [each for each in self.requests.restoring.values() if self.kv.is_restored(each)]:
            self.requests.run(request)
            self.kv.start(request)
            self._on_started(request)
        giving, in_flight, suspended = self.giving, self.in_flight.slices, self.suspension.requests
        giving.advance(now_s, self.requests, in_flight, suspended, self.policy.most_given_s)
        view = self._snapshot(now_s)
        self._look_up_again(view.waiting[PriorityLevel.ONLINE][:_NUM_FIRST])
        if self.suspension.may_resume:
            resumed = self.suspension.resume(self.policy.resume_s(view), giving.stopped)
            if resumed is not None:
                giving.begin({})
                return self._plan_of(view, resumed)
        batch = self._build(view, now_s)
        if batch.has_preempted and not batch.members:  # others may run in its place
            view = self._snapshot(now_s)
            batch = self._build(view, now_s)
        # What was stopped may hold the blocks that others wait for. Without other work nothing frees them.
        waits = not giving.stopped and (self.in_flight or view.restoring)
        if not batch.members and self.suspension.may_resume and not waits:
            resumed = self.suspension.resume(math.inf, giving.stopped)
            if resumed is not None:
                giving.begin({})
                return self._plan_of(view, resumed)
        for request_id in batch.members.keys() & self.suspension.requests:
            self.suspension.discard(request_id)
        giving.begin(batch.members)
        predicted_s = batch.predicted_s
        if self._kept_cache is not None:
            self._kept_cache.observe(batch, predicted_s)
        is_yielding = view.yielding_owner is not None and self._is_mostly_online(batch)
        slices = self._slices_of(batch, view.yielding_owner if is_yielding else None)
        safepoints = self.suspension.safepoints(slices, predicted_s, self.in_flight.num_suspendable_tokens)
        work = Compute(slices, predicted_s, safepoints)
        return self._plan_of(view, work, self._take_admitted(batch))

    def _build(self, view: Snapshot[Request], now_s: float) -> Batch:
        cost = None if self.predictor is None else self.predictor.cost
        builder = StepBuilder(
            self.config,
            self.kv,
            self.requests,
            self.preemption,
            cost,
            now_s,
            self.in_flight,
            self.block_copy_s,
            view.is_shared,
            view.yielding_owner,
        )
        self.policy.build(view, builder)
        for request in builder.started:
            self._on_started(request)
        return builder.batch

    def _on_started(self, request: Request) -> None:
        """The request takes part in steps from now on."""
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

    def _plan_of(
        self, view: Snapshot[Request], work: Compute | Resume, admitted: tuple[AdmittedRequest, ...] = ()
    ) -> StepPlan:
        """The next plan: this work, or a wait for copies in its place if it has no slices."""
        limits = CopyLimits(_MAX_UNTIMED_COPIES, _MAX_UNTIMED_COPIES)
        if self.block_copy_s is not None and self.kv.num_host_blocks:
            slack_s = math.inf
            if self.copy_interference and work.slices:  # else copies slow nothing
                num_tokens = {each.request_id: each.num_tokens for each in work.slices}
                slack_s = self.policy.step_limit_s(view, num_tokens) - work.predicted_s
            limits = copy_limits(work.predicted_s, slack_s, self.block_copy_s, self.copy_interference)
        copies = self.kv.take_copies(limits, self._copy_cost(work.predicted_s))
        changes = MemoryChanges()
        if self.division is not None:
            changes = self.division.take_changes(computes=bool(work.slices))
        waits = isinstance(work, Compute) and not work.slices and self.kv.num_copies_in_flight > 0
        waits = waits and not self.in_flight  # else an outcome to come reports copies
        released: list[RequestId] = []
        dropped: tuple[RequestId, ...] = ()
        acts = work.slices or copies or changes.memory or changes.moves
        if acts or not self.in_flight:  # else it would take the place of another step
            released, self._to_release = self._to_release, []
            dropped = self.suspension.take_dropped()
        plan = StepPlan(
            step=self._num_plans,
            work=WaitForCopies() if waits else work,
            admitted=admitted,
            released=tuple(released),
            copies=copies,
            offload_interval=changes.interval,
            memory=changes.memory,
            moves=changes.moves,
            dropped=dropped,
        )
        self._num_plans += 1
        return plan

    def _copy_cost(self, step_s: float) -> float:
        """What a copy to the host costs beside this step, over what it saves if its block is taken.

        It saves what computing the block again takes, less what the copy back costs.
        """
        if self.predictor is None or self.block_copy_s is None or not step_s:
            return 0.0
        copy_s = self.copy_interference * self.block_copy_s
        chunk = self.config.max_chunk_tokens
        block_s = self.predictor.cost.prefill_time_s(chunk, chunk) * self.kv.block_size / chunk
        return copy_s / (block_s - copy_s) if copy_s < block_s / 2 else 1.0

    def _snapshot(self, now_s: float) -> Snapshot[Request]:
        kv, requests = self.kv, self.requests
        if requests.num_online_owners > 1:
            self._shared_at_s = now_s
        is_shared = now_s - self._shared_at_s < _SHARED_FOR_S
        in_flight, num_most = self.in_flight, self.config.max_num_seqs + _MAX_PASSED_OVER
        running = requests.running_by_level(excluded=in_flight.closed.union(self.suspension.waiting))
        is_draining = self.division is not None and self.division.is_draining
        paused = OFFLINE_LEVELS if is_draining else ()
        waiting = {
            level: ()
            if level in paused
            else requests.first_waiting(level, min(num_most, -(-len(queue) // in_flight.max_more)))
            for level, queue in requests.waiting.items()
        }
        in_other_steps = self._divide(running, now_s) if in_flight.max_steps > 1 else {}
        return Snapshot(
            now_s=in_flight.begins_at_s(now_s),
            running=running,
            restoring=tuple(requests.restoring.values()),
            waiting=waiting,
            num_blocks=kv.num_blocks,
            online_blocks=kv.counts.online,
            reclaimable_blocks=kv.counts.reclaimable + kv.counts.protected,
            in_other_steps=in_other_steps,
            is_shared=is_shared,
            is_flooded=is_shared and requests.flooding_owner is not None,
            yielding_owner=self.giving.owner,
            stopped_owners=self.giving.stopped_owners,
            were_passed_over=self.giving.were_passed_over,
            served=requests.waiting[PriorityLevel.ONLINE].served,
            late_owners=requests.waiting[PriorityLevel.RELEGATED].owners,
        )

    def _look_up_again(self, waiting: Sequence[Request]) -> None:
        """Others compute what these begin with, and what the cache had of them may be evicted."""
        num_blocks = 0
        for _ in waiting[:_NUM_LOOKED_UP]:
            request = waiting[self._num_looked_up % len(waiting)]
            self._num_looked_up += 1
            self.requests.look_up(request)
            num_blocks += request.num_computed_tokens // self.kv.block_size
            if num_blocks >= _MAX_WALKED_BLOCKS:
                break

    def _divide(
        self, running: dict[PriorityLevel, list[Request]], now_s: float
    ) -> Mapping[PriorityLevel, Sequence[RequestView]]:
        """Leave in ``running`` what this step has of each level; returns the others, and those in flight.

        Its share is that of one in ``max_steps`` steps. Requests that wait for blocks of one in flight are in
        it, so that they are tried whenever that one is in flight no more.
        """
        in_flight, online = self.in_flight, PriorityLevel.ONLINE
        if self.requests.num_owners > 1:
            # Else the begun prompts of one owner might be this step's share for ever.
            decodes, prefills = split(running[online])
            running[online] = [*decodes, *prompts_in_turn(prefills, (), self.requests.waiting[online].served)]
        others: dict[PriorityLevel, list[RequestView]] = {level: [] for level in PriorityLevel}
        for view in in_flight.views(self.requests.by_id, now_s):
            others[view.priority_level].append(view)
        for level, requests in running.items():
            num_of_step = -(-(len(requests) + len(others[level])) // in_flight.max_steps)
            of_step = [
                each
                for index, each in enumerate(requests)
                if index < num_of_step or each.request_id in in_flight.blocked
            ]
            if len(of_step) < len(requests):
                chosen = {each.request_id for each in of_step}
                others[level] += [each for each in requests if each.request_id not in chosen]
                running[level] = of_step
        return others

    def _is_mostly_online(self, batch: Batch) -> bool:
        """Online requests alone would take half of the step's time at least.

        Else its offline slices alone are stopped, for whoever asks: a flood's own requests stop no step in
        which its slices may be stopped.
        """
        assert self.predictor is not None
        load = StepLoad()
        for request, num_tokens in batch.members.values():
            if request.service_class is ServiceClass.ONLINE:
                start = request.num_computed_tokens
                load.put(start, num_tokens, start + num_tokens == request.num_tokens)
        return self.predictor.cost.step_time_s(load) >= batch.predicted_s / 2

    def _slices_of(self, batch: Batch, yielding_owner: str | None) -> tuple[ScheduledSlice, ...]:
        table, online = self.kv.table, PriorityLevel.ONLINE
        yielding: Collection[RequestId] = ()
        if yielding_owner is not None and self.config.suspends:
            yielding = self.giving.mark(batch.members, yielding_owner)
        new_tuple = tuple.__new__  # as the class itself would make it, in half the time
        return tuple(
            [
                new_tuple(
                    ScheduledSlice,
                    (
                        request_id,
                        (start := request.num_computed_tokens),
                        num_tokens,
                        table(request_id),
                        start + num_tokens == request.num_tokens,  # samples
                        request.priority_level is not online or request_id in yielding,  # stoppable
                    ),
                )
                for request_id, (request, num_tokens) in batch.members.items()
            ]
        )


def copy_limits(step_s: float, slack_s: float, block_copy_s: float, interference: float) -> CopyLimits:
    """Copies that the link can move beside a step, and those whose slow-down the step can afford.

    Restores for online requests are limited by the link alone.

    ConServe (4.5) "uses the SLO to decide the maximum number of KV cache blocks that can be swapped in the
    background, and defers the extra blocks to the next round". A copy that does not end with its step also
    slows the next one, and counts there as in flight.

    Args:
        step_s: predicted time of the step without copies; 0 if it computes nothing.
        slack_s: seconds by which it could be longer; inf where no objective bounds it. Below 0 is as 0.
        block_copy_s: seconds that the copy of one block takes.
        interference: seconds by which a step becomes longer for each second of copying beside it; 0 where
            that was not measured. Then copies count as free.
    """
    link = math.ceil((step_s or _IDLE_STEP_S) / block_copy_s)
    slowdown_s = block_copy_s * interference  # of each block
    slack_s = max(0.0, slack_s)
    if step_s == 0.0 or slack_s >= link * slowdown_s:
        return CopyLimits(link, link)
    return CopyLimits(link, math.floor(slack_s / slowdown_s))
