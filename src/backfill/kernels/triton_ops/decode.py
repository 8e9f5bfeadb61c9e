"""Attention of sequences with one query row; long contexts are split among programs, as in Flash-Decoding."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backfill.kernels.triton_ops.attention import MIN_DOT, AttentionArguments, attend

# A shorter split of a context would not pay for its merge: estimated, not measured. Where ``max_seq_len`` is
# an upper bound, as in a CUDA graph, splits may be as short as a tile.
_MIN_SPLIT_KEYS = 256

_MAX_SPLITS = 64  # a power of two


@triton.jit
def _keys_per_split(seq_len, num_splits, tile_keys: tl.constexpr):
    """Whole tiles, so that only the last split of a sequence needs masks."""
    return tl.cdiv(tl.cdiv(seq_len, num_splits), tile_keys) * tile_keys


# Over 60 lines: a parameter takes a line each.
@triton.jit(do_not_specialize=["layer", "num_splits"])
def _decode_kernel(
    out,
    partial_sums,
    partial_lse,
    qkv,
    kv_pool,
    cu_seqlens_q,
    seq_lens,
    block_table,
    block_table_offsets,
    scale_log2,
    layer,
    num_splits,
    num_queries_per_kv: tl.constexpr,
    num_layers: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dims_padded: tl.constexpr,
    num_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    dot_dtype: tl.constexpr,
):
    """Program (s, g, split): the query heads of KV head g of sequence s, where s has one query row.

    Writes ``out [T, H * D]``, or, where ``partial_sums`` is given, the split's normalised result to
    ``partial_sums [S, H, splits, D]`` and the base-2 log-sum-exp of its scores to ``partial_lse
    [S, H, splits]``.
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
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
    used = (heads < num_queries_per_kv)[:, None] & (dims < head_dim)[None, :]
    columns = ((kv_head * num_queries_per_kv + heads) * head_dim)[:, None] + dims[None, :]
    width: tl.constexpr = (num_queries_per_kv + 2) * num_kv_heads * head_dim
    q = tl.load(qkv + row.to(tl.int64) * width + columns, mask=used, other=0.0).to(dot_dtype)
    row_ends = tl.full([num_rows], 0, dtype=tl.int32) + key_end
    acc, row_max, row_sum = attend(
        q, row_ends, start, full_end, key_end, kv_pool, layer, kv_head,
        block_table + tl.load(block_table_offsets + seq), scale_log2,
        num_layers, num_kv_heads, block_size, head_dim, tile_keys,
    )  # fmt: skip
    result = acc / row_sum[:, None]
    if partial_sums is None:
        row_start = out + row.to(tl.int64) * (num_kv_heads * num_queries_per_kv * head_dim)
        tl.store(row_start + columns, result.to(out.dtype.element_ty), mask=used)
    else:
        head = seq.to(tl.int64) * (num_kv_heads * num_queries_per_kv) + kv_head * num_queries_per_kv + heads
        index = head * num_splits + split
        tl.store(partial_sums + index[:, None] * head_dim + dims[None, :], result, mask=used)
        tl.store(partial_lse + index, row_max + tl.log2(row_sum), mask=heads < num_queries_per_kv)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    out,
    partial_sums,
    partial_lse,
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
    index = (seq.to(tl.int64) * num_heads + head) * num_splits + splits
    lse = tl.load(partial_lse + index, mask=splits < written, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    # Splits past the context were never written: they are not loaded, for zero times NaN is NaN.
    used = (splits < written)[:, None] & (dims < head_dim)[None, :]
    sums = tl.load(partial_sums + index[:, None] * head_dim + dims[None, :], mask=used, other=0.0)
    result = tl.sum(sums * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    row_start = out + (row.to(tl.int64) * num_heads + head) * head_dim
    tl.store(row_start + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)


def decode(arguments: AttentionArguments, min_programs: int) -> None:
    """Attention of every sequence with one query row. Contexts are split to reach ``min_programs``."""
    inputs, num_kv_heads = arguments.inputs, arguments.num_kv_heads
    batch, num_heads = inputs.batch, inputs.num_heads
    num_seqs, num_splits = batch.num_seqs, _num_splits(arguments, min_programs)
    sums: Tensor | None = None
    lse: Tensor | None = None
    if num_splits > 1:
        shape = (num_seqs, num_heads, num_splits)
        device = inputs.qkv.device
        sums = torch.empty((*shape, arguments.head_dim), dtype=torch.float32, device=device)
        lse = torch.empty(shape, dtype=torch.float32, device=device)
    _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        partial_sums=sums,
        partial_lse=lse,
        num_splits=num_splits,
        num_rows=max(MIN_DOT, triton.next_power_of_2(arguments.num_queries_per_kv)),
        num_warps=4,
        **arguments.for_kernel(),
    )
    if num_splits > 1:
        _merge_kernel[(num_seqs, num_heads)](
            arguments.out,
            sums,
            lse,
            batch.cu_seqlens_q,
            batch.seq_lens,
            num_splits,
            num_heads=num_heads,
            head_dim=arguments.head_dim,
            dims_padded=arguments.dims_padded,
            splits_padded=_MAX_SPLITS,
            tile_keys=arguments.tile_keys,
            num_warps=4,
        )


def _num_splits(arguments: AttentionArguments, min_programs: int) -> int:
    """Splits of a context that bring the number of programs to ``min_programs`` and are not too short."""
    num_programs = arguments.inputs.batch.num_seqs * arguments.num_kv_heads
    wanted = -(-min_programs // num_programs)
    return max(1, min(wanted, arguments.inputs.batch.max_seq_len // _MIN_SPLIT_KEYS, _MAX_SPLITS))
