"""Copies of some slots of KV blocks, to and from a dense buffer."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from backfill.kernels.slots import SlotRange, check_packed

_TILE = 4096  # elements that a program has in registers
# A copy moves bit patterns: so it takes any dtype, and NaN keeps its bits.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _copy_slots_kernel(
    pool,
    packed,
    ranges,
    num_planes,
    block_size,
    head_dim,
    gathers: tl.constexpr,
    planes: tl.constexpr,
    run_padded: tl.constexpr,
):
    """Program (i, j): ``planes`` planes of range i, from plane ``j * planes``.

    A plane has the K or V of one head in one layer; a range is one run of memory in each. ``ranges`` has
    block, first slot, number of slots and place in ``packed``, for each range.
    """
    row = ranges + tl.program_id(0) * 4
    block = tl.load(row)
    first = tl.load(row + 1)
    run = tl.load(row + 2) * head_dim
    plane = tl.program_id(1) * planes + tl.arange(0, planes)
    at = tl.arange(0, run_padded)
    used = (plane < num_planes)[:, None] & (at < run)[None, :]
    in_pool = (block * num_planes + plane) * block_size * head_dim + first * head_dim
    in_pool = pool + in_pool[:, None] + at[None, :]
    in_packed = packed + tl.load(row + 3) + (plane * run)[:, None] + at[None, :]
    if gathers:
        tl.store(in_packed, tl.load(in_pool, mask=used), mask=used)
    else:
        tl.store(in_pool, tl.load(in_packed, mask=used), mask=used)


def gather_slots(pool: Tensor, ranges: Sequence[SlotRange], packed: Tensor) -> None:
    """See ``backfill.kernels.slots.SlotKernels``. Goes to the current stream of the current device."""
    _copy(pool, ranges, packed, gathers=True)


def scatter_slots(packed: Tensor, pool: Tensor, ranges: Sequence[SlotRange]) -> None:
    """See ``backfill.kernels.slots.SlotKernels``. Goes to the current stream of the current device."""
    _copy(pool, ranges, packed, gathers=False)


def _copy(pool: Tensor, ranges: Sequence[SlotRange], packed: Tensor, *, gathers: bool) -> None:
    check_packed(pool, ranges, packed)
    if not ranges:
        return
    _, num_layers, two, num_kv_heads, block_size, head_dim = pool.shape
    num_planes = num_layers * two * num_kv_heads
    sizes = [num_planes * each.num * head_dim for each in ranges]
    places = itertools.accumulate(sizes[:-1], initial=0)
    # int64: an index in a pool of some GiB needs it.
    rows = torch.tensor([(*each, place) for each, place in zip(ranges, places, strict=True)])
    run_padded = triton.next_power_of_2(max(each.num for each in ranges) * head_dim)
    planes = max(1, min(_TILE // run_padded, triton.next_power_of_2(num_planes)))
    bits = _BITS[pool.itemsize]
    _copy_slots_kernel[(len(ranges), triton.cdiv(num_planes, planes))](
        pool.view(bits),
        packed.view(bits),
        rows.to(pool.device),
        num_planes,
        block_size,
        head_dim,
        gathers=gathers,
        planes=planes,
        run_padded=run_padded,
        num_warps=8,
    )
