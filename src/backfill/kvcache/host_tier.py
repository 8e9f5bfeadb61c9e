"""What of the requests' KV is in host memory: what is copied there, what comes back, and when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.core.plan import CopyDirections
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.kvcache.block_manager import BlockManager
from backfill.kvcache.checkpointing import CheckpointPolicy, PoolView


class HostTier:
    """Joins requests, the block manager and a checkpoint policy.

    After a step its requests are marked with ``add_candidate``; ``start_checkpoints`` then begins the copies
    that the policy wants, just before the next plan (ConServe, section 5). Preempted requests are reclaimed
    here and come back here, a part before each step, so that a long one never holds up what runs.

    Args:
        counters: what is checkpointed, reclaimed and restored is added to them.
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
        self._most_under_way = 0

    @property
    def restoring(self) -> Collection[Request]:
        """Requests that hold device blocks and are being copied back to them."""
        return self._restoring.values()

    def allow_copies(self, num_blocks: int) -> None:
        """No copy begins from now on that brings those under way above this."""
        self._most_under_way = num_blocks

    def has_host_copy(self, request: Request) -> bool:
        """The request is off the device and has KV in host memory."""
        return request.request_id in self._preempted

    def lost_tokens(self, request: Request) -> int:
        """Tokens that preempting the request might lose, but for those of a last block that is not full.

        A copy under way counts as none: its block is not free before it is complete.
        """
        if not self._policy.checkpoints_at_preemption or not self._blocks.num_host_blocks:
            return request.num_computed_tokens
        if CopyDirections.CHECKPOINT in self._blocking:
            return 0
        saved = self._blocks.num_checkpointed_blocks_of(request.request_id)
        num_full = request.num_computed_tokens // self._blocks.block_size
        return (num_full - saved) * self._blocks.block_size

    def add_candidate(self, request: Request) -> None:
        """The request has full blocks that it had not before the step: candidates for copying."""
        if self._blocks.num_host_blocks:
            self._candidates[request.request_id] = request

    def start_checkpoints(self) -> None:
        """Begin the copies that the policy wants and the limits allow."""
        blocks = self._blocks
        if not self._candidates:
            return
        view = PoolView(blocks.num_blocks, blocks.num_free_blocks, blocks.num_checkpointed_blocks)
        left = min(self._policy.num_blocks(view), self._num_allowed, blocks.num_free_host_blocks)
        begun = 0
        for request in sorted(self._candidates.values(), key=self._policy.order_key) if left > 0 else ():
            now = blocks.checkpoint(request.request_id, request.num_computed_tokens, left - begun)
            begun += now
            self._counters[request.service_class].num_checkpointed_tokens += now * blocks.block_size
            if not blocks.num_blocks_without_copy(request.request_id, request.num_computed_tokens):
                del self._candidates[request.request_id]
            if begun == left:
                break

    def reclaim(self, request: Request, needed: int, others: Iterable[Request]) -> None:
        """Take the request's device blocks; afterwards its computed tokens are those kept in host memory.

        Args:
            needed: blocks that must be free at once, as far as it has them.
            others: requests on the device, whose copies may have to give way.
        """
        blocks, request_id = self._blocks, request.request_id
        may_save = 0
        if self._policy.checkpoints_at_preemption and blocks.num_host_blocks:
            may_save = blocks.num_blocks if CopyDirections.CHECKPOINT in self._blocking else self._num_allowed
            uncopied = blocks.blocks_for(request.num_computed_tokens) - blocks.num_host_blocks_of(request_id)
            dropped = max(0, needed - (blocks.num_held_blocks(request_id) - uncopied))
            wanted = min(may_save, uncopied - dropped)
            if wanted > blocks.num_free_host_blocks:
                self._evict_host_copies(wanted, request, others)
        self._candidates.pop(request_id, None)
        had_copies = blocks.num_host_blocks_of(request_id) * blocks.block_size
        kept = blocks.reclaim(request_id, request.num_computed_tokens, needed=needed, may_save=may_save)
        request.num_computed_tokens = kept
        if kept:
            self._preempted[request_id] = request
            counters = self._counters[request.service_class]
            counters.num_reclaimed_tokens += kept
            counters.num_checkpointed_tokens += max(0, kept - had_copies)

    def can_begin_restore(self, request: Request) -> bool:
        """False while it would have to wait for copies to the host that are still under way."""
        return CopyDirections.RESTORE not in self._blocking or self._blocks.is_saved(request.request_id)

    def begin_restore(self, request: Request) -> bool:
        """Give the request device blocks and begin to fill them; True if it can be served at once."""
        del self._preempted[request.request_id]
        self._blocks.begin_restore(request.request_id)
        if CopyDirections.RESTORE not in self._blocking:
            self._restoring[request.request_id] = request
            return False
        self._blocks.restore(request.request_id, self._blocks.num_blocks)
        self._end_restore(request)
        return True

    def continue_restores(self) -> None:
        """Begin the next copies of requests that are being restored, the first of them first."""
        for request in self._restoring.values():
            if self._num_allowed <= 0:
                break
            self._blocks.restore(request.request_id, self._num_allowed)

    def take_restored(self) -> list[Request]:
        """Requests that are wholly back since this was last called."""
        done = [each for each in self._restoring.values() if self._blocks.is_restored(each.request_id)]
        for request in done:
            del self._restoring[request.request_id]
            self._end_restore(request)
        return done

    def cancel_restore(self, request: Request) -> None:
        """Take the device blocks back; what the request has in host memory stays."""
        del self._restoring[request.request_id]
        self._blocks.cancel_restore(request.request_id)
        self._preempted[request.request_id] = request

    def forget(self, request_id: RequestId) -> None:
        """The request has ended: take back all it has in both pools."""
        for requests in (self._candidates, self._preempted, self._restoring):
            requests.pop(request_id, None)
        self._blocks.release(request_id)

    def _end_restore(self, request: Request) -> None:
        restored = self._blocks.end_restore(request.request_id)
        assert restored == request.num_computed_tokens
        self._counters[request.service_class].num_restored_tokens += restored

    @property
    def _num_allowed(self) -> int:
        return max(0, self._most_under_way - self._blocks.num_copies_under_way)

    def _evict_host_copies(self, num_blocks: int, victim: Request, others: Iterable[Request]) -> None:
        """Free host blocks for the victim's KV as far as others must give way to it."""
        blocks, drop_key = self._blocks, self._policy.drop_key
        holders = [(drop_key(each, on_device=False), each) for each in self._preempted.values()]
        holders += [(drop_key(each, on_device=True), each) for each in others if each is not victim]
        own_key = drop_key(victim, on_device=False)
        holders = [holder for holder in holders if holder[0] > own_key]
        for _, holder in sorted(holders, key=lambda holder: holder[0], reverse=True):
            missing = num_blocks - blocks.num_free_host_blocks
            if missing <= 0:
                break
            is_preempted = holder.request_id in self._preempted
            if not blocks.num_host_blocks_of(holder.request_id) or (
                is_preempted and not blocks.is_saved(holder.request_id)  # a copy still writes them
            ):
                continue
            left = blocks.drop_copies(holder.request_id, missing)
            if is_preempted:
                holder.num_computed_tokens = left
                if not left:
                    del self._preempted[holder.request_id]
            else:
                self._candidates[holder.request_id] = holder


def blocking_copies(config: SchedulerConfig) -> CopyDirections:
    """The directions of which a step waits for its copies."""
    blocking = CopyDirections.NONE
    if config.checkpointing == "swap":
        blocking |= CopyDirections.CHECKPOINT
    if config.kv_restore == "blocking":
        blocking |= CopyDirections.RESTORE
    return blocking
