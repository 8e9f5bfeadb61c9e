"""Builds one step's batch over the KV cache and the queues: what policies call."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from backfill.core.config import SchedulerConfig
from backfill.core.plan import CopyDirections
from backfill.core.request import PriorityLevel, Request, RequestStatus, ServiceClass
from backfill.costs.model import CostModel
from backfill.kvcache.content import BlockKey, Evictable, Match
from backfill.kvcache.last_blocks import LastBlocks
from backfill.kvcache.manager import KVCacheManager
from backfill.scheduling.batch import Batch
from backfill.scheduling.in_flight import StepsInFlight
from backfill.scheduling.policy import MIN_PREFILL_CHUNK_TOKENS, NO_LIMITS, Admission, ChunkLimits
from backfill.scheduling.preemption import Preemptible, Preemption, may_be_preempted
from backfill.scheduling.queues import UnfinishedRequests

# Waiting requests whose keys a step makes although another one in it computes their next block.
_MAX_LOOKED_UP = 64
# Steps that a request waits in vain for others to compute its next blocks, before it computes them too.
_MAX_PREFIX_WAITS = 32
# Of prompts to score, in a step: it cannot be stopped while it computes their logits.
_MAX_SCORED_TOKENS = 256
# Of the places of a step, for owners that have fewer than these.
_KEPT_PART = 8


@dataclass(slots=True, eq=False)
class StepBuilder:
    """See ``BatchBuilder``, for policies. Made for one step.

    A prompt whose next block is computed in the same step, by a request of its level or a more urgent one,
    waits for the next step, where it finds the block in the cache.

    Args:
        cost: predicts steps; None where nothing does, and limits of time are infinite.
        block_copy_s: seconds that a copy of one block between device and host takes; None if not known.
        is_shared: several owners have online requests, or had them lately.
        yielding_owner: gives way to the others' online requests, with its blocks too.
    """

    config: SchedulerConfig
    kv: KVCacheManager
    requests: UnfinishedRequests
    preemption: Preemption
    cost: CostModel | None
    now_s: float
    in_flight: StepsInFlight = field(default_factory=StepsInFlight)
    block_copy_s: float | None = None
    is_shared: bool = False
    yielding_owner: str | None = None
    batch: Batch = field(init=False)
    # Requests that came to hold blocks with all their KV on the device.
    started: list[Request] = field(init=False, default_factory=list)
    # The blocks that this step computes, or one in flight, each with the most urgent request that does, and
    # the indices where prompts begin.
    _computing: dict[BlockKey, Request] = field(init=False, default_factory=dict)
    _starts: set[int] = field(init=False, default_factory=set)
    _num_looked_up: int = field(init=False, default=0)
    _reserved: _Reserved | None = field(init=False, default=None)
    _max_prefill_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        max_tokens = self.config.max_num_batched_tokens
        self.batch = Batch(self.config.max_num_seqs, max_tokens, self.cost)
        self._max_prefill_tokens = self.in_flight.max_prefill_tokens(max_tokens)
        for scheduled in self.in_flight.all_slices:
            request = self.requests.by_id[scheduled.request_id]
            self._note_blocks(request, scheduled.start, scheduled.num_tokens)

    def time_with_s(self, request: Request) -> float:
        if self.cost is None:
            return 0.0
        num_tokens = self._most_tokens(request)
        num_rows = request.num_logits_rows(num_tokens)
        return self.cost.time_with_s(self.batch.load, request.num_computed_tokens, num_tokens, num_rows)

    def num_absent_blocks(self, request: Request) -> int:
        contents = self.kv.match(request).contents
        num_on_device = sum(each.num_device_tokens for each in contents if each.own_block is not None)
        return max(0, request.num_ever_computed_tokens - num_on_device) // self.kv.block_size

    def restore_s(self, request: Request) -> float:
        waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if not waits or self.block_copy_s is None or not self.kv.num_host_blocks:
            return 0.0
        contents = self.kv.match(request).contents
        return self.block_copy_s * len([each for each in contents if each.device is None or each.num_lost])

    def add_decodes(self, requests: Sequence[Request], max_step_s: float = math.inf) -> int:
        batch, size = self.batch, self.kv.block_size
        if batch.paused_levels:
            requests = [each for each in requests if not batch.is_paused(each)]
        if not requests:
            return 0
        num_fitting = min(self._num_fitting(requests, max_step_s), batch.num_seqs_left, batch.num_tokens_left)
        requests = requests[:num_fitting]
        # Those whose last block has a free slot need no allocation: they follow together.
        together = [
            each for each in requests if each.num_computed_tokens % size and each.num_pending_tokens == 1
        ]
        if self.kv.sharing.blocks:
            together = [each for each in together if each.request_id not in self.kv.sharing.blocks]
        if len(together) < len(requests):
            names = {each.request_id for each in together}
            others = [each for each in requests if each.request_id not in names]
            self._grow_decodes(others, batch.num_tokens_left - len(requests))
        if batch.has_preempted:  # perhaps for a block of another one
            together = [each for each in together if each.status is RequestStatus.RUNNING]
        batch.add_decodes(together)
        return num_fitting

    def _grow_decodes(self, requests: Sequence[Request], num_spare_tokens: int) -> None:
        """Args: num_spare_tokens: beside one of each, for those that have several."""
        for request in requests:
            if request.status is RequestStatus.RUNNING and self.batch.has_headroom:
                num_more = min(request.num_pending_tokens - 1, num_spare_tokens)
                num_spare_tokens -= num_more
                self._grow(request, 1 + num_more)

    def try_add(self, request: Request, limits: ChunkLimits = NO_LIMITS) -> int:
        if request.status is not RequestStatus.RUNNING or not self.batch.has_headroom:
            return 0
        if self.batch.is_paused(request):
            return 0
        if not request.is_decoding:
            if request.request_id not in self.in_flight.slices:
                self.kv.match_more(request)
            if self._defer_at_next_block(request):
                return 0
        num_tokens = self._chunk(request, limits)
        return num_tokens if num_tokens and self._grow(request, num_tokens) else 0

    def try_admit(
        self,
        request: Request,
        limits: ChunkLimits = NO_LIMITS,
        *,
        reserved_blocks: int = 0,
        may_preempt: Collection[PriorityLevel] = (),
    ) -> Admission:
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return Admission.DEFERRED  # preempted for another one in this step, and moved within its queue
        if self.batch.is_paused(request):
            return Admission.REFUSED
        if any(self._defer(request, index) for index in self._starts):
            return Admission.DEFERRED  # it was looked up before, and has all blocks before this in common
        match = self.kv.match(request)
        request.num_computed_tokens = match.num_tokens
        takes_part = match.is_on_device or CopyDirections.RESTORE in self.kv.blocking
        if takes_part and not self._is_next_block_computed(request) and not self._chunk(request, limits):
            return Admission.REFUSED  # the common case where time is short, before anything is summed
        reserved, preemptible = self._reserved, self._preemptible(request, may_preempt)
        if reserved is None or reserved.without != preemptible:
            if not may_preempt and not self._may_fit(request, match):
                return Admission.REFUSED  # the common case where memory is full, before anything is summed
            reserved = self._reserved = self._sum_reserved(preemptible)
        if reserved.num_holders >= self._most_holders(request, reserved.num_holders):
            return Admission.REFUSED
        if self._defer_at_next_block(request):
            self._num_looked_up += 1
            return Admission.DEFERRED if self._num_looked_up < _MAX_LOOKED_UP else Admission.REFUSED
        if takes_part and not self._chunk(request, limits):
            return Admission.REFUSED
        num_reserved = reserved.num_blocks + (reserved_blocks if self.requests.running else 0)
        found = self.preemption.free_for_waiting(request, match, num_reserved, preemptible, self.batch)
        if found is None:
            return Admission.REFUSED
        self._admit(request, *found, limits)
        reserved.add([request], self._blocks_needed_next(request))
        self._reserved = reserved
        return Admission.ADMITTED

    def remove(self, request: Request) -> None:
        self.batch.remove(request)

    def preempt(self, request: Request) -> None:
        holds_blocks = request.status in (RequestStatus.RUNNING, RequestStatus.RESTORING)
        if holds_blocks and request.request_id not in self.in_flight.slices:
            self._reserved = None
            self.preemption.preempt(request, self.batch)

    def _num_fitting(self, decodes: Sequence[Request], max_step_s: float) -> int:
        """The most of these decodes, from the first, with which the step keeps to its limit of time.

        Those that do not fit take no blocks.
        """
        if max_step_s == math.inf:
            return len(decodes)
        assert self.cost is not None
        load, cost = self.batch.load, self.cost

        def seconds(count: int) -> float:
            starts = [each.num_computed_tokens for each in decodes[:count]]
            grown = load.copy()
            grown.put_decodes(starts)
            return cost.step_time_s(grown)

        low, high = (0 if self.batch.members else 1), len(decodes)
        if seconds(high) <= max_step_s:
            return high
        while high - low > 1:  # low fits or is exempt, high does not fit
            middle = (low + high) // 2
            if seconds(middle) <= max_step_s:
                low = middle
            else:
                high = middle
        return low

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Add a running request's tokens and allocate their blocks, preempting for them."""
        needed = request.num_computed_tokens + num_tokens
        if request.request_id in self.kv.sharing.blocks:
            self._reserved = None
            if not self.preemption.free_shared_slots(request, needed, self.batch):
                return False
        if self.kv.num_missing_blocks(request.request_id, needed):
            self._reserved = None
            may_evict = self.preemption.free_for_running(request, needed, self.batch)
            if may_evict is None:
                return False
            self.kv.grow(request, needed, may_evict)
        self._add(request, num_tokens)
        return True

    def _add(self, request: Request, num_tokens: int) -> None:
        self.batch.add(request, num_tokens)
        self._note_blocks(request, request.num_computed_tokens, num_tokens)

    def _note_blocks(self, request: Request, start: int, num_tokens: int) -> None:
        """Prompts with the same next block wait for these tokens to be computed."""
        if num_tokens >= self.kv.block_size:
            level = request.priority_level.value
            self._starts.add(start // self.kv.block_size)
            for key in self.kv.new_keys(request, start, start + num_tokens):
                known = self._computing.get(key)
                if known is None or level < known.priority_level.value:
                    self._computing[key] = request

    def _admit(self, request: Request, match: Match, may_evict: Evictable, limits: ChunkLimits) -> None:
        """Give a waiting request its blocks; it takes part in this step if all its KV is on the device."""
        self.requests.take(request)
        is_restored = self.kv.allocate(request, match, may_evict)
        if request.first_scheduled_at_s is None:
            request.first_scheduled_at_s = self.now_s
        if not is_restored:
            self.requests.restore(request)
            return
        self.requests.run(request)
        self.kv.start(request)
        self.started.append(request)
        num_tokens = self._chunk(request, limits)
        if num_tokens:
            self.kv.grow(request, request.num_computed_tokens + num_tokens, may_evict)
            self._add(request, num_tokens)

    def _defer(self, request: Request, index: int) -> bool:
        """Let the request wait if another one computes this block of it in this step, or in one in flight.

        A later step then finds the block. A request never waits for one that is less urgent. It waits a
        bounded number of steps beyond those that found it a block: the other request may be stopped.
        """
        if index * self.kv.block_size >= request.num_matchable_tokens:
            return False
        key = self.kv.key_of(request.request_id, index)
        other = None if key is None else self._computing.get(key)
        if other is None or other.priority_level.value > request.priority_level.value:
            return False
        name = other.request_id
        if name not in self.batch.members and name not in self.in_flight.slices:  # it was preempted meanwhile
            return False
        request.num_prefix_waits += 1
        return request.num_prefix_waits <= _MAX_PREFIX_WAITS + index

    def _is_next_block_computed(self, request: Request) -> bool:
        """Whether this step, or one in flight, may compute the next block of the request for another one."""
        index = request.num_computed_tokens // self.kv.block_size
        return self.kv.key_of(request.request_id, index) in self._computing

    def _defer_at_next_block(self, request: Request) -> bool:
        index, offset = divmod(request.num_computed_tokens, self.kv.block_size)
        return not offset and self._defer(request, index)

    def _may_fit(self, request: Request, match: Match) -> bool:
        needed = self.kv.blocks_for(request.num_tokens) - match.num_device_blocks - self.kv.sharing.is_on
        return needed <= self.kv.counts.available(Evictable.ALL)

    def _preemptible(self, request: Request, levels: Collection[PriorityLevel]) -> Preemptible:
        in_time = request.priority_level is PriorityLevel.ONLINE and request.owner != self.yielding_owner
        return Preemptible(levels, self.yielding_owner if levels and in_time else None)

    def _sum_reserved(self, preemptible: Preemptible) -> _Reserved:
        holders: Sequence[Request] = self.preemption.block_holders
        if preemptible.levels:
            holders = [each for each in holders if not may_be_preempted(each, preemptible)]
        least_saved = self.kv.counts.referenced / max(1, 2 * len(self.preemption.block_holders))
        reserved = _Reserved(preemptible, self.kv.sharing, least_saved)
        if len(holders) >= self.config.max_num_seqs:
            reserved.num_holders = len(holders)
        else:
            reserved.add(holders, len(holders) + self.kv.counts.missing(holders))
        return reserved

    def _most_holders(self, request: Request, num_holders: int) -> int:
        """Requests that may hold blocks: some places are kept for owners that have few.

        Else one owner's answers would have all of them, and who asks later would wait for the end of one.
        """
        most = self.config.max_num_seqs
        num_kept = most // _KEPT_PART if self.is_shared else 0
        if num_holders < most - num_kept or request.service_class is ServiceClass.OFFLINE:
            return most
        same = request.owner, request.service_class
        num_own = sum((each.owner, each.service_class) == same for each in self.preemption.block_holders)
        return most if num_own < num_kept else most - num_kept

    def _blocks_needed_next(self, request: Request) -> int:
        """Blocks for the rest of its known tokens and one more, so that its next steps preempt no request."""
        return 1 + self.kv.num_missing_blocks(request.request_id, request.num_tokens)

    def _most_tokens(self, request: Request) -> int:
        pending = request.num_pending_tokens
        most = min(pending, self.config.max_prefill_chunk_tokens, self.batch.num_tokens_left)
        if request.is_decoding:
            return most
        if request.sampling.prompt_logprobs is not None:
            most = min(most, _MAX_SCORED_TOKENS - self.batch.num_scored_tokens)
        return min(most, self._max_prefill_tokens - self.batch.num_prefill_tokens) if pending > 1 else most

    def _chunk(self, request: Request, limits: ChunkLimits) -> int:
        """Pending tokens of a request, at most, for which the step has headroom and time; 0 for none."""
        batch = self.batch
        if not batch.has_headroom:
            return 0
        pending, most = request.num_pending_tokens, self._most_tokens(request)
        least = most if limits.is_whole else min(most, MIN_PREFILL_CHUNK_TOKENS)
        if limits.step_sizes:
            # With less than the least chunk beside the decodes, no prompt would begin while any request runs.
            beside = max(limits.step_sizes[0] // 2, MIN_PREFILL_CHUNK_TOKENS)
            least_size = batch.load.num_tokens - batch.num_prefill_tokens + beside
            index = min(bisect_left(limits.step_sizes, least_size), len(limits.step_sizes) - 1)
            most = min(most, max(0, limits.step_sizes[index] - batch.load.num_tokens))
        if limits.max_step_s < math.inf:
            assert self.cost is not None
            most = self.cost.max_tokens(
                batch.load,
                request.num_computed_tokens,
                pending,
                limits.max_step_s,
                most,
                request.num_logits_rows,
            )
        if most >= least:
            # Behind another prompt, a chunk ends with a block: the next one can then begin with what the
            # other one, which may have the same prefix, has computed meanwhile.
            over = (request.num_computed_tokens + most) % self.kv.block_size
            is_behind = batch.num_prefill_tokens > 0 and most < pending
            return most - over if is_behind and most - over >= least else most
        is_guaranteed = not batch.members or (limits.guarantees_progress and not batch.num_prefill_tokens)
        return least if is_guaranteed else 0


@dataclass(slots=True)
class _Reserved:
    """What the requests that hold blocks need next, without those that may be preempted.

    Where blocks are shared, an online and an offline request can each enter the other one's block, so that
    no block is kept for such a pair. But a pair that does not find each other, or meets, costs a preemption.
    What that frees is of no use until it suffices for another request: half of one in the mean, as a last
    block is half empty. So pairs count only where they save as much.

    Args:
        least_saved: half of the blocks that one request holds in the mean.
    """

    without: Preemptible
    sharing: LastBlocks
    least_saved: float
    num_holders: int = 0
    _num_blocks: int = 0
    _num_online: int = 0  # that may be one of a pair
    _num_offline: int = 0

    @property
    def num_blocks(self) -> int:
        num_saved = 2 * min(self._num_online, self._num_offline)
        return self._num_blocks - (num_saved if num_saved >= self.least_saved else 0)

    def add(self, requests: Sequence[Request], num_blocks: int) -> None:
        """Args: num_blocks: of all of them."""
        self.num_holders += len(requests)
        self._num_blocks += num_blocks
        pairing = [each.service_class for each in requests if self.sharing.may_pair(each)]
        self._num_online += pairing.count(ServiceClass.ONLINE)
        self._num_offline += pairing.count(ServiceClass.OFFLINE)
