"""The host tier: checkpoints blocks, reclaims those of preempted requests, and restores them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.core.plan import CopyDirections
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.kvcache.block_manager import BlockManager
from backfill.kvcache.checkpointing import CheckpointPolicy, PoolView


class HostTier:
    """Connects requests, the block manager and a checkpoint policy.

    ``add_candidate`` marks requests after a step; ``start_checkpoints`` begins the copies that the policy
    wants, just before the next plan (ConServe, section 5). A preempted request is restored in parts, some
    before each step, so that a long one does not delay the running ones.

    Args:
        counters: checkpointed, reclaimed and restored tokens are added to them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        policy: CheckpointPolicy,
        counters: Mapping[ServiceClass, ClassCounters],
    ) -> None:
        self._blocks = blocks
        self._policy = policy
        self._blocking = blocks.blocking
        self._counters = counters
        self._candidates: dict[RequestId, Request] = {}
        self._preempted: dict[RequestId, Request] = {}  # preempted, with KV in host memory
        self._restoring: dict[RequestId, Request] = {}
        self._max_copies_in_flight = 0

    @property
    def restoring(self) -> Collection[Request]:
        """Requests that hold device blocks and whose KV is being copied back to them."""
        return self._restoring.values()

    def limit_copies(self, max_in_flight: int) -> None:
        """From now on no copy begins while this many are in flight."""
        self._max_copies_in_flight = max_in_flight

    def has_host_copy(self, request: Request) -> bool:
        """The request is preempted and has KV in host memory."""
        return request.request_id in self._preempted

    def lost_tokens(self, request: Request) -> int:
        """Tokens that preempting the request might lose, without those of a last block that is not full.

        A block whose copy is in flight counts as lost: it is not free before the copy completes.
        """
        if not self._policy.checkpoints_at_preemption or not self._blocks.num_host_blocks:
            return request.num_computed_tokens
        if CopyDirections.CHECKPOINT in self._blocking:
            return 0
        num_complete = self._blocks.num_complete_checkpoints_of(request.request_id)
        num_full = request.num_computed_tokens // self._blocks.block_size
        return (num_full - num_complete) * self._blocks.block_size

    def add_candidate(self, request: Request) -> None:
        """The step filled blocks of the request: candidates for checkpointing."""
        if self._blocks.num_host_blocks:
            self._candidates[request.request_id] = request

    def start_checkpoints(self) -> None:
        """Begin the copies that the policy wants and the limits allow."""
        blocks = self._blocks
        if not self._candidates:
            return
        view = PoolView(blocks.num_blocks, blocks.num_free_blocks, blocks.num_checkpointed_blocks)
        left = min(self._policy.max_blocks(view), self._num_allowed, blocks.num_free_host_blocks)
        begun = 0
        for request in sorted(self._candidates.values(), key=self._policy.checkpoint_key) if left > 0 else ():
            now = blocks.checkpoint(request.request_id, request.num_computed_tokens, left - begun)
            begun += now
            self._counters[request.service_class].num_checkpointed_tokens += now * blocks.block_size
            if not blocks.num_uncheckpointed_blocks(request.request_id, request.num_computed_tokens):
                del self._candidates[request.request_id]
            if begun == left:
                break

    def reclaim(self, request: Request, num_needed: int, others: Iterable[Request]) -> None:
        """Free the request's device blocks; afterwards its computed tokens are those kept in host memory.

        Args:
            num_needed: blocks that must be free when this returns, as far as the request has them.
            others: requests on the device, whose host copies may be evicted.
        """
        blocks, request_id = self._blocks, request.request_id
        max_checkpoints = 0
        if self._policy.checkpoints_at_preemption and blocks.num_host_blocks:
            max_checkpoints = (
                blocks.num_blocks if CopyDirections.CHECKPOINT in self._blocking else self._num_allowed
            )
            uncopied = blocks.blocks_for(request.num_computed_tokens) - blocks.num_host_blocks_of(request_id)
            dropped = max(0, num_needed - (blocks.num_held_blocks(request_id) - uncopied))
            wanted = min(max_checkpoints, uncopied - dropped)
            if wanted > blocks.num_free_host_blocks:
                self._evict_host_copies(wanted, request, others)
        self._candidates.pop(request_id, None)
        had_copies = blocks.num_host_blocks_of(request_id) * blocks.block_size
        kept = blocks.reclaim(
            request_id, request.num_computed_tokens, num_needed=num_needed, max_checkpoints=max_checkpoints
        )
        request.num_computed_tokens = kept
        if kept:
            self._preempted[request_id] = request
            counters = self._counters[request.service_class]
            counters.num_reclaimed_tokens += kept
            counters.num_checkpointed_tokens += max(0, kept - had_copies)

    def can_begin_restore(self, request: Request) -> bool:
        """False while a blocking restore would have to wait for checkpoints in flight."""
        return CopyDirections.RESTORE not in self._blocking or self._blocks.is_checkpoint_complete(
            request.request_id
        )

    def begin_restore(self, request: Request) -> bool:
        """Allocate the request's device blocks and begin to restore them; True if it can run in this step."""
        del self._preempted[request.request_id]
        self._blocks.begin_restore(request.request_id)
        if CopyDirections.RESTORE not in self._blocking:
            self._restoring[request.request_id] = request
            return False
        self._blocks.restore(request.request_id, self._blocks.num_blocks)
        self._end_restore(request)
        return True

    def continue_restores(self) -> None:
        """Begin the next copies of requests that are being restored, in the order in which they began."""
        for request in self._restoring.values():
            if self._num_allowed <= 0:
                break
            self._blocks.restore(request.request_id, self._num_allowed)

    def take_restored(self) -> list[Request]:
        """Requests whose restore has completed since the last call."""
        done = [each for each in self._restoring.values() if self._blocks.is_restored(each.request_id)]
        for request in done:
            del self._restoring[request.request_id]
            self._end_restore(request)
        return done

    def cancel_restore(self, request: Request) -> None:
        """Free the device blocks; the KV in host memory stays."""
        del self._restoring[request.request_id]
        self._blocks.cancel_restore(request.request_id)
        self._preempted[request.request_id] = request

    def forget(self, request_id: RequestId) -> None:
        """Free all blocks of the request in both pools."""
        for requests in (self._candidates, self._preempted, self._restoring):
            requests.pop(request_id, None)
        self._blocks.release(request_id)

    def _end_restore(self, request: Request) -> None:
        restored = self._blocks.end_restore(request.request_id)
        assert restored == request.num_computed_tokens
        self._counters[request.service_class].num_restored_tokens += restored

    @property
    def _num_allowed(self) -> int:
        return max(0, self._max_copies_in_flight - self._blocks.num_copies_in_flight)

    def _evict_host_copies(self, num_needed: int, victim: Request, others: Iterable[Request]) -> None:
        """Free host blocks for the victim's KV, as far as the policy lets it evict copies of others."""
        blocks, eviction_key = self._blocks, self._policy.eviction_key
        holders = [(eviction_key(each, on_device=False), each) for each in self._preempted.values()]
        holders += [(eviction_key(each, on_device=True), each) for each in others if each is not victim]
        own_key = eviction_key(victim, on_device=False)
        holders = [holder for holder in holders if holder[0] > own_key]
        for _, holder in sorted(holders, key=lambda holder: holder[0], reverse=True):
            missing = num_needed - blocks.num_free_host_blocks
            if missing <= 0:
                break
            is_preempted = holder.request_id in self._preempted
            if not blocks.num_host_blocks_of(holder.request_id) or (
                is_preempted
                and not blocks.is_checkpoint_complete(holder.request_id)  # a copy still writes them
            ):
                continue
            left = blocks.evict_host_blocks(holder.request_id, missing)
            if is_preempted:
                holder.num_computed_tokens = left
                if not left:
                    del self._preempted[holder.request_id]
            else:
                self._candidates[holder.request_id] = holder


def blocking_copies(config: SchedulerConfig) -> CopyDirections:
    """The directions whose copies a step waits for."""
    blocking = CopyDirections.NONE
    if config.checkpointing == "swap":
        blocking |= CopyDirections.CHECKPOINT
    if config.kv_restore == "blocking":
        blocking |= CopyDirections.RESTORE
    return blocking
