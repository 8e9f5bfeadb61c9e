"""A request's block table, and what the cache knows of its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from backfill.core.block import BlockRef
from backfill.kvcache.content import Block, BlockKey, Content


@dataclass(slots=True, eq=False)
class BlockTable:
    """Where one request's KV is.

    Attributes:
        root: parent of the first key.
        keys: of the leading full blocks, as far as they were needed.
        blocks: its device blocks in token order.
        refs: the same as references. A new tuple when it grows or a block moves, because plans hold it.
        num_known: leading blocks whose content is known to the cache.
        num_valid: leading blocks whose KV is known to be on the device.
        num_copied, num_secured: leading blocks known to have a host copy, and a complete one.
        num_host_evictions: of the store, when the two were last right.
        wanted: after a preemption, the contents that the request will come back for.
        tail: after a preemption, the content of its last block, which is not full.
    """

    root: BlockKey
    keys: list[BlockKey] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    refs: tuple[BlockRef, ...] = ()
    num_known: int = 0
    num_valid: int = 0
    num_copied: int = 0
    num_secured: int = 0
    num_host_evictions: int = 0
    wanted: Sequence[Content] = ()
    tail: Content | None = None

    def extend(self, blocks: Iterable[Block]) -> None:
        first = len(self.blocks)
        self.blocks += blocks
        self.refs += tuple([block.ref for block in self.blocks[first:]])

    def renew_refs(self) -> None:
        """Some of its blocks have other memory."""
        self.refs = tuple(block.ref for block in self.blocks)

    def clear(self) -> None:
        """Name no blocks."""
        self.blocks, self.refs = [], ()
        self.num_known = self.num_valid = self.num_copied = self.num_secured = 0

    def is_restored(self) -> bool:
        """The KV of all its blocks is on the device."""
        blocks, num_blocks = self.blocks, len(self.blocks)
        while self.num_valid < num_blocks and blocks[self.num_valid].is_valid:
            self.num_valid += 1
        return self.num_valid == num_blocks

    def count_copied(self, num_host_evictions: int) -> int:
        """Leading full blocks that have a host copy, complete or in flight, or whose KV another block holds.

        Args:
            num_host_evictions: of the store until now; if there are new ones, all blocks are looked at again.
        """
        self._check_evictions(num_host_evictions)
        while self.num_copied < self.num_known:
            content = self.blocks[self.num_copied].content
            if content is not None and content.host is None:
                break
            self.num_copied += 1
        return self.num_copied

    def count_secured(self, num_host_evictions: int) -> int:
        """Those of ``count_copied`` whose copy is complete: no KV is lost if they are taken."""
        self._check_evictions(num_host_evictions)
        while self.num_secured < self.num_known:
            content = self.blocks[self.num_secured].content
            if content is not None and (content.host is None or not content.host.is_valid):
                break
            self.num_secured += 1
        return self.num_secured

    def _check_evictions(self, num_host_evictions: int) -> None:
        if self.num_host_evictions != num_host_evictions:
            self.num_host_evictions = num_host_evictions
            self.num_copied = self.num_secured = 0
