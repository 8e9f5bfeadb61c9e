"""The interface of copies of some slots of KV blocks, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from backfill.kernels.base import describe


class SlotRange(NamedTuple):
    """Slots ``[first, first + num)`` of a block of a KV pool; at least one."""

    block: int
    first: int
    num: int


class SlotKernels(Protocol):
    """Copies of some slots of blocks; a module of each device implements it.

    Pools are contiguous ``[num_blocks, L, 2, G, B, D]``, of any dtype. ``packed`` is a contiguous vector of
    the pool's dtype, on its device, that has the slots of one range after another, each
    ``[L, 2, G, num, D]``. It may be longer than they are.

    Both raise ValueError, naming the argument, for what they cannot take; then nothing was copied.
    """

    def gather_slots(self, pool: Tensor, ranges: Sequence[SlotRange], packed: Tensor) -> None:
        """Copy slots to ``packed``. Nothing but these slots is read: others may be written meanwhile."""

    def scatter_slots(self, packed: Tensor, pool: Tensor, ranges: Sequence[SlotRange]) -> None:
        """Copy slots back; no two ranges have one in common. Nothing but these slots is written."""


def num_packed(pool: Tensor, ranges: Sequence[SlotRange]) -> int:
    """Elements that the slots have when packed."""
    _, num_layers, two, num_kv_heads, _, head_dim = pool.shape
    return num_layers * two * num_kv_heads * head_dim * sum(each.num for each in ranges)


def check_ranges(name: str, pool: Tensor, ranges: Sequence[SlotRange]) -> None:
    """Raise ValueError for a pool of another shape, and for blocks or slots that it does not have."""
    if pool.dim() != 6 or not pool.is_contiguous():
        raise ValueError(f"{name}: expected contiguous [num_blocks, L, 2, G, B, D], got {describe(pool)}")
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    for block, first, num in ranges:
        if not 0 <= block < num_blocks:
            raise ValueError(f"{name}: expected blocks 0 to {num_blocks - 1}, got {block}")
        if not (0 <= first < first + num <= block_size):
            raise ValueError(f"{name}: expected slots 0 to {block_size - 1}, got {num} from {first}")


def check_packed(pool: Tensor, ranges: Sequence[SlotRange], packed: Tensor) -> None:
    """Raise ValueError unless the slots are in the pool and fit ``packed``."""
    check_ranges("pool", pool, ranges)
    size = num_packed(pool, ranges)
    is_like_pool = packed.dtype == pool.dtype and packed.device == pool.device
    if not (is_like_pool and packed.dim() == 1 and packed.is_contiguous() and len(packed) >= size):
        need = f"contiguous {pool.dtype} [{size}] or more on {pool.device}"
        raise ValueError(f"packed: expected {need}, got {describe(packed)}")
