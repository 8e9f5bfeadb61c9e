"""Blocks of the KV cache, counted by what they are used for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from backfill.core.counters import TierBlocks
from backfill.core.request import Request, RequestId
from backfill.kvcache.content import Block, BlockState, Evictable, Match
from backfill.kvcache.store import ContentStore
from backfill.kvcache.table import BlockTable

_CACHED = (BlockState.UNNEEDED, BlockState.UNWANTED, BlockState.PROTECTED)  # of the host's pool


class BlockCounts:
    """Counts of now, and what they would be after preemptions. It changes nothing.

    ``empty``, ``cached``, ``cached_with_copy``, ``protected`` and ``referenced`` sum to the device's pool,
    with the blocks that have yet to leave one that shrinks.
    """

    def __init__(self, store: ContentStore, tables: Mapping[RequestId, BlockTable], block_size: int) -> None:
        self._device, self._host = store.device, store.host
        self._tables = tables
        self._block_size = block_size

    def _sum(self, *states: BlockState) -> int:
        return sum([self._device.counts[state] for state in states])

    @property
    def empty(self) -> int:
        """Without content."""
        return self._device.counts[BlockState.EMPTY]

    @property
    def cached_with_copy(self) -> int:
        """Wanted by preempted requests, with a host copy, complete or in flight."""
        return self._device.counts[BlockState.SECURED]

    @property
    def protected(self) -> int:
        """Cached for online requests, so that offline ones may not take them."""
        return self._device.counts[BlockState.PROTECTED]

    @property
    def cached(self) -> int:
        """Other blocks that no table names."""
        return self._sum(
            BlockState.UNNEEDED, BlockState.UNWANTED, BlockState.WANTED, BlockState.WANTED_ONLINE
        )

    @property
    def referenced(self) -> int:
        """In block tables, or without content but still in a copy."""
        return sum(self._device.counts[BlockState.COPYING : BlockState.ABSENT])

    @property
    def online(self) -> int:
        """Referenced by online requests."""
        return self._sum(BlockState.ONLINE, BlockState.ONLINE_COPIED)

    @property
    def offline(self) -> int:
        """Referenced by offline requests only."""
        return self._sum(BlockState.REFERENCED, BlockState.REFERENCED_COPIED)

    @property
    def wanted(self) -> int:
        """Referenced by no request, with KV that preempted ones will come back for."""
        return self._sum(BlockState.SECURED, BlockState.WANTED, BlockState.WANTED_ONLINE)

    @property
    def checkpointed(self) -> int:
        """Referenced, with a host copy, complete or in flight."""
        return self._sum(BlockState.REFERENCED_COPIED, BlockState.ONLINE_COPIED)

    @property
    def reclaimable(self) -> int:
        """Referenced by offline requests only, with a complete host copy."""
        copied = BlockState.REFERENCED_COPIED
        return self._device.counts[copied] - self._device.num_pinned[copied]

    @property
    def host_usage_frac(self) -> float:
        """Share of the host's blocks that are in copies, or hold what requests use or will come back for."""
        counts, num_blocks = self._host.counts, self._host.num_blocks
        if not num_blocks:
            return 0.0
        return 1.0 - sum(counts[state] for state in (BlockState.EMPTY, *_CACHED)) / num_blocks

    @property
    def device_by_use(self) -> TierBlocks:
        """A block that two requests share is counted once, with its first one."""
        cached = self.cached + self.cached_with_copy + self.protected
        empty = self.empty + self._device.counts[BlockState.COPYING]
        return TierBlocks(self.online, self.offline, cached, empty)

    @property
    def host_by_use(self) -> TierBlocks:
        """A copy of what a running request references is of that request's class."""
        counts = self._host.counts
        online_copies = self._device.counts[BlockState.ONLINE_COPIED]
        return TierBlocks(
            online=counts[BlockState.WANTED_ONLINE] + online_copies,
            offline=counts[BlockState.WANTED] + counts[BlockState.SECURED] - online_copies,
            cached=sum(counts[each] for each in _CACHED),
            empty=counts[BlockState.EMPTY] + counts[BlockState.COPYING],
        )

    def available(self, limit: Evictable) -> int:
        """That an allocation can have now."""
        return self._device.available(limit)

    @property
    def becoming_available(self) -> int:
        """That an allocation can have, losing no KV, once the copies on them complete."""
        return self._device.num_becoming_available

    def held(self, request_id: RequestId) -> int:
        """In the request's table."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table.blocks)

    def missing(self, requests: Iterable[Request]) -> int:
        """That all these requests lack for their known tokens."""
        size, tables = self._block_size, self._tables
        missing = [-(-each.num_tokens // size) - len(tables[each.request_id].blocks) for each in requests]
        return sum([count for count in missing if count > 0])

    def would_free(
        self, num_blocks: int, request_ids: Collection[RequestId], match: Match, limit: Evictable
    ) -> bool:
        """Whether an allocation could have so many blocks more if all these requests were preempted."""
        left, matched = num_blocks, {content.device for content in match.contents}
        for request_id in request_ids:
            # In one table only, and neither shared nor protected: counted without looking at the others.
            left -= len(
                [
                    block
                    for block in self._tables[request_id].blocks
                    if block.num_refs == 1
                    and block.peer is None
                    and not block.num_copies
                    and (block.content is None or not block.content.is_protected)
                    and block not in matched
                ]
            )
            if left <= 0 and not self._device.num_draining:
                return True
        return num_blocks <= self.num_freed(request_ids, match, limit)

    def num_freed(self, request_ids: Iterable[RequestId], match: Match, limit: Evictable) -> int:
        """Blocks that an allocation up to ``limit`` could have more if all these requests were preempted.

        Not those that others reference, that a copy uses, that are protected, or that ``match`` has.
        """
        refs = Counter(block for each in request_ids for block in self._tables[each].blocks)
        for content in match.contents:
            if content.device is not None:
                del refs[content.device]
        return sum(
            num_refs == block.num_refs
            and self._device.may_use(block)
            and not _is_shared(block, refs)
            and (limit is Evictable.ALL or block.content is None or not block.content.is_protected)
            for block, num_refs in refs.items()
        )


def _is_shared(block: Block, refs: Mapping[Block, int]) -> bool:
    """Another request's end of the block stays in use, or is counted instead."""
    return block.is_guest or (block.peer is not None and block.peer not in refs)
