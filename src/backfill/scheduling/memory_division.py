"""Divides device memory between weights and KV while serving, and carries the division out step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from backfill.core.block import BlockMove
from backfill.core.config import SchedulerConfig
from backfill.core.plan import DeviceMemory, WeightTransfers
from backfill.core.request import PriorityLevel, Request
from backfill.costs.load import StepLoad
from backfill.kvcache.content import Evictable
from backfill.kvcache.manager import KVCacheManager
from backfill.offloading.residency import Residency, ResidencyPolicy, Situation, StepNeed
from backfill.scheduling.in_flight import StepsInFlight
from backfill.scheduling.policy import MIN_PREFILL_CHUNK_TOKENS
from backfill.scheduling.prediction import StepPredictor, decode_load
from backfill.scheduling.preemption import Preemption
from backfill.scheduling.queues import UnfinishedRequests
from backfill.scheduling.suspension import Suspension

# What the moves of one step may take beside it, and how many they are where the time of a copy is not known.
_MOST_MOVES_S = 2e-3
_MOST_MOVES = 64
# Of a drain that is short of blocks before it preempts, and then before it drops what has no copy yet; of any
# drain before nothing is planned until the steps in flight have ended.
_MAX_SHORT_STEPS = 8
# Predictions count with another transfer time once it is longer or shorter by this share.
_TRANSFER_CHANGE = 0.1
ONLINE_LEVELS = (PriorityLevel.ONLINE, PriorityLevel.RELEGATED)
OFFLINE_LEVELS = (PriorityLevel.PROMOTED, PriorityLevel.OFFLINE)


@dataclass(frozen=True, slots=True)
class MemoryChanges:
    """What a plan changes; None where nothing does."""

    interval: int | None = None
    memory: DeviceMemory | None = None
    moves: tuple[BlockMove, ...] = ()


@dataclass(slots=True, eq=False)
class MemoryDivision:
    """Asks the policy before each plan, and makes the KV pool as large as its residency says.

    More KV: the pool grows in the plan that takes memory from the weights.

    Less KV: the pool ends earlier at once, so that nothing new gets there, and is drained over some steps;
    then a plan gives the memory to weights. Meanwhile no offline request is admitted. Moved KV gets the
    memory of cached content that is of no use, or is in host memory too. If that does not come to suffice in
    a few steps, offline requests are preempted, and what they want is dropped if it has no copy by then.
    Cached content that is kept for online requests goes last, and online requests are not preempted.

    Blocks of requests in flight are not moved. In a pipeline, where some always are, no step is planned after
    every few of a drain until none is in flight, and only then are requests preempted for it.

    Attributes:
        present: how memory is divided, or will be by the plan that is made.

    Args:
        block_copy_s: seconds that a copy of one block between device and host takes; None if not known. A
            move takes no longer.
    """

    policy: ResidencyPolicy
    config: SchedulerConfig
    kv: KVCacheManager
    requests: UnfinishedRequests
    suspension: Suspension
    preemption: Preemption
    predictor: StepPredictor
    block_copy_s: float | None
    in_flight: StepsInFlight
    present: Residency = field(init=False)
    _transfer_s: float = field(init=False, default=0.0)
    _interval: int = field(init=False)
    _told: int = field(init=False)  # the last interval that a plan had
    _predicted: tuple[int, float] = field(init=False)  # interval and transfer that predictions count with
    _is_short: bool = field(init=False, default=False)  # the drain lacks blocks, and not only time
    _num_short: int = field(init=False, default=0)  # steps that have ended while it did
    _num_beside: int = field(init=False, default=0)  # that have ended in it since none was in flight
    _changes: MemoryChanges = field(init=False, default_factory=MemoryChanges)

    def __post_init__(self) -> None:
        self.present = self.policy.choices[-1]
        self._interval = self._told = self.present.interval
        self._predicted = self._interval, 0.0
        assert self.kv.num_blocks == self.present.num_blocks

    @property
    def is_draining(self) -> bool:
        """Offline requests have to wait: the pool shrinks."""
        return self.kv.resizing.num_draining > 0

    @property
    def waits_for_steps(self) -> bool:
        """Nothing more is to be in flight before those steps have ended: their blocks cannot be moved."""
        return self._num_beside > _MAX_SHORT_STEPS and len(self.in_flight) > 0

    def observe(self, transfers: WeightTransfers) -> None:
        """A step has ended."""
        self._transfer_s = transfers.transfer_s or self._transfer_s
        self._num_short += self._is_short
        self._num_beside += self.is_draining

    def prepare(self, now_s: float) -> None:
        """Decide, and change the pool, before anything else of a plan."""
        situation = self._situation(now_s)
        target, resizing, memory = self.policy.choose(situation), self.kv.resizing, None
        resizing.resize(target.num_blocks)
        if resizing.num_draining:
            self._drain()
        if not resizing.num_draining:
            self._is_short, self._num_short, self._num_beside = False, 0, 0
        moves = resizing.take_moves()
        if target is not self.present and not resizing.num_draining and not moves:
            self.present = target
            memory = DeviceMemory(target.num_blocks, target.interval)
        self._changes = MemoryChanges(memory=memory, moves=moves)
        self._interval = self.policy.fastest_interval(self.present, situation)
        self._predict()

    def take_changes(self, *, computes: bool) -> MemoryChanges:
        """Those of the next plan. An interval alone waits for one that computes something."""
        changes, self._changes = self._changes, MemoryChanges()
        if self._interval == self._told or not (computes or changes.memory is not None):
            return changes
        self._told = self._interval
        return replace(changes, interval=self._interval)

    def _predict(self) -> None:
        """Let predictions count with the interval, and with a transfer that is not far from the latest."""
        interval, transfer_s = self._predicted
        is_near = abs(self._transfer_s - transfer_s) <= _TRANSFER_CHANGE * transfer_s
        if interval == self._interval and is_near:
            return
        self._predicted = self._interval, self._transfer_s
        is_measured = self._interval == self.policy.choices[-1].interval
        self.predictor.stream(None if is_measured else self.policy.bounds(self._interval, self._transfer_s))

    def _drain(self) -> None:
        if not self.in_flight:
            self._num_beside = 0
        if self.waits_for_steps:
            return
        resizing = self.kv.resizing
        for request_id in [each for each in self.suspension.requests if resizing.holds(each)]:
            self.suspension.discard(request_id)  # its slice has the block table of before
        max_moves = _MOST_MOVES
        if self.block_copy_s is not None:
            max_moves = max(1, int(_MOST_MOVES_S / self.block_copy_s))
        if self._num_short > _MAX_SHORT_STEPS and not self.in_flight:
            self._preempt_offline()
        resizing.drain(self._may_evict(), max_moves, self.in_flight.slices)
        self._is_short = resizing.num_moves < max_moves

    def _may_evict(self) -> Evictable:
        kv = self.kv
        if not self.preemption.block_holders:
            return Evictable.ALL  # nothing would run until the drain ends
        # What was preempted may have a copy soon.
        max_steps = 2 * _MAX_SHORT_STEPS if kv.num_host_blocks else _MAX_SHORT_STEPS
        if self._num_short <= max_steps:
            return Evictable.LOSING_NOTHING
        return Evictable.OFFLINE if kv.counts.available(Evictable.OFFLINE) or self._victims else Evictable.ALL

    def _preempt_offline(self) -> None:
        """Preempt offline requests until the others fit, first those with blocks beyond the end."""
        kv, holds = self.kv, self.kv.resizing.holds
        victims = sorted(self._victims, key=lambda each: (holds(each.request_id), self.preemption.key(each)))
        while victims and kv.resizing.num_kept(Evictable.OFFLINE) > kv.counts.available(Evictable.OFFLINE):
            self.preemption.preempt(victims.pop())

    @property
    def _victims(self) -> Sequence[Request]:
        return [each for each in self.preemption.block_holders if each.priority_level not in ONLINE_LEVELS]

    def _situation(self, now_s: float) -> Situation:
        kv, requests, cost = self.kv, self.requests, self.predictor.measured
        holders = self.preemption.block_holders
        online = [each for each in holders if each.priority_level in ONLINE_LEVELS]
        arriving, lacking = self._waiting_online()
        online += arriving
        decodes = decode_load(online)
        tpot_s = min((each.slo.tpot_s for each in online if each.slo is not None), default=math.inf)
        limit_s = tpot_s * self.predictor.usable_share  # as predicted
        num_waiting = lacking + sum(len(requests.waiting[level].requests) for level in OFFLINE_LEVELS)
        used = kv.counts.referenced
        # Computation takes so many times as long as predicted; transfers take as long as was measured.
        load, time_scale = decode_load(holders), self.predictor.time_scale

        def compute_s(scale: float) -> float:
            return time_scale * cost.step_time_s(_scaled(load, scale))

        return Situation(
            now_s=now_s,
            transfer_s=self._transfer_s,
            num_online=len(online),
            decodes=StepNeed(limit_s * time_scale, time_scale * cost.step_time_s(decodes)),
            prompts=self._prompts_need(online, limit_s, now_s),
            used_blocks=used,
            wanted_blocks=used * (1.0 + num_waiting / max(1, len(holders))),
            most_scale=self.config.max_num_seqs / max(1, len(holders)),
            compute_s=compute_s,
        )

    def _waiting_online(self) -> tuple[list[Request], int]:
        """Those that may be in a step soon, and how many wait until others leave them blocks.

        Shorter steps would not help these, and the smaller pool that they come with would keep them waiting.
        """
        kv, config, arriving, num_lacking = self.kv, self.config, list[Request](), 0
        most_tokens = config.max_chunk_tokens
        num_free = kv.num_blocks - kv.counts.online
        for level in ONLINE_LEVELS:
            for request in self.requests.waiting[level].requests[: config.max_num_seqs]:
                num_free -= kv.blocks_for(min(request.num_pending_tokens, most_tokens))
                if num_free >= 0:
                    arriving.append(request)
                else:
                    num_lacking += 1
        return arriving, num_lacking

    def _prompts_need(self, online: Sequence[Request], limit_s: float, now_s: float) -> StepNeed | None:
        """Of the steps that compute their prompts by deadline, in chunks that fit beside the decodes.

        Prompts that could not be in time if no step waited for weights are left out. Relegated ones count:
        it may be the weights that make them late. A prompt with fewer steps left than a drain may take plans
        counts with its whole objective, less a step that runs when it comes: others like it have that, while
        what is left of its own shows how long it has waited, maybe for blocks.

        Args:
            limit_s: of a step with decodes, as predicted.
        """
        prompts = [each for each in online if each.last_token_at_s is None]
        if not prompts:
            return None
        cost, config = self.predictor.measured, self.config
        num_tokens = sum(each.num_pending_tokens for each in prompts)
        chunk = min(config.max_chunk_tokens, num_tokens)
        # Where the mean of their chunks begins.
        ends = sum(each.num_computed_tokens + each.num_tokens for each in prompts)
        middle = max(0, ends // len(prompts) - chunk) // 2
        load = decode_load([each for each in online if each.last_token_at_s is not None])
        if load.num_requests:
            fitting = cost.max_tokens(load, middle, chunk, limit_s)
            chunk = max(min(MIN_PREFILL_CHUNK_TOKENS, chunk), fitting)
        load.put(middle, chunk, True)
        compute_s = self.predictor.time_scale * cost.step_time_s(load)
        usable, num_tokens, least_s = self.predictor.usable_share * self.predictor.time_scale, 0, math.inf
        for request in sorted(prompts, key=lambda each: each.next_token_by_s):
            num_steps = max(1.0, (num_tokens + request.num_pending_tokens) / chunk)
            step_s = (request.next_token_by_s - now_s) * usable / num_steps
            if step_s < compute_s:
                continue
            num_tokens += request.num_pending_tokens
            if num_steps < _MAX_SHORT_STEPS and request.slo is not None:
                step_s = max(step_s, request.slo.ttft_s * usable / (num_steps + 1.0))
            least_s = min(least_s, step_s)
        return None if least_s == math.inf else StepNeed(least_s, compute_s)


def _scaled(load: StepLoad, scale: float) -> StepLoad:
    """A step of so many times as many decodes."""
    num_requests = round(load.num_requests * scale)
    return StepLoad(
        num_tokens=num_requests,
        num_sampled=num_requests,
        num_requests=num_requests,
        decode_context_tokens=round(load.decode_context_tokens * scale),
    )
