"""Who owns which KV block. Pure bookkeeping: no tensor is touched here."""

from __future__ import annotations

from backfill.core.block import BlockRef, block_index, pack_block_ref
from backfill.core.request import RequestId


class BlockManager:
    """Owns the pool's blocks and each request's block table.

    Free blocks are kept on a stack: the most recently freed block is handed out first, since its
    memory is the likeliest to be in a cache.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        # Tables are tuples, replaced when they grow: a plan takes them as they are, every step.
        self._tables: dict[RequestId, tuple[BlockRef, ...]] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def usage_frac(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one request."""
        return -(-num_tokens // self.block_size)

    def num_held_blocks(self, request_id: RequestId) -> int:
        return len(self._tables.get(request_id, ()))

    def num_missing_blocks(self, request_id: RequestId, num_tokens: int) -> int:
        """Blocks the request must still be given to hold its first ``num_tokens`` tokens."""
        table = self._tables.get(request_id)
        missing = -(-num_tokens // self.block_size) - (0 if table is None else len(table))
        return missing if missing > 0 else 0  # asked for every running request in every step

    def can_grow(self, request_id: RequestId, num_tokens: int) -> bool:
        return self.num_missing_blocks(request_id, num_tokens) <= len(self._free)

    def grow(self, request_id: RequestId, num_tokens: int) -> None:
        """Give the request the blocks it lacks for its first ``num_tokens`` tokens.

        Only after ``can_grow`` said so.
        """
        missing = self.num_missing_blocks(request_id, num_tokens)
        assert missing <= len(self._free), f"{request_id} lacks {missing} blocks, {len(self._free)} are free"
        if missing or request_id not in self._tables:
            given = tuple(pack_block_ref(self._free.pop()) for _ in range(missing))
            self._tables[request_id] = self._tables.get(request_id, ()) + given

    def table(self, request_id: RequestId) -> tuple[BlockRef, ...]:
        """The request's blocks in token order."""
        return self._tables[request_id]

    def release(self, request_id: RequestId) -> int:
        """Take back all blocks of the request and return how many; none held is fine."""
        table = self._tables.pop(request_id, ())
        self._free.extend(block_index(ref) for ref in reversed(table))
        return len(table)

    def check_integrity(self) -> None:
        """Every block is free or owned by exactly one request; raises AssertionError with the counts."""
        owned = [block_index(ref) for table in self._tables.values() for ref in table]
        everything = sorted(owned + self._free)
        assert everything == list(range(self.num_blocks)), (
            f"{len(owned)} owned + {len(self._free)} free != {self.num_blocks} blocks, or one is held twice"
        )
