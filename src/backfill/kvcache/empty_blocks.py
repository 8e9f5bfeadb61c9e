"""Blocks without content, in the order in which they are handed out."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

from backfill.kvcache.content import Block


class EmptyBlocks(Protocol):
    """The empty blocks of a pool."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]: ...

    def append(self, block: Block) -> None: ...

    def pop(self) -> Block:
        """The block that is handed out next."""

    def take(self, count: int) -> list[Block]:
        """As many as there are, at most ``count``."""


class LatestFirst(list[Block]):
    """The most recently freed block first: its memory is the likeliest to be in a processor's cache."""

    def take(self, count: int) -> list[Block]:
        first = max(0, len(self) - count)
        taken = self[first:][::-1]
        del self[first:]
        return taken


class LowestFirst:
    """The lowest index first, for a pool that shrinks from its upper end: little has to leave it then.

    Args:
        blocks: of the pool, by index. None of those that are in here may change its index.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._indices = list(range(len(blocks)))  # a heap

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Block]:
        return (self._blocks[index] for index in self._indices)

    def append(self, block: Block) -> None:
        heapq.heappush(self._indices, block.index)

    def pop(self) -> Block:
        return self._blocks[heapq.heappop(self._indices)]

    def take(self, count: int) -> list[Block]:
        return [self.pop() for _ in range(min(count, len(self)))]

    def remove_from(self, end: int) -> None:
        """Remove the blocks from this index on."""
        self._indices = [index for index in self._indices if index < end]
        heapq.heapify(self._indices)
