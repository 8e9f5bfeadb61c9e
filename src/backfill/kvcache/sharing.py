"""Blocks that an online and an offline request fill from their two ends (BROS, section 5)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backfill.core.block import is_reversed, pack_block_ref
from backfill.core.request import Request, ServiceClass
from backfill.kvcache.checkpointer import Checkpointer, Saving
from backfill.kvcache.content import Block, BlockState, Content, Match
from backfill.kvcache.free_ends import FreeEnd, FreeEnds
from backfill.kvcache.last_blocks import LastBlocks
from backfill.kvcache.store import ContentStore
from backfill.kvcache.table import BlockTable

_LEAST_FREE = 4  # one slot in so many must stay free, for a running request's block to be entered


class SharedLastBlocks(LastBlocks):
    """The two ends of shared blocks, who fills them, and what one overwrites of the other.

    A shared block has two ``Block`` objects that are each other's ``peer``. The pool knows the one that is
    referenced; the other one is its guest. A guest is in the table of a running request, or holds the tail of
    a preempted offline one, or nothing that is of use any more but a copy still reads.

    Only last blocks are shared, whose requests' known tokens end in them, so each end grows by a token a
    step. While they do not meet, nothing is copied. The offline request of the two is preempted a step before
    an online token would be written over one of its own. Its tail stays, and loses its last tokens one by
    one. It is copied to the host as what other preempted requests want, but by its slots; lazy checkpoints
    copy those that are overwritten (section 5.2). What the host has no block for is computed again.
    """

    is_on = True

    def __init__(self, store: ContentStore, checkpointer: Checkpointer, block_size: int) -> None:
        super().__init__(store)
        self._checkpointer = checkpointer
        self._block_size = block_size
        self._owners: dict[Block, Request] = {}
        self._free_ends = FreeEnds(block_size)
        store.device.on_updated = self._free_ends.on_updated

    # What becomes of a request.

    def resume(self, request: Request, table: BlockTable, match: Match) -> Content | None:
        """See ``LastBlocks``. The tail comes from the host if the other end of its device block is in use."""
        self._free_ends.remove(request.request_id)
        tail = super().resume(request, table, match)
        block = None if tail is None else tail.device
        if tail is not None and block is not None and block.peer is not None:
            tail.device, block.content, tail.num_lost = None, None, 0
            self._part(block)
            self._store.update(tail)
        return tail

    def restore_lost(self, tail: Content) -> None:
        """See ``LastBlocks``. It is copied into the same slots."""
        block, host, ledger = tail.device, tail.host, self._store.ledger
        if tail.num_lost and block is not None and block.is_valid:
            assert host is not None
            ledger.restore(block, host, False, (self._block_size - tail.num_tokens, tail.num_lost))
            if ledger.restores_block:
                tail.num_lost = 0

    def start(self, request: Request, table: BlockTable) -> None:
        """See ``LastBlocks``. Its last block may be entered."""
        super().start(request, table)
        self._free_ends.add(request, table)

    def grown(self, request: Request) -> None:
        self._free_ends.update(request.request_id)

    def preempt(
        self, request: Request, table: BlockTable, contents: Sequence[Content], num_tokens: int
    ) -> None:
        """See ``LastBlocks``. An online request leaves nothing in the block of a running offline one."""
        self._free_ends.remove(request.request_id)
        is_offline = request.service_class is ServiceClass.OFFLINE
        peer = table.blocks[len(contents)].peer if num_tokens else None
        is_in_use = peer is not None and peer.num_refs > 0
        super().preempt(request, table, contents, 0 if is_in_use and not is_offline else num_tokens)
        if is_offline:
            self._free_ends.add_preempted(request, table)

    def forget(self, request: Request, table: BlockTable) -> None:
        self._free_ends.remove(request.request_id)
        super().forget(request, table)

    def release(self, table: BlockTable) -> None:
        if table.blocks and table.blocks[-1].peer is not None:
            self._leave(table.blocks[-1])

    # Blocks to enter.

    def may_pair(self, request: Request) -> bool:
        """See ``LastBlocks``."""
        return self._free_ends.may_pair(request)

    def can_enter(
        self, request: Request, num_tokens: int, limit: int, matched: Collection[Content] = ()
    ) -> bool:
        """See ``find``."""
        return self.find(request, num_tokens, limit, True, matched) is not None

    def find(
        self,
        request: Request,
        num_tokens: int,
        beyond: int,
        may_lose: bool,
        matched: Collection[Content] = (),
    ) -> FreeEnd | None:
        """A block to enter for the last of those that a request's first ``num_tokens`` tokens fill.

        It is the one that costs least. At first no KV is overwritten: preempted requests' last blocks come
        before those of running ones, because no request has to be preempted for it soon. Of each kind the
        block with the most free slots is taken (BROS's ``FindPreemptBlock``), unless its offline request
        is long: where memory is full, each of the online requests would enter another one's block, and each
        of these would give way, though the blocks of one suffice for all. Then an online request's tokens
        overwrite a preempted one's last tokens: better those that have a host copy, then as few as possible.

        Args:
            beyond: only blocks that an allocation up to this state may not take.
            may_lose: what is overwritten need not have a host copy.
            matched: what the request is about to reference, which is not entered.
        """
        size = self._block_size
        num_free = size - (request.num_tokens - (num_tokens - 1) // size * size)
        if num_free <= 0:
            return None
        ends, is_online = self._free_ends, request.service_class is ServiceClass.ONLINE
        states = [state for state in (BlockState.SECURED, BlockState.WANTED) if is_online and state > beyond]
        best = ends.preempted(states, matched)
        if best is not None and best.num_slots <= num_free:
            return best
        running = None
        if ends.may_pair(request):
            running = ends.running(ServiceClass.OFFLINE if is_online else ServiceClass.ONLINE)
        if running is not None and running.num_slots + max(1, size // _LEAST_FREE) <= num_free:
            return running
        saved = ends.preempted([state for state in states if state is BlockState.SECURED], matched)
        return best if saved is None and may_lose else saved

    def enter_if_short(
        self, request: Request, num_tokens: int, missing: int, limit: int
    ) -> tuple[Block, ...]:
        """See ``find``.

        A running request's block is not entered while one can be taken that loses nothing: that one's request
        is restored, which costs less than to give way, a few steps later, with all that a request holds.
        """
        available = self._store.device.available
        if missing <= available(BlockState.UNWANTED):
            return ()
        beyond = limit if missing > available(limit) else -1
        loses_kv = missing > available(BlockState.SECURED)
        end = self.find(request, num_tokens, beyond, loses_kv)
        if end is None or (end.owner is not None and not loses_kv):
            return ()
        return (self._enter(request, num_tokens, end),)

    def _enter(self, request: Request, num_tokens: int, end: FreeEnd) -> Block:
        """The last block for the request's first ``num_tokens`` tokens is the other end of this one."""
        is_online = request.service_class is ServiceClass.ONLINE
        first = end.block
        if end.content is not None and end.table is not None:
            self._store.become_tail(end.content)
            end.table.tail = end.content
        assert is_reversed(first.ref) is is_online
        entered = Block(first.index, pack_block_ref(first.index, not is_online), num_refs=1)
        entered.num_online_refs, entered.is_guest = int(is_online), True
        entered.num_slots = request.num_tokens - (num_tokens - 1) // self._block_size * self._block_size
        first.num_slots = end.num_slots
        first.peer, entered.peer = entered, first
        if end.owner is None:
            self._store.device.replace(first, entered)
        else:
            self._own(end.owner, first)
        self._own(request, entered)
        self.num_entered += 1
        num_over = entered.num_slots + first.num_slots - self._block_size
        if num_over > 0:
            self._overwrite(first, num_over)
        return entered

    def _own(self, request: Request, block: Block) -> None:
        self.blocks[request.request_id] = block
        self._owners[block] = request

    # Growth.

    def to_preempt(self, request: Request, num_tokens: int) -> Request | None:
        """See ``LastBlocks``.

        An offline request leaves a slot free for the next online token. An online one that takes the last
        free slot preempts the offline one, so that its tail can be copied beside this step.
        """
        block = self.blocks.get(request.request_id)
        if block is None or block.peer is None or not block.peer.num_refs:
            return None
        wanted = self._wanted(request, num_tokens)
        if wanted <= block.num_slots or wanted + block.peer.num_slots < self._block_size:
            return None
        return self._owners[block.peer] if request.service_class is ServiceClass.ONLINE else request

    def reserve_slots(self, request: Request, num_tokens: int) -> bool:
        """See ``LastBlocks``. It writes over a tail that has these slots."""
        block = self.blocks.get(request.request_id)
        if block is None:
            return True
        wanted, peer = self._wanted(request, num_tokens), block.peer
        assert peer is not None
        if wanted > block.num_slots:
            num_over = wanted + peer.num_slots - self._block_size
            if num_over > 0:
                assert not peer.num_refs, "a running request's KV is overwritten"
                if peer.num_copies:
                    return False
                self._overwrite(peer, num_over)
            block.num_slots = wanted
        return True

    def _wanted(self, request: Request, num_tokens: int) -> int:
        table = self._free_ends.table_of(request.request_id)
        return min(num_tokens - (len(table.blocks) - 1) * self._block_size, self._block_size)

    def _overwrite(self, end: Block, num_slots: int) -> None:
        """A tail loses its last tokens on the device."""
        tail = end.content
        assert tail is not None
        left = end.num_slots = end.num_slots - num_slots
        is_saved = tail.host is not None and tail.num_unsaved <= left
        if not is_saved and self._checkpointer.saving.is_waited_for:
            is_saved = self._checkpointer.checkpoint_slots(tail, left)
        self.num_overwritten += num_slots
        if is_saved:
            tail.num_lost += num_slots
        else:
            self._store.truncate(tail, left)
        if not left:
            self._part(end)
            tail.device, end.content, tail.num_lost = None, None, 0
            self._store.update(tail)

    def begin_copies(self, max_copies: int) -> None:
        """See ``LastBlocks``. They are in guests, which the pool does not know."""
        checkpointer, ledger = self._checkpointer, self._store.ledger
        if checkpointer.saving is not Saving.BESIDE_STEPS:
            return  # copied when they are left, or in the step that overwrites them
        for block in self.blocks.values():
            assert block.peer is not None
            tail = block.peer.content
            if tail is None or tail.host is not None:
                continue
            if ledger.num_in_flight >= max_copies:
                break
            checkpointer.checkpoint(tail)

    def end_copies(self) -> None:
        """See ``LastBlocks``. Ends that copies alone kept are free."""
        for block in list(self.blocks.values()):
            peer = block.peer
            if peer is not None and not (peer.num_refs or peer.num_copies or peer.content):
                self._part(peer)

    # Leaving.

    def _leave(self, block: Block) -> None:
        """The request of one end is about to drop its reference; what it leaves there is its content."""
        peer, tail = block.peer, block.content
        assert peer is not None
        del self.blocks[self._owners.pop(block).request_id]
        if tail is not None and not peer.num_refs:  # one tail without a running request beside it is kept
            if peer.content is not None and not peer.num_copies:
                self._drop(peer.content)
                return
            self._drop(tail)
            tail = None
        if not block.is_guest:
            self._store.device.replace(block, peer)
        if tail is None:
            self._part(block)
        else:
            block.num_slots = tail.num_tokens

    def _drop(self, tail: Content) -> None:
        block = tail.device
        super()._drop(tail)
        if block is not None and block.is_guest and not block.num_refs and not block.num_copies:
            self._part(block)

    def _may_return(self, tail: Content) -> bool:
        """A tail in a block whose other end is in use is of use only if the host has all of it."""
        block, host = tail.device, tail.host
        if not tail.is_writable:
            return False
        if block is None or (block.peer is None and (not tail.num_lost or not block.is_valid)):
            return True
        if block.peer is None:
            return host is not None and host.is_valid
        return _is_saved(tail) and not block.num_copies

    def _part(self, block: Block) -> None:
        """The peer has the memory for itself."""
        peer = block.peer
        assert peer is not None
        block.peer = peer.peer = None
        owner = self._owners.pop(peer, None)
        if owner is not None:
            del self.blocks[owner.request_id]
            self._free_ends.update(owner.request_id)


def _is_saved(content: Content) -> bool:
    """All of it is in host memory too."""
    return content.host is not None and content.host.is_valid and not content.num_unsaved
