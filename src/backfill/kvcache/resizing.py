"""A device pool that grows and shrinks while requests use it: what is beyond its end moves, or is evicted."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from backfill.core.block import BlockMove
from backfill.core.request import RequestId
from backfill.kvcache.content import Block, BlockState
from backfill.kvcache.store import ContentStore
from backfill.kvcache.table import BlockTable


class Resizing:
    """Moves KV out of the blocks that the device's pool is to lose.

    To grow takes effect at once. To shrink takes effect for allocations at once, and a *drain* follows: each
    block beyond the end gets the memory of one before it. That is a copy on the device (``BlockMove``), in
    bookkeeping an exchange of indices, so content, references and the order of eviction stay as they are.
    Cached content is evicted where no block of less worth can be taken for it.
    """

    def __init__(self, store: ContentStore, tables: Mapping[RequestId, BlockTable]) -> None:
        self._store = store
        self._tables = tables
        self._moves: list[BlockMove] = []

    @property
    def max_num_blocks(self) -> int:
        return len(self._store.device.blocks)

    @property
    def num_draining(self) -> int:
        """Blocks beyond the end that are still in use."""
        return self._store.device.num_draining

    def num_kept(self, limit: int) -> int:
        """Those among them that are not evicted up to this state: they need the memory of others."""
        device = self._store.device
        return sum(
            block.num_refs > 0 or limit < block.state < BlockState.COPYING
            for block in device.blocks[device.num_blocks :]
        )

    @property
    def num_moves(self) -> int:
        """Moves that the next plan has."""
        return len(self._moves)

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks, also during a drain. Every request must fit them alone."""
        assert 0 < num_blocks <= self.max_num_blocks
        if num_blocks != self._store.device.num_blocks:
            self._store.device.resize(num_blocks)

    def holds(self, request_id: RequestId) -> bool:
        """The request's table names blocks beyond the end."""
        table, end = self._tables.get(request_id), self._store.device.num_blocks
        return table is not None and any(block.index >= end for block in table.blocks)

    def drain(self, limit: int, max_moves: int, in_flight: Collection[RequestId] = ()) -> None:
        """Empty blocks beyond the end, as far as others can be taken, before anything else of a plan.

        Blocks in a copy wait for its end, and those of requests in flight for their step's. Nothing is done
        while copies of the next plan are queued: moves come before them. Slices that are suspended must not
        use blocks beyond the end.

        Args:
            limit: cached content up to this state is evicted.
            in_flight: requests in steps that have not ended.
        """
        store, device = self._store, self._store.device
        if not device.num_draining or store.ledger.has_begun:
            return
        moved, held = set[Block](), set[Block]()
        for request_id in in_flight:
            held.update(self._tables[request_id].blocks)
        for block in device.blocks[device.num_blocks :]:
            if block.state is BlockState.ABSENT or _is_copied(block):
                continue
            if block in held or block.peer in held:
                continue
            is_cached = block.num_refs == 0
            # Of two cached blocks the one that would be taken first goes.
            below = min(limit, block.state - 1) if is_cached else limit
            if device.available(below) > 0:
                if len(moved) == max_moves:
                    break
                (taken,) = device.take(1, below)
                self._moves.append(BlockMove(block.index, taken.index))
                device.exchange(block, taken)
                moved.add(block)
            elif is_cached and block.state <= limit:
                device.evict_beyond(block)
        moved.update([block.peer for block in moved if block.peer is not None])
        for table in self._tables.values() if moved else ():
            if not moved.isdisjoint(table.blocks):
                table.renew_refs()

    def take_moves(self) -> tuple[BlockMove, ...]:
        """The next plan's moves, in their order. They are made before its copies begin."""
        moves = tuple(self._moves)
        self._moves.clear()
        return moves


def _is_copied(block: Block) -> bool:
    return block.num_copies > 0 or (block.peer is not None and block.peer.num_copies > 0)
