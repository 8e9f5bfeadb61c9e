"""Copies between the device pool and the host pool, in groups that complete together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from backfill.core.block import BlockCopy, SlotCopy
from backfill.core.plan import BlockCopies, CopyDirections

_Copy = TypeVar("_Copy", BlockCopy, SlotCopy)


class CompletedCopies(NamedTuple):
    blocks: tuple[BlockCopy, ...] = ()
    slots: tuple[SlotCopy, ...] = ()


class CopyGroup(NamedTuple):
    """Copies of one direction that complete together: of blocks, or of slots."""

    direction: CopyDirections
    blocks: tuple[BlockCopy, ...]
    slots: tuple[SlotCopy, ...]
    is_reported: bool


def copy_groups(copies: BlockCopies, num_slots: int, block_size: int) -> Iterator[CopyGroup]:
    """The groups in the order in which they begin.

    Args:
        num_slots: the most slots in a group; at least ``block_size``.
    """
    for direction, of_blocks, of_slots in (
        (CopyDirections.CHECKPOINT, copies.checkpoint, copies.slot_checkpoint),
        (CopyDirections.RESTORE, copies.restore, copies.slot_restore),
    ):
        is_reported = direction not in copies.blocking
        for blocks in _split(of_blocks, [block_size] * len(of_blocks), num_slots):
            yield CopyGroup(direction, blocks, (), is_reported)
        for slots in _split(of_slots, [copy.num for copy in of_slots], num_slots):
            yield CopyGroup(direction, (), slots, is_reported)


def _split(copies: Sequence[_Copy], sizes: Sequence[int], limit: int) -> Iterator[tuple[_Copy, ...]]:
    """Consecutive copies whose sizes add up to ``limit`` at most."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if total + size > limit:
            yield tuple(copies[first:index])
            first, total = index, 0
        total += size
    if copies:
        yield tuple(copies[first:])
