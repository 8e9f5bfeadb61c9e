"""Attention of sequences with one query row; long contexts are split among programs, as in Flash-Decoding.

Keys that a group of sequences shares are further splits, which ``sharing.py`` computes for the whole group.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backfill.kernels.triton_ops.attention import (
    MIN_DOT,
    AttentionArguments,
    attend,
    keys_per_split,
    num_splits,
)
from backfill.kernels.triton_ops.sharing import attend_shared, num_shared_splits

_MAX_SPLITS = 64  # a power of two; with those of shared keys


# Over 60 lines: a parameter takes a line each.
@triton.jit(do_not_specialize=["layer", "num_splits", "shared_splits"])
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
    shared_lens,
    scale_log2,
    layer,
    num_splits,
    shared_splits,
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

    Splits are of its keys from ``shared_lens[s]`` on, or of all where ``shared_lens`` is None. Writes
    ``out [T, H * D]``, or, where ``partial_sums`` is given, the split's normalised result to
    ``partial_sums [S, H, splits, D]`` and the base-2 log-sum-exp of its scores to ``partial_lse
    [S, H, splits]``: ``num_splits``, then ``shared_splits`` that are written elsewhere.
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(cu_seqlens_q + seq)
    if tl.load(cu_seqlens_q + seq + 1) - row != 1:
        return
    seq_len = tl.load(seq_lens + seq)
    first_key = 0 if shared_lens is None else tl.load(shared_lens + seq)
    split_keys = keys_per_split(seq_len - first_key, num_splits, tile_keys)
    start = first_key + split * split_keys
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
        index = head * (num_splits + shared_splits) + split
        tl.store(partial_sums + index[:, None] * head_dim + dims[None, :], result, mask=used)
        tl.store(partial_lse + index, row_max + tl.log2(row_sum), mask=heads < num_queries_per_kv)


@triton.jit(do_not_specialize=["num_splits", "shared_splits"])
def _merge_kernel(
    out,
    partial_sums,
    partial_lse,
    cu_seqlens_q,
    seq_lens,
    shared_lens,
    num_splits,
    shared_splits,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    dims_padded: tl.constexpr,
    splits_padded: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """Program (s, h): combine the splits that were written for head h of sequence s."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(cu_seqlens_q + seq)
    if tl.load(cu_seqlens_q + seq + 1) - row != 1:
        return
    seq_len = tl.load(seq_lens + seq)
    if seq_len == 0:
        return
    shared_len = 0 if shared_lens is None else tl.load(shared_lens + seq)
    own_len = seq_len - shared_len
    splits = tl.arange(0, splits_padded)
    written = splits < tl.cdiv(own_len, keys_per_split(own_len, num_splits, tile_keys))
    if shared_lens is not None:
        split_keys = tl.maximum(keys_per_split(shared_len, shared_splits, tile_keys), 1)
        last = num_splits + tl.cdiv(shared_len, split_keys)
        written = written | ((splits >= num_splits) & (splits < last))
    dims = tl.arange(0, dims_padded)
    index = (seq.to(tl.int64) * num_heads + head) * (num_splits + shared_splits) + splits
    lse = tl.load(partial_lse + index, mask=written, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    # Splits past the context were never written: they are not loaded, for zero times NaN is NaN.
    used = written[:, None] & (dims < head_dim)[None, :]
    sums = tl.load(partial_sums + index[:, None] * head_dim + dims[None, :], mask=used, other=0.0)
    result = tl.sum(sums * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    row_start = out + (row.to(tl.int64) * num_heads + head) * head_dim
    tl.store(row_start + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)


def decode(arguments: AttentionArguments, min_programs: int) -> None:
    """Attention of every sequence with one query row. Contexts are split to reach ``min_programs``."""
    inputs, num_kv_heads = arguments.inputs, arguments.num_kv_heads
    batch, num_heads, shared = inputs.batch, inputs.num_heads, inputs.batch.shared
    num_seqs, most = batch.num_seqs, _MAX_SPLITS if shared is None else _MAX_SPLITS // 2
    splits = {
        "num_splits": num_splits(num_seqs * num_kv_heads, min_programs, batch.max_seq_len, most),
        "shared_splits": 0 if shared is None else num_shared_splits(arguments, shared, min_programs, most),
    }
    sums: Tensor | None = None
    lse: Tensor | None = None
    if sum(splits.values()) > 1:
        shape = (num_seqs, num_heads, sum(splits.values()))
        device = inputs.qkv.device
        sums = torch.empty((*shape, arguments.head_dim), dtype=torch.float32, device=device)
        lse = torch.empty(shape, dtype=torch.float32, device=device)
    of_seqs = {"seq_lens": batch.seq_lens, "shared_lens": None if shared is None else shared.lens, **splits}
    if shared is not None:
        attend_shared(arguments, shared, partial_sums=sums, partial_lse=lse, **splits)
    _decode_kernel[(num_seqs, num_kv_heads, splits["num_splits"])](
        out=arguments.out,
        partial_sums=sums,
        partial_lse=lse,
        num_rows=max(MIN_DOT, triton.next_power_of_2(arguments.num_queries_per_kv)),
        num_warps=4,
        **of_seqs,
        **arguments.for_kernel(),
    )
    if sums is not None:
        _merge_kernel[(num_seqs, num_heads)](
            out=arguments.out,
            partial_sums=sums,
            partial_lse=lse,
            cu_seqlens_q=batch.cu_seqlens_q,
            num_heads=num_heads,
            head_dim=arguments.head_dim,
            dims_padded=arguments.dims_padded,
            splits_padded=_MAX_SPLITS,
            tile_keys=arguments.tile_keys,
            num_warps=4,
            **of_seqs,
        )
