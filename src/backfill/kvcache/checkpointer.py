"""Which content is copied to the host, when, and at the cost of which other copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import islice

from backfill.core.block import is_reversed
from backfill.core.counters import ClassCounters
from backfill.core.request import OrderKey, Request, RequestId, ServiceClass
from backfill.kvcache.checkpointing import Candidate, CheckpointPolicy, PoolView, UserCheckpoints
from backfill.kvcache.content import Block, BlockState, Content
from backfill.kvcache.store import ContentStore
from backfill.kvcache.table import BlockTable


def urgency(candidate: tuple[Request, BlockTable]) -> tuple[int, OrderKey]:
    """The greater, the sooner it is checkpointed."""
    return candidate[0].priority_level.value, candidate[0].order_key


class Saving(Enum):
    """When what preempted requests want is copied to the host."""

    NEVER = "never"
    BESIDE_STEPS = "beside steps"  # as far as the limits of copies allow
    AT_PREEMPTION = "at preemption"  # which waits for the copies
    WHEN_TAKEN = "when taken"  # as other KV is about to overwrite it, which waits (BROS, section 5.2)

    @property
    def is_waited_for(self) -> bool:
        return self in (Saving.AT_PREEMPTION, Saving.WHEN_TAKEN)


class Checkpointer:
    """Writes content back to host memory, just before each plan (ConServe, section 5).

    Wanted content goes first, then the least urgent request's: that one is preempted first.

    Args:
        policy: says how much is checkpointed of what is in use.

    Attributes:
        taken_share: see ``PoolView``. All until something is known; it is forgotten as the pool is filled
            anew.
        saving: what the policy and waiting for copies mean for what is preempted.
        num_copied_slots: of blocks that two requests share, copied to the host.
    """

    def __init__(
        self,
        store: ContentStore,
        policy: CheckpointPolicy,
        block_size: int,
        counters: Mapping[ServiceClass, ClassCounters],
    ) -> None:
        self._store = store
        self._block_size = block_size
        self._policy = policy
        self._counters = counters
        waits, at_preemption = store.ledger.checkpoints_block, policy.checkpoints_at_preemption
        self.saving = Saving.NEVER
        if store.host.num_blocks and waits:
            self.saving = Saving.AT_PREEMPTION if at_preemption else Saving.WHEN_TAKEN
        elif store.host.num_blocks and at_preemption:
            self.saving = Saving.BESIDE_STEPS
        self._candidates: dict[RequestId, tuple[Request, BlockTable]] = {}
        self.taken_share = 1.0
        self.num_copied_slots = 0
        self._num_taken = 0

    def observe_filled(self, num_filled: int) -> None:
        """So many blocks became full since the last call."""
        store = self._store
        num_taken, self._num_taken = store.num_wanted_evictions - self._num_taken, store.num_wanted_evictions
        self.taken_share += (num_taken - self.taken_share * num_filled) / store.device.num_blocks

    def add_candidate(self, request: Request, table: BlockTable) -> None:
        """The request is on the device, and has full blocks that may have no host copy."""
        if self._store.host.num_blocks:
            self._candidates[request.request_id] = request, table

    def remove_candidate(self, request_id: RequestId) -> None:
        self._candidates.pop(request_id, None)

    def start(self, max_copies: int, copy_cost: float) -> None:
        """Begin copies, up to the limit: of what preempted requests want, then what the policy chooses.

        Args:
            copy_cost: see ``PoolView``.
        """
        store = self._store
        left = max_copies - store.ledger.num_in_flight
        if left <= 0 or not store.host.num_blocks:
            return
        counts, num_pinned = store.device.counts, store.device.num_pinned
        if self.saving is Saving.BESIDE_STEPS:
            left -= self._checkpoint_wanted(BlockState.WANTED, left)
            left -= self._checkpoint_wanted(BlockState.WANTED_ONLINE, left)
        num_copied = counts[BlockState.REFERENCED_COPIED] + counts[BlockState.ONLINE_COPIED]
        num_copied += num_pinned[BlockState.SECURED]
        num_used = counts[BlockState.REFERENCED] + counts[BlockState.ONLINE] + num_copied
        num_used += counts[BlockState.WANTED] + counts[BlockState.WANTED_ONLINE]
        num_blocks = store.device.num_blocks
        num_free = max(0, num_blocks - num_used)  # less than 0 while the pool shrinks
        view = PoolView(num_blocks, num_free, num_copied, self.taken_share, copy_cost)
        left = min(left, self._policy.max_blocks(view))
        if left <= 0 or not self._candidates:
            return
        for (request, table), most in self._chosen(left):
            left -= self._checkpoint_leading(request, table, min(left, most))
            if not left:
                break

    def _chosen(self, left: int) -> Iterable[tuple[tuple[Request, BlockTable], int]]:
        """Candidates in the order of their copies, and the most blocks of each."""
        candidates = self._candidates
        if not (isinstance(self._policy, UserCheckpoints) and self._policy.chooses):
            return [(each, left) for each in sorted(candidates.values(), key=urgency, reverse=True)]
        evictions = self._store.num_host_evictions
        views = [
            Candidate(name, request.service_class, table.num_known, table.count_copied(evictions))
            for name, (request, table) in candidates.items()
        ]
        chosen = dict(
            self._policy.choose([each for each in views if each.num_checkpointed < each.num_blocks])
        )
        return [(candidates[name], count) for name, count in chosen.items()]

    def _checkpoint_wanted(self, state: BlockState, max_blocks: int) -> int:
        """Begin to checkpoint what was preempted, the first block of what was last preempted first.

        A block's copy is worth nothing without those before it. Returns how many.
        """
        chosen = list(islice(self._store.device.reverse(state), max_blocks))
        for begun, block in enumerate(chosen):
            assert block.content is not None
            if not self.checkpoint(block.content):
                return begun
        return len(chosen)

    def swap_out(self, wanted: Iterable[Content]) -> None:
        """Copy what a preempted request wants, as far as the host has blocks, if that is done at once."""
        if self.saving is Saving.AT_PREEMPTION:
            for content in wanted:
                if content.host is None and content.device is not None and not self.checkpoint(content):
                    break

    def save_before_take(self, num_blocks: int, kept: Iterable[Content] = ()) -> None:
        """Lazy checkpoints: of what an allocation of so many blocks would lose, in the order of its taking.

        Args:
            kept: is about to be restored, so its host blocks are not taken.
        """
        if self.saving is not Saving.WHEN_TAKEN:
            return
        device = self._store.device
        num_lost = num_blocks - device.available(BlockState.SECURED)
        if num_lost <= 0:
            return
        for content in kept:
            assert content.host is not None
            self._store.ledger.keep_host(content.host)
        for state in (BlockState.WANTED, BlockState.WANTED_ONLINE):
            for block in device.next_taken(state, num_lost):
                assert block.content is not None
                num_lost -= self.checkpoint(block.content)

    def checkpoint(self, content: Content) -> bool:
        """Begin to copy content to the host; False if the host has no block for it.

        False also while the block waits for the next plan's blocking restore, which follows its checkpoints.
        """
        block = content.device
        assert block is not None
        if block.num_copies:
            return False
        assert block.is_valid
        if content.host is not None or block.is_guest:
            return self.checkpoint_slots(content, 0)
        host = self._take_host_block(content, block)
        if host is None:
            return False
        self._store.ledger.checkpoint(block, host)
        self._counters[content.service_class].num_checkpointed_tokens += content.num_tokens
        return True

    def checkpoint_slots(self, tail: Content, first: int) -> bool:
        """Begin to copy a tail's tokens from the first one on, as far as the host lacks them; False as above.

        Only offline requests' tails are copied in part: their blocks are filled from the last slot.
        """
        block, host = tail.device, tail.host
        assert block is not None and is_reversed(block.ref)
        if host is None:
            host = self._take_host_block(tail, block)
            if host is None:
                return False
            tail.num_unsaved = tail.num_tokens
        num = tail.num_unsaved - first
        self._store.ledger.checkpoint(block, host, (self._block_size - tail.num_unsaved, num))
        tail.num_unsaved = first
        self.num_copied_slots += num
        self._store.update(tail)
        self._counters[tail.service_class].num_checkpointed_tokens += num
        return True

    def _take_host_block(self, content: Content, block: Block) -> Block | None:
        """A host block for the content of this device block; None if the host has none for it."""
        host_pool, limit = self._store.host, BlockState.UNWANTED
        if not block.num_refs:  # it is about to be taken, so it is worth more than the copy of a running one
            is_online = content.service_class is ServiceClass.ONLINE
            limit = BlockState.WANTED if is_online else BlockState.SECURED
        if not (host_pool.num_empty or host_pool.available(limit)):
            return None
        (host,) = host_pool.take(1, limit)
        host.content, content.host = content, host
        return host

    def _checkpoint_leading(self, request: Request, table: BlockTable, max_blocks: int) -> int:
        """Begin to checkpoint the next full blocks of a request on the device; returns how many."""
        begun, num_host_evictions = 0, self._store.num_host_evictions
        while table.count_copied(num_host_evictions) < table.num_known:
            content = table.blocks[table.num_copied].content
            assert content is not None
            if begun == max_blocks or not self.checkpoint(content):
                return begun
            begun += 1
        del self._candidates[request.request_id]
        return begun
