"""CUDA kernels in Triton. The meaning of every operator is in ``backfill.kernels.reference``.

Kernels come first, then ``TritonKernels``, whose methods check and launch them. A grid is made only
from shapes and from the integers in ``AttentionMetadata``. Nothing reads a tensor's contents on the
host, so launches queue without synchronisation and can be captured in a CUDA graph; where the
contents decide how much there is to do, the grid is an upper bound and surplus programs return at once.

Import this module only where Triton is installed. On CPU it runs in Triton's interpreter, for
tests: set ``TRITON_INTERPRET=1`` before anything imports ``triton``.
"""

# A kernel's arguments (pointers, tensors, compile-time values) have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backfill.kernels.base import AttentionMetadata, Linear
from backfill.kernels.reference import ReferenceLinear

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Smallest tile side tl.dot accepts for 16-bit operands.
_MIN_DOT = 16

# A shorter split of a decode row's context would not pay for its merge. Estimated, not measured.
_MIN_SPLIT_KEYS = 256

_MAX_SPLITS = 64


# ---------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------


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
    peak,
    total,
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
    The caller starts where each row attends to at least one key of the first tile; hence ``peak`` is
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
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        v = tl.load(pointers + v_stride, mask=loaded, other=0.0).to(q.dtype)
        acc = acc * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        total = total * decay + tl.sum(weights, axis=1)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _attend(
    q,
    row_ends,
    start,
    full_end,
    key_end,
    k_plane,
    refs,
    scale_log2,
    block_stride: tl.constexpr,
    v_stride: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """Attention of ``q [rows, D]`` over keys ``[start, key_end)``; ``[start, full_end)`` needs no mask.

    ``full_end - start`` is a multiple of ``tile_keys``. ``k_plane`` points at the head's K in block 0
    and its V lies ``v_stride`` further; ``refs`` points at the sequence's first block reference.
    Returns: unnormalised sums ``[rows, D]``, then per row the largest base-2 score and the sum of weights.
    """
    acc = tl.zeros([q.shape[0], q.shape[1]], dtype=tl.float32)
    peak = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    total = tl.zeros([q.shape[0]], dtype=tl.float32)
    acc, peak, total = _attend_tiles(
        acc, peak, total, q, row_ends, start, full_end, key_end, k_plane, refs, scale_log2,
        block_stride, v_stride, block_size, head_dim, tile_keys, masked=False,
    )  # fmt: skip
    acc, peak, total = _attend_tiles(
        acc, peak, total, q, row_ends, full_end, key_end, key_end, k_plane, refs, scale_log2,
        block_stride, v_stride, block_size, head_dim, tile_keys, masked=True,
    )  # fmt: skip
    return acc, peak, total


@triton.jit
def _keys_per_split(seq_len, num_splits, tile_keys: tl.constexpr):
    """Whole tiles, so that only the last split of a sequence needs masks."""
    return tl.cdiv(tl.cdiv(seq_len, num_splits), tile_keys) * tile_keys


@triton.jit(do_not_specialize=["layer", "num_splits"])
def _decode_kernel(
    out,
    partial_sums,
    partial_logs,
    qkv,
    kv_pool,
    cu_seqlens_q,
    seq_lens,
    block_table,
    block_table_offsets,
    qkv_stride,
    scale_log2,
    layer,
    num_splits,
    heads_per_group: tl.constexpr,
    num_layers: tl.constexpr,
    num_groups: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dims_padded: tl.constexpr,
    num_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    dot_dtype: tl.constexpr,
):
    """Program (s, g, split): the query heads of group g of sequence s, where s has one query row.

    Writes ``out [T, H * D]``, or, where ``partial_sums`` is given, the split's normalised result to
    ``partial_sums [S, H, splits, D]`` and the base-2 logarithm of its weight to ``partial_logs
    [S, H, splits]``.
    """
    seq = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(cu_seqlens_q + seq)
    if tl.load(cu_seqlens_q + seq + 1) - row != 1:
        return
    seq_len = tl.load(seq_lens + seq)
    split_keys = _keys_per_split(seq_len, num_splits, tile_keys)
    start = split * split_keys
    if start >= seq_len:
        return
    key_end = tl.minimum(start + split_keys, seq_len)
    full_end = start + (key_end - start) // tile_keys * tile_keys

    heads = tl.arange(0, num_rows)
    dims = tl.arange(0, dims_padded)
    used = (heads < heads_per_group)[:, None] & (dims < head_dim)[None, :]
    columns = ((group * heads_per_group + heads) * head_dim)[:, None] + dims[None, :]
    q = tl.load(qkv + row.to(tl.int64) * qkv_stride + columns, mask=used, other=0.0).to(dot_dtype)
    row_ends = tl.full([num_rows], 0, dtype=tl.int32) + key_end
    v_stride: tl.constexpr = num_groups * block_size * head_dim
    acc, peak, total = _attend(
        q,
        row_ends,
        start,
        full_end,
        key_end,
        kv_pool + layer * (2 * v_stride) + group * (block_size * head_dim),
        block_table + tl.load(block_table_offsets + seq),
        scale_log2,
        num_layers * 2 * v_stride,
        v_stride,
        block_size,
        head_dim,
        tile_keys,
    )
    result = acc / total[:, None]
    if partial_sums is None:
        row_start = out + row.to(tl.int64) * (num_groups * heads_per_group * head_dim)
        tl.store(row_start + columns, result.to(out.dtype.element_ty), mask=used)
    else:
        head = seq.to(tl.int64) * (num_groups * heads_per_group) + group * heads_per_group + heads
        place = head * num_splits + split
        tl.store(partial_sums + place[:, None] * head_dim + dims[None, :], result, mask=used)
        tl.store(partial_logs + place, peak + tl.log2(total), mask=heads < heads_per_group)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    out,
    partial_sums,
    partial_logs,
    cu_seqlens_q,
    seq_lens,
    num_splits,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    dims_padded: tl.constexpr,
    splits_padded: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """Program (s, h): combine the splits that ``_decode_kernel`` wrote for head h of sequence s."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(cu_seqlens_q + seq)
    if tl.load(cu_seqlens_q + seq + 1) - row != 1:
        return
    seq_len = tl.load(seq_lens + seq)
    if seq_len == 0:
        return
    written = tl.cdiv(seq_len, _keys_per_split(seq_len, num_splits, tile_keys))
    splits = tl.arange(0, splits_padded)
    dims = tl.arange(0, dims_padded)
    place = (seq.to(tl.int64) * num_heads + head) * num_splits + splits
    logs = tl.load(partial_logs + place, mask=splits < written, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, axis=0))
    # Splits past the context were never written: they are not loaded, for zero times NaN is NaN.
    used = (splits < written)[:, None] & (dims < head_dim)[None, :]
    sums = tl.load(partial_sums + place[:, None] * head_dim + dims[None, :], mask=used, other=0.0)
    result = tl.sum(sums * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    row_start = out + (row.to(tl.int64) * num_heads + head) * head_dim
    tl.store(row_start + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)


@triton.jit
def _sequence_of_tile(cu_seqlens_q, num_seqs, tile, tile_tokens: tl.constexpr):
    """Sequence s whose tiles, numbered from ``cu_seqlens_q[s] // tile_tokens + s``, include ``tile``.

    That leaves s at least ``ceil(query length / tile_tokens)`` numbers, and needs no prefix sum of tiles.
    """
    low = tl.program_id(0) * 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens_q + middle) // tile_tokens + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["layer", "num_seqs"])
def _prefill_kernel(
    out,
    qkv,
    kv_pool,
    cu_seqlens_q,
    seq_lens,
    block_table,
    block_table_offsets,
    qkv_stride,
    scale_log2,
    layer,
    num_seqs,
    heads_per_group: tl.constexpr,
    num_layers: tl.constexpr,
    num_groups: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dims_padded: tl.constexpr,
    num_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    dot_dtype: tl.constexpr,
):
    """Program (tile, g): some successive tokens of one sequence, for the query heads of group g.

    Row r of the tile is token ``r // heads_per_group``, head ``r % heads_per_group``, so that all heads
    of a group share each K and V tile. Sequences with one query row belong to ``_decode_kernel``.
    """
    tile_tokens: tl.constexpr = num_rows // heads_per_group
    tile = tl.program_id(0)
    group = tl.program_id(1)
    seq = _sequence_of_tile(cu_seqlens_q, num_seqs, tile, tile_tokens)
    first_row = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_row
    first_token = (tile - first_row // tile_tokens - seq) * tile_tokens
    if query_len <= 1 or first_token >= query_len:
        return
    first_position = tl.load(seq_lens + seq) - query_len
    key_end = first_position + tl.minimum(first_token + tile_tokens, query_len)
    full_end = (first_position + first_token + 1) // tile_keys * tile_keys

    rows = tl.arange(0, num_rows)
    dims = tl.arange(0, dims_padded)
    token = first_token + rows // heads_per_group
    head = group * heads_per_group + rows % heads_per_group
    row_used = (rows < tile_tokens * heads_per_group) & (token < query_len)
    used = row_used[:, None] & (dims < head_dim)[None, :]
    row = (first_row + token).to(tl.int64)
    q_pointers = qkv + (row * qkv_stride + head * head_dim)[:, None] + dims[None, :]
    q = tl.load(q_pointers, mask=used, other=0.0).to(dot_dtype)
    v_stride: tl.constexpr = num_groups * block_size * head_dim
    acc, _, total = _attend(
        q,
        first_position + token + 1,
        0,
        full_end,
        key_end,
        kv_pool + layer * (2 * v_stride) + group * (block_size * head_dim),
        block_table + tl.load(block_table_offsets + seq),
        scale_log2,
        num_layers * 2 * v_stride,
        v_stride,
        block_size,
        head_dim,
        tile_keys,
    )
    out_rows = (row * (num_groups * heads_per_group) + head) * head_dim
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_rows[:, None] + dims[None, :], result, mask=used)


# ---------------------------------------------------------------------------------------------
# Projections: norm, rotary, KV write
# ---------------------------------------------------------------------------------------------


@triton.jit
def _norm_and_rotate(
    first, second, norm, cos, sin, eps, halves, half_used, head_dim: tl.constexpr, rotary: tl.constexpr
):
    """Optional RMS norm, then optional rotation, of heads ``[heads, D]`` given as halves ``[heads, D / 2]``.

    Returns float32 halves. As in the reference, the normalised values pass through the input's dtype.
    """
    dtype = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if norm is not None:
        mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / head_dim
        inverse = tl.rsqrt(mean_square + eps)[:, None]
        first_weight = tl.load(norm + halves, mask=half_used, other=0.0).to(tl.float32)
        second_weight = tl.load(norm + head_dim // 2 + halves, mask=half_used, other=0.0).to(tl.float32)
        first = (first * inverse * first_weight[None, :]).to(dtype).to(tl.float32)
        second = (second * inverse * second_weight[None, :]).to(dtype).to(tl.float32)
    if rotary:
        rotated = first * cos[None, :] - second * sin[None, :]
        second = second * cos[None, :] + first * sin[None, :]
        first = rotated
    return first, second


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_write_kernel(
    qkv,
    kv_pool,
    positions,
    slot_mapping,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    qkv_stride,
    layer,
    heads_per_group: tl.constexpr,
    num_layers: tl.constexpr,
    num_groups: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    half_padded: tl.constexpr,
    heads_padded: tl.constexpr,
):
    """Program (t, g): the query heads of group g of row t in place, and its K and V head into the pool."""
    half: tl.constexpr = head_dim // 2
    token = tl.program_id(0)
    group = tl.program_id(1)
    row = qkv + token.to(tl.int64) * qkv_stride
    halves = tl.arange(0, half_padded)
    half_used = halves < half
    cos = tl.zeros([half_padded], dtype=tl.float32)
    sin = cos
    if cos_sin is not None:
        angles = cos_sin + tl.load(positions + token) * head_dim + halves
        cos = tl.load(angles, mask=half_used, other=0.0)
        sin = tl.load(angles + half, mask=half_used, other=0.0)

    if cos_sin is not None or q_norm is not None:
        heads = tl.arange(0, heads_padded)
        used = (heads < heads_per_group)[:, None] & half_used[None, :]
        q = row + ((group * heads_per_group + heads) * head_dim)[:, None] + halves[None, :]
        first, second = _norm_and_rotate(
            tl.load(q, mask=used, other=0.0), tl.load(q + half, mask=used, other=0.0),
            q_norm, cos, sin, eps, halves, half_used, head_dim, cos_sin is not None,
        )  # fmt: skip
        tl.store(q, first.to(qkv.dtype.element_ty), mask=used)
        tl.store(q + half, second.to(qkv.dtype.element_ty), mask=used)

    one_head = half_used[None, :]
    k = row + (num_groups * heads_per_group + group) * head_dim + halves[None, :]
    first, second = _norm_and_rotate(
        tl.load(k, mask=one_head, other=0.0), tl.load(k + half, mask=one_head, other=0.0),
        k_norm, cos, sin, eps, halves, half_used, head_dim, cos_sin is not None,
    )  # fmt: skip
    slot = tl.load(slot_mapping + token)
    plane = (slot // block_size * num_layers + layer) * (2 * num_groups) + group
    k_out = kv_pool + (plane * block_size + slot % block_size) * head_dim + halves[None, :]
    tl.store(k_out, first.to(kv_pool.dtype.element_ty), mask=one_head)
    tl.store(k_out + half, second.to(kv_pool.dtype.element_ty), mask=one_head)

    v = k + num_groups * head_dim
    v_out = k_out + num_groups * block_size * head_dim
    tl.store(v_out, tl.load(v, mask=one_head), mask=one_head)
    tl.store(v_out + half, tl.load(v + half, mask=one_head), mask=one_head)


# ---------------------------------------------------------------------------------------------
# Norms and activation
# ---------------------------------------------------------------------------------------------


@triton.jit
def _rms_norm_kernel(
    out, x, residual, weight, x_stride, residual_stride, eps, width: tl.constexpr, padded: tl.constexpr
):
    """Program t: row t of ``x``, first added to ``residual`` in place where that is given."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded)
    used = columns < width
    values = tl.load(x + row * x_stride + columns, mask=used, other=0.0).to(tl.float32)
    if residual is not None:
        sums = residual + row * residual_stride + columns
        rounded = (values + tl.load(sums, mask=used, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(sums, rounded, mask=used)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    normed = values * inverse * tl.load(weight + columns, mask=used, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=used)


@triton.jit
def _silu_and_mul_kernel(out, gate_up, stride, width: tl.constexpr, tile: tl.constexpr):
    """Program (t, c): ``tile`` columns of row t."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    used = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=used, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=used, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=used)


# ---------------------------------------------------------------------------------------------
# Launchers
# ---------------------------------------------------------------------------------------------


class TritonKernels:
    """See ``backfill.kernels.base.Kernels`` for shapes; dtypes are bfloat16, float16 and float32.

    Every method raises ValueError, naming the argument, for a tensor of a shape, stride, dtype or device that
    the kernel cannot take; then nothing was launched. Kernels go to the current stream of the current device,
    which must be ``device``.

    Args:
        device: where all tensors are.
        decode_programs: programs a decode step should have at least; contexts are split to reach it.
            Default: two for each multiprocessor, so that loads of one hide behind those of the other
            (no split in the interpreter).
    Raises: ValueError if ``device`` is not CUDA and Triton was not imported with ``TRITON_INTERPRET=1``.
    """

    def __init__(self, device: torch.device, decode_programs: int | None = None) -> None:
        interpreted = not isinstance(_decode_kernel, triton.runtime.JITFunction)
        if device.type != "cuda" and not interpreted:
            raise ValueError(f"device: {device} needs Triton's interpreter (TRITON_INTERPRET=1), else CUDA")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if decode_programs is None:
            decode_programs = 1
            if device.type == "cuda":
                decode_programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self._device = device
        self._decode_programs = decode_programs
        # The interpreter multiplies the bit patterns of bfloat16 operands as integers.
        self._dot_dtypes = {
            torch.bfloat16: tl.float32 if interpreted else tl.bfloat16,
            torch.float16: tl.float16,
            torch.float32: tl.float32,
        }

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """cuBLAS on the weight as it is; a weight that is already on the device is shared, not copied."""
        if weight.dim() != 2:
            raise ValueError(f"weight: shape {tuple(weight.shape)}, need [out, in]")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: shape {tuple(bias.shape)}, need {tuple(weight.shape[:1])}")
        packed_bias = None if bias is None else bias.to(self._device).contiguous()
        return ReferenceLinear(weight.to(self._device).contiguous(), packed_bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._check_matrix("residual", residual)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(f"residual: {_describe(residual)}, x: {_describe(x)}; they must match")
        return self._norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        self._check_matrix("gate_up", gate_up)
        num_rows, double_width = gate_up.shape
        if double_width % 2:
            raise ValueError(f"gate_up: width {double_width}, need an even one")
        width = double_width // 2
        out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
        tile = min(1024, triton.next_power_of_2(width))
        if out.numel():
            grid = (num_rows, triton.cdiv(width, tile))
            _silu_and_mul_kernel[grid](out, gate_up, gate_up.stride(0), width, tile, num_warps=4)
        return out

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        kv_pool: Tensor,
        layer: int,
        batch: AttentionMetadata,
        num_heads: int,
        cos_sin: Tensor | None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        self._check_heads(qkv, kv_pool, layer, num_heads)
        _, num_layers, _, num_groups, block_size, head_dim = kv_pool.shape
        num_tokens = qkv.shape[0]
        self._check_vector("positions", batch.positions, num_tokens, torch.int64)
        self._check_vector("slot_mapping", batch.slot_mapping, num_tokens, torch.int64)
        if cos_sin is not None:
            self._check_matrix("cos_sin", cos_sin)
            if cos_sin.dtype != torch.float32 or cos_sin.shape[1] != head_dim or not cos_sin.is_contiguous():
                need = f"contiguous float32 [positions, {head_dim}]"
                raise ValueError(f"cos_sin: {_describe(cos_sin)}, need {need}")
        if (q_norm is None) != (k_norm is None):
            raise ValueError("k_norm: q_norm and k_norm come together")
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                self._check_vector(name, norm, head_dim)
        if num_tokens == 0:
            return
        heads_per_group = num_heads // num_groups
        _rotate_and_write_kernel[(num_tokens, num_groups)](
            qkv,
            kv_pool,
            batch.positions,
            batch.slot_mapping,
            cos_sin,
            q_norm,
            k_norm,
            eps,
            qkv.stride(0),
            layer,
            heads_per_group=heads_per_group,
            num_layers=num_layers,
            num_groups=num_groups,
            block_size=block_size,
            head_dim=head_dim,
            half_padded=triton.next_power_of_2(head_dim // 2),
            heads_padded=triton.next_power_of_2(heads_per_group),
            num_warps=2,
        )

    def attention(
        self, qkv: Tensor, kv_pool: Tensor, layer: int, batch: AttentionMetadata, num_heads: int, scale: float
    ) -> Tensor:
        self._check_heads(qkv, kv_pool, layer, num_heads)
        num_seqs = batch.num_seqs
        self._check_vector("cu_seqlens_q", batch.cu_seqlens_q, num_seqs + 1, torch.int32)
        self._check_vector("seq_lens", batch.seq_lens, num_seqs, torch.int32)
        self._check_vector("block_table", batch.block_table, None, torch.int32)
        self._check_vector("block_table_offsets", batch.block_table_offsets, num_seqs + 1, torch.int32)
        num_tokens = qkv.shape[0]
        out = torch.empty((num_tokens, num_heads * kv_pool.shape[5]), dtype=qkv.dtype, device=qkv.device)
        if num_tokens == 0:
            return out
        if batch.max_query_len > 1:
            self._prefill(out, qkv, kv_pool, layer, batch, num_heads, scale)
        # Where the rows are as many as full-length chunks would have, every sequence is a chunk.
        if batch.max_query_len == 1 or num_tokens < num_seqs * batch.max_query_len:
            self._decode(out, qkv, kv_pool, layer, batch, num_heads, scale)
        return out

    def _prefill(
        self,
        out: Tensor,
        qkv: Tensor,
        kv_pool: Tensor,
        layer: int,
        batch: AttentionMetadata,
        num_heads: int,
        scale: float,
    ) -> None:
        constants = self._attention_constants(kv_pool, num_heads)
        heads_per_group = constants["heads_per_group"]
        # As many rows as keys: both sides of a tile are bounded by the same memory.
        num_rows = max(constants["tile_keys"], triton.next_power_of_2(heads_per_group))
        num_tiles = qkv.shape[0] // (num_rows // heads_per_group) + batch.num_seqs
        _prefill_kernel[(num_tiles, kv_pool.shape[3])](
            out,
            qkv,
            kv_pool,
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.block_table,
            batch.block_table_offsets,
            qkv.stride(0),
            scale * math.log2(math.e),
            layer,
            batch.num_seqs,
            num_rows=num_rows,
            # float32 products run on the ordinary cores, which need more threads to hold a tile.
            num_warps=8 if qkv.dtype == torch.float32 else 4,
            **constants,
        )

    def _decode(
        self,
        out: Tensor,
        qkv: Tensor,
        kv_pool: Tensor,
        layer: int,
        batch: AttentionMetadata,
        num_heads: int,
        scale: float,
    ) -> None:
        constants = self._attention_constants(kv_pool, num_heads)
        num_seqs, num_groups, head_dim = batch.num_seqs, kv_pool.shape[3], kv_pool.shape[5]
        num_splits = self._num_splits(num_seqs * num_groups, batch.max_seq_len)
        sums: Tensor | None = None
        logs: Tensor | None = None
        if num_splits > 1:
            places = (num_seqs, num_heads, num_splits)
            sums = torch.empty((*places, head_dim), dtype=torch.float32, device=qkv.device)
            logs = torch.empty(places, dtype=torch.float32, device=qkv.device)
        _decode_kernel[(num_seqs, num_groups, num_splits)](
            out,
            sums,
            logs,
            qkv,
            kv_pool,
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.block_table,
            batch.block_table_offsets,
            qkv.stride(0),
            scale * math.log2(math.e),
            layer,
            num_splits,
            num_rows=max(_MIN_DOT, triton.next_power_of_2(num_heads // num_groups)),
            num_warps=4,
            **constants,
        )
        if num_splits > 1:
            _merge_kernel[(num_seqs, num_heads)](
                out,
                sums,
                logs,
                batch.cu_seqlens_q,
                batch.seq_lens,
                num_splits,
                num_heads=num_heads,
                head_dim=head_dim,
                dims_padded=constants["dims_padded"],
                splits_padded=triton.next_power_of_2(num_splits),
                tile_keys=constants["tile_keys"],
                num_warps=4,
            )

    def _attention_constants(self, kv_pool: Tensor, num_heads: int) -> dict[str, Any]:
        """Compile-time arguments that the decode and the prefill kernel share."""
        _, num_layers, _, num_groups, block_size, head_dim = kv_pool.shape
        dims_padded = max(_MIN_DOT, triton.next_power_of_2(head_dim))
        # At most 16 KiB of K per tile: two stages of K and V then fit the shared memory of
        # every GPU since compute capability 8.0.
        tile_keys = max(_MIN_DOT, min(64, 16384 // (dims_padded * kv_pool.element_size())))
        return {
            "heads_per_group": num_heads // num_groups,
            "num_layers": num_layers,
            "num_groups": num_groups,
            "block_size": block_size,
            "head_dim": head_dim,
            "dims_padded": dims_padded,
            "tile_keys": tile_keys,
            "dot_dtype": self._dot_dtypes[kv_pool.dtype],
            "num_stages": 2,
        }

    def _num_splits(self, num_programs: int, max_seq_len: int) -> int:
        """Parts per context that turn ``num_programs`` into ``decode_programs`` without becoming tiny."""
        wanted = -(-self._decode_programs // num_programs)
        return max(1, min(wanted, max_seq_len // _MIN_SPLIT_KEYS, _MAX_SPLITS))

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        self._check_matrix("x", x)
        num_rows, width = x.shape
        self._check_vector("weight", weight, width)
        out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
        if out.numel():
            padded = triton.next_power_of_2(width)
            residual_stride = 0 if residual is None else residual.stride(0)
            _rms_norm_kernel[(num_rows,)](
                out,
                x,
                residual,
                weight,
                x.stride(0),
                residual_stride,
                eps,
                width,
                padded,
                num_warps=max(1, min(8, padded // 512)),
            )
        return out

    def _check_matrix(self, name: str, x: Tensor) -> None:
        if x.dim() != 2 or x.dtype not in _DTYPES or x.stride(1) != 1 or x.device != self._device:
            need = f"bfloat16, float16 or float32 [rows, columns], columns contiguous, on {self._device}"
            raise ValueError(f"{name}: {_describe(x)}, need {need}")

    def _check_vector(
        self, name: str, x: Tensor, length: int | None, dtype: torch.dtype | None = None
    ) -> None:
        """``dtype`` None: any floating type the kernels take. ``length`` None: any."""
        right_dtype = x.dtype in _DTYPES if dtype is None else x.dtype == dtype
        right_shape = x.dim() == 1 and (length is None or x.shape[0] == length)
        if not (right_dtype and right_shape and x.is_contiguous() and x.device == self._device):
            wanted_dtype = "floating point" if dtype is None else dtype
            wanted_length = "any length" if length is None else length
            raise ValueError(
                f"{name}: {_describe(x)}, need contiguous {wanted_dtype} [{wanted_length}] on {self._device}"
            )

    def _check_heads(self, qkv: Tensor, kv_pool: Tensor, layer: int, num_heads: int) -> None:
        self._check_matrix("qkv", qkv)
        if kv_pool.dim() != 6 or kv_pool.shape[2] != 2 or not kv_pool.is_contiguous():
            raise ValueError(f"kv_pool: {_describe(kv_pool)}, need contiguous [num_blocks, L, 2, G, B, D]")
        if kv_pool.dtype != qkv.dtype or kv_pool.device != self._device:
            raise ValueError(f"kv_pool: {_describe(kv_pool)}, need {qkv.dtype} on {self._device}, as qkv")
        _, num_layers, _, num_groups, _, head_dim = kv_pool.shape
        if head_dim % 8:
            raise ValueError(f"kv_pool: head size {head_dim}, need a multiple of 8")
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer: {layer}, the pool has {num_layers}")
        if num_heads < 1 or num_heads % num_groups:
            raise ValueError(f"num_heads: {num_heads}, need a multiple of the pool's {num_groups} KV heads")
        if qkv.shape[1] != (num_heads + 2 * num_groups) * head_dim:
            raise ValueError(
                f"qkv: width {qkv.shape[1]}, need ({num_heads} + 2 * {num_groups}) heads of {head_dim}"
            )


def _describe(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"
