"""Copies between KV pools in host memory: launchers of ``csrc/copies.cpp``, which releases the GIL.

They bypass the CPU caches. As in ``backfill.kernels.cpu``, C++ gets addresses, so a launcher checks all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from backfill import _kernels  # type: ignore[attr-defined]
from backfill.kernels.base import describe
from backfill.kernels.slots import SlotRange, check_packed, check_ranges


def copy_blocks(
    destination: Tensor,
    destination_blocks: Sequence[int],
    source: Tensor,
    source_blocks: Sequence[int],
) -> None:
    """Copy block ``source_blocks[i]`` of one KV pool to ``destination_blocks[i]`` of the other, in order.

    Pools are ``[num_blocks, ...]``, of one dtype and block shape, and do not overlap.

    Raises: ValueError for other dtypes or shapes, and for a block that a pool does not have.
    """
    _check_pools(destination, source)
    for name, pool, blocks in (
        ("destination", destination, destination_blocks),
        ("source", source, source_blocks),
    ):
        _check_blocks(name, pool, blocks)
    if len(destination_blocks) != len(source_blocks):
        raise ValueError(f"source: expected {len(destination_blocks)} blocks, got {len(source_blocks)}")
    block_bytes = math.prod(source.shape[1:]) * source.itemsize
    _kernels.copy_blocks(
        destination.data_ptr(), source.data_ptr(), block_bytes, destination_blocks, source_blocks
    )


def copy_slots(
    destination: Tensor, destination_blocks: Sequence[int], source: Tensor, ranges: Sequence[SlotRange]
) -> None:
    """Copy slots of one KV pool to the same slots of ``destination_blocks[i]`` of the other, in order.

    All other slots of the blocks may be read and written meanwhile. Pools are
    ``[num_blocks, L, 2, G, B, D]``, of one dtype and block shape, and do not overlap.

    Raises: ValueError for other dtypes or shapes, and for blocks or slots that a pool does not have.
    """
    _check_pools(destination, source)
    check_ranges("source", source, ranges)
    _check_blocks("destination", destination, destination_blocks)
    if len(destination_blocks) != len(ranges):
        raise ValueError(f"source: expected {len(destination_blocks)} ranges, got {len(ranges)}")
    _kernels.copy_slots(
        destination.data_ptr(),
        destination_blocks,
        source.data_ptr(),
        *_columns(ranges),
        *_block_shape(source),
    )


def gather_slots(pool: Tensor, ranges: Sequence[SlotRange], packed: Tensor) -> None:
    """See ``backfill.kernels.slots.SlotKernels``."""
    _check_pool("pool", pool)
    check_packed(pool, ranges, packed)
    _kernels.gather_slots(packed.data_ptr(), pool.data_ptr(), *_columns(ranges), *_block_shape(pool))


def scatter_slots(packed: Tensor, pool: Tensor, ranges: Sequence[SlotRange]) -> None:
    """See ``backfill.kernels.slots.SlotKernels``."""
    _check_pool("pool", pool)
    check_packed(pool, ranges, packed)
    _kernels.scatter_slots(pool.data_ptr(), packed.data_ptr(), *_columns(ranges), *_block_shape(pool))


def _columns(ranges: Sequence[SlotRange]) -> tuple[list[int], list[int], list[int]]:
    """Blocks, first slots and numbers of slots."""
    return [each.block for each in ranges], [each.first for each in ranges], [each.num for each in ranges]


def _block_shape(pool: Tensor) -> tuple[int, int, int]:
    """Planes of a block, slots of a plane, bytes of a slot."""
    _, num_layers, two, num_kv_heads, block_size, head_dim = pool.shape
    return num_layers * two * num_kv_heads, block_size, head_dim * pool.itemsize


def _check_pools(destination: Tensor, source: Tensor) -> None:
    _check_pool("destination", destination)
    _check_pool("source", source)
    if destination.shape[1:] != source.shape[1:] or destination.dtype != source.dtype:
        raise ValueError(f"source: expected blocks of {describe(destination)}, got {describe(source)}")


def _check_pool(name: str, pool: Tensor) -> None:
    if not pool.is_cpu or not pool.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous pool on cpu, got {describe(pool)}")


def _check_blocks(name: str, pool: Tensor, blocks: Sequence[int]) -> None:
    if blocks and not (min(blocks) >= 0 and max(blocks) < pool.shape[0]):
        raise ValueError(f"{name}: expected blocks 0 to {pool.shape[0] - 1}, got {list(blocks)}")
