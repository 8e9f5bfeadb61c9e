"""Attention of sequences with several query rows: flash attention over tiles of successive tokens."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from backfill.kernels.triton_ops.attention import AttentionArguments, DeviceSizes, attend


@triton.jit
def sequence_of_tile(cu_seqlens_q, num_seqs, tile, tile_tokens: tl.constexpr):
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
    scale_log2,
    layer,
    num_seqs,
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
    """Program (tile, g): some successive tokens of one sequence, for the query heads of KV head g.

    Row r of the tile is token ``r // num_queries_per_kv``, head ``r % num_queries_per_kv``, so that these
    heads share each K and V tile. Sequences with one query row belong to ``_decode_kernel``.
    """
    tile_tokens: tl.constexpr = num_rows // num_queries_per_kv
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = sequence_of_tile(cu_seqlens_q, num_seqs, tile, tile_tokens)
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
    token = first_token + rows // num_queries_per_kv
    head = kv_head * num_queries_per_kv + rows % num_queries_per_kv
    row_used = (rows < tile_tokens * num_queries_per_kv) & (token < query_len)
    used = row_used[:, None] & (dims < head_dim)[None, :]
    row = (first_row + token).to(tl.int64)
    width: tl.constexpr = (num_queries_per_kv + 2) * num_kv_heads * head_dim
    q_pointers = qkv + (row * width + head * head_dim)[:, None] + dims[None, :]
    q = tl.load(q_pointers, mask=used, other=0.0).to(dot_dtype)
    acc, _, row_sum = attend(
        q, first_position + token + 1, 0, full_end, key_end, kv_pool, layer, kv_head,
        block_table + tl.load(block_table_offsets + seq), scale_log2,
        num_layers, num_kv_heads, block_size, head_dim, tile_keys,
    )  # fmt: skip
    out_rows = (row * (num_kv_heads * num_queries_per_kv) + head) * head_dim
    result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_rows[:, None] + dims[None, :], result, mask=used)


_MIN_LONG_CONTEXT = 4096  # tokens; between the 1,024 and the 8,192 that were measured


class _Tiling(NamedTuple):
    """Rows and keys of a tile, and how it is computed."""

    num_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


def _tiling(arguments: AttentionArguments, device: DeviceSizes) -> _Tiling:
    """Large tiles for long contexts, where the device has room and work for them.

    On an H200, with heads of 128, attention of 8,192 tokens takes 1,444 us a layer with tiles of 64 keys and
    1,372 with these, that of eight prompts of 1,024 tokens 262 and 281.
    """
    itemsize, rows = arguments.inputs.qkv.element_size(), 128
    num_tiles = -(-arguments.inputs.qkv.shape[0] // (rows // arguments.num_queries_per_kv))
    has_work = num_tiles * arguments.num_kv_heads >= device.num_multiprocessors
    if itemsize == 2 and has_work and arguments.inputs.batch.max_seq_len >= _MIN_LONG_CONTEXT:
        tile_bytes = rows * arguments.dims_padded * itemsize  # of queries; so many of keys and of values
        if (1 + 3 * 2) * tile_bytes <= device.shared_memory_bytes:
            return _Tiling(rows, 128, 8, 3)
    return _Tiling(arguments.tile_rows, arguments.tile_keys, arguments.num_warps, 2)


def prefill(arguments: AttentionArguments, device: DeviceSizes) -> None:
    """Attention of every sequence with more than one query row."""
    tiling = _tiling(arguments, device)
    qkv, batch = arguments.inputs.qkv, arguments.inputs.batch
    num_tiles = qkv.shape[0] // (tiling.num_rows // arguments.num_queries_per_kv) + batch.num_seqs
    _prefill_kernel[(num_tiles, arguments.num_kv_heads)](
        out=arguments.out,
        seq_lens=batch.seq_lens,
        num_seqs=batch.num_seqs,
        **{**arguments.for_kernel(), **tiling._asdict()},
    )
