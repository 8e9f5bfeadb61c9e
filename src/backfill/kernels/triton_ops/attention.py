"""What decode and prefill share: online softmax over the keys of one KV head, and the kernels' arguments."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from backfill.kernels.inputs import LayerInputs

# Smallest tile side tl.dot accepts for 16-bit operands.
MIN_DOT = 16

# A shorter split of a context would not pay for its merge: estimated, not measured. Where the longest context
# is an upper bound, as in a CUDA graph, splits may be as short as a tile.
_MIN_SPLIT_KEYS = 256


@triton.jit
def keys_per_split(num_keys, num_splits, tile_keys: tl.constexpr):
    """Whole tiles, so that only the last split of a sequence needs masks."""
    return tl.cdiv(tl.cdiv(num_keys, num_splits), tile_keys) * tile_keys


def num_splits(num_programs: int, min_programs: int, max_keys: int, most: int) -> int:
    """Splits of contexts that bring ``num_programs`` to ``min_programs`` and are not too short."""
    return max(1, min(-(-min_programs // num_programs), max_keys // _MIN_SPLIT_KEYS, most))


@triton.jit
def _key_offsets(
    refs, keys, valid, block_stride: tl.constexpr, block_size: tl.constexpr, head_dim: tl.constexpr
):
    """Element offset of each key's row from the same head's plane of block 0.

    One reference is read per key, and not per block, so that a tile may span several small blocks.
    """
    ref = tl.load(refs + keys // block_size, mask=valid, other=0)
    offset = keys % block_size
    slot = tl.where((ref & 1) == 1, block_size - 1 - offset, offset)
    # 64 bits: a pool may hold more than 2**31 elements.
    return (ref >> 1).to(tl.int64) * block_stride + slot * head_dim


@triton.jit
def _attend_tiles(
    acc,
    row_max,
    row_sum,
    q,
    row_ends,
    start,
    stop,
    key_end,
    k_plane,
    refs,
    scale_log2,
    block_stride: tl.constexpr,
    v_stride: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
):
    """Online softmax over keys ``[start, stop)`` in tiles; row r attends to keys below ``row_ends[r]``.

    With ``masked`` false the caller promises that every row attends to every key of every tile.
    Keys from ``key_end`` on are never loaded: their slots may hold anything, NaN included.
    The caller starts where each row attends to at least one key of the first tile; hence ``row_max`` is
    finite after it and no exponent is infinity minus infinity.
    """
    dims = tl.arange(0, q.shape[1])
    for tile_start in range(start, stop, tile_keys):
        keys = tile_start + tl.arange(0, tile_keys)
        valid = keys < key_end
        offsets = _key_offsets(refs, keys, valid, block_stride, block_size, head_dim)
        pointers = k_plane + offsets[:, None] + dims[None, :]
        loaded = (dims < head_dim)[None, :]
        if masked:
            loaded = loaded & valid[:, None]
        k = tl.load(pointers, mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if masked:
            scores = tl.where(keys[None, :] < row_ends[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        v = tl.load(pointers + v_stride, mask=loaded, other=0.0).to(q.dtype)
        acc = acc * rescale[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def attend(
    q,
    row_ends,
    start,
    full_end,
    key_end,
    kv_pool,
    layer,
    kv_head,
    refs,
    scale_log2,
    num_layers: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """Attention of ``q [rows, D]`` over keys ``[start, key_end)``; ``[start, full_end)`` needs no mask.

    ``full_end - start`` is a multiple of ``tile_keys``. ``refs`` points at the sequence's first block
    reference.
    Returns: unnormalised sums ``[rows, D]``, then per row the largest base-2 score and the sum of weights.
    """
    v_stride: tl.constexpr = num_kv_heads * block_size * head_dim
    block_stride: tl.constexpr = num_layers * 2 * v_stride
    k_plane = kv_pool + layer * (2 * v_stride) + kv_head * (block_size * head_dim)
    acc = tl.zeros([q.shape[0], q.shape[1]], dtype=tl.float32)
    row_max = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([q.shape[0]], dtype=tl.float32)
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q, row_ends, start, full_end, key_end, k_plane, refs, scale_log2,
        block_stride, v_stride, block_size, head_dim, tile_keys, masked=False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q, row_ends, full_end, key_end, key_end, k_plane, refs, scale_log2,
        block_stride, v_stride, block_size, head_dim, tile_keys, masked=True,
    )  # fmt: skip
    return acc, row_max, row_sum


class DeviceSizes(NamedTuple):
    """Of a GPU; zeros in the interpreter.

    Attributes:
        shared_memory_bytes: that a program may use.
    """

    num_multiprocessors: int = 0
    shared_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """A call of ``Kernels.attention`` with the tensor ``out`` to write to."""

    inputs: LayerInputs
    out: Tensor
    scale: float
    dot_dtype: tl.dtype  # of the operands of tl.dot

    @property
    def num_kv_heads(self) -> int:
        return self.inputs.kv_pool.shape[3]

    @property
    def num_queries_per_kv(self) -> int:
        return self.inputs.num_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.inputs.kv_pool.shape[5]

    @property
    def dims_padded(self) -> int:
        padded: int = triton.next_power_of_2(self.head_dim)
        return max(MIN_DOT, padded)

    @property
    def tile_keys(self) -> int:
        # At most 16 KiB of K per tile: two stages of K and V then fit the shared memory of
        # every GPU since compute capability 8.0.
        return max(MIN_DOT, min(64, 16384 // (self.dims_padded * self.inputs.kv_pool.element_size())))

    @property
    def tile_rows(self) -> int:
        # As many as keys: both sides of a tile are bounded by the same memory.
        rows: int = triton.next_power_of_2(self.num_queries_per_kv)
        return max(self.tile_keys, rows)

    @property
    def num_warps(self) -> int:
        """Of a tile of ``tile_rows``."""
        # float32 products run on the ordinary cores, which need more threads to hold a tile.
        return 8 if self.inputs.qkv.element_size() == 4 else 4

    def for_kernel(self) -> dict[str, Tensor | float | tl.dtype]:
        """The parameters that all kernels have, by name, and the launch option ``num_stages``."""
        qkv, kv_pool, layer, batch, _ = self.inputs
        return {
            "qkv": qkv,
            "kv_pool": kv_pool,
            "cu_seqlens_q": batch.cu_seqlens_q,
            "block_table": batch.block_table,
            "block_table_offsets": batch.block_table_offsets,
            "scale_log2": self.scale * math.log2(math.e),
            "layer": layer,
            "num_queries_per_kv": self.num_queries_per_kv,
            "num_layers": kv_pool.shape[1],
            "num_kv_heads": self.num_kv_heads,
            "block_size": kv_pool.shape[4],
            "head_dim": self.head_dim,
            "dims_padded": self.dims_padded,
            "tile_keys": self.tile_keys,
            "dot_dtype": self.dot_dtype,
            "num_stages": 2,
        }
