"""Cascade attention: rows of decodes that share keys are in one tile over these.

What is left to each sequence, and the merge, are in ``decode.py``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from backfill.kernels.inputs import SharedKeys
from backfill.kernels.triton_ops.attention import AttentionArguments, attend, keys_per_split, num_splits
from backfill.kernels.triton_ops.prefill import sequence_of_tile


# Over 60 lines: a parameter takes a line each.
@triton.jit(do_not_specialize=["layer", "num_groups", "num_splits", "shared_splits"])
def _shared_kernel(
    partial_sums,
    partial_lse,
    qkv,
    kv_pool,
    cu_seqlens_q,
    block_table,
    block_table_offsets,
    sharers,
    sharer_offsets,
    shared_lens,
    scale_log2,
    layer,
    num_groups,
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
    """Program (tile, g, split): some sharers of one group, for the query heads of KV head g.

    Row r of the tile is sharer ``r // num_queries_per_kv``, head ``r % num_queries_per_kv``. A split is one
    of the group's shared keys. Writes what ``_decode_kernel`` does, behind its ``num_splits``.
    """
    tile_seqs: tl.constexpr = num_rows // num_queries_per_kv
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group = sequence_of_tile(sharer_offsets, num_groups, tile, tile_seqs)
    group_start = tl.load(sharer_offsets + group)
    group_end = tl.load(sharer_offsets + group + 1)
    first = group_start + (tile - group_start // tile_seqs - group) * tile_seqs
    if first >= group_end:
        return
    any_seq = tl.load(sharers + first)
    shared_len = tl.load(shared_lens + any_seq)
    split_keys = keys_per_split(shared_len, shared_splits, tile_keys)
    start = split * split_keys
    if start >= shared_len:
        return
    key_end = tl.minimum(start + split_keys, shared_len)

    rows = tl.arange(0, num_rows)
    dims = tl.arange(0, dims_padded)
    sharer = first + rows // num_queries_per_kv
    row_used = (rows < tile_seqs * num_queries_per_kv) & (sharer < group_end)
    used = row_used[:, None] & (dims < head_dim)[None, :]
    seq = tl.load(sharers + sharer, mask=row_used, other=0)
    head = kv_head * num_queries_per_kv + rows % num_queries_per_kv
    width: tl.constexpr = (num_queries_per_kv + 2) * num_kv_heads * head_dim
    q_rows = tl.load(cu_seqlens_q + seq).to(tl.int64) * width + head * head_dim
    q = tl.load(qkv + q_rows[:, None] + dims[None, :], mask=used, other=0.0).to(dot_dtype)
    acc, row_max, row_sum = attend(
        q, tl.zeros([num_rows], dtype=tl.int32) + key_end, start, key_end, key_end, kv_pool, layer, kv_head,
        block_table + tl.load(block_table_offsets + any_seq), scale_log2,
        num_layers, num_kv_heads, block_size, head_dim, tile_keys,
    )  # fmt: skip
    index = seq.to(tl.int64) * (num_kv_heads * num_queries_per_kv) + head
    index = index * (num_splits + shared_splits) + num_splits + split
    tl.store(partial_sums + index[:, None] * head_dim + dims[None, :], acc / row_sum[:, None], mask=used)
    tl.store(partial_lse + index, row_max + tl.log2(row_sum), mask=row_used)


def num_shared_splits(arguments: AttentionArguments, shared: SharedKeys, min_programs: int, most: int) -> int:
    """Splits of shared keys, at most ``most``, as many as one group of all sharers needs."""
    tiles = -(-len(shared.sharers) // (arguments.tile_rows // arguments.num_queries_per_kv))
    return num_splits(tiles * arguments.num_kv_heads, min_programs, shared.max_len, most)


def attend_shared(
    arguments: AttentionArguments, shared: SharedKeys, shared_splits: int, **partials: Tensor | int | None
) -> None:
    """Attention of all sharers over what they share, to ``partials``: see ``_decode_kernel``."""
    num_groups = len(shared.offsets) - 1
    num_tiles = len(shared.sharers) // (arguments.tile_rows // arguments.num_queries_per_kv) + num_groups
    _shared_kernel[(num_tiles, arguments.num_kv_heads, shared_splits)](
        sharers=shared.sharers,
        sharer_offsets=shared.offsets,
        shared_lens=shared.lens,
        num_groups=num_groups,
        shared_splits=shared_splits,
        num_rows=arguments.tile_rows,
        num_warps=arguments.num_warps,
        **partials,
        **arguments.for_kernel(),
    )
