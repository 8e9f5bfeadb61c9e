"""Random attention batches for kernel tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from backfill.core.block import KVLayout, pack_block_ref
from backfill.kernels.inputs import AttentionMetadata
from tests.kernels.reference import quantized_rows


def make_pool(
    layout: KVLayout, num_blocks: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Random KV; of int8 the rows of random KV."""
    *shape, _ = layout.shape(num_blocks)
    rows = torch.randn(*shape, layout.head_dim, generator=generator)
    return quantized_rows(rows) if dtype == torch.int8 else rows.to(dtype)


def unset_kv(dtype: torch.dtype) -> float:
    """What fills slots that nothing may read: NaN, also as the scale of int8."""
    return -1 if dtype == torch.int8 else float("nan")


def slot_of(ref: int, position: int, block_size: int) -> int:
    """Index in the pool of a token's slot; a reversed block is filled from its end."""
    offset = position % block_size
    return (ref >> 1) * block_size + (block_size - 1 - offset if ref & 1 else offset)


def make_metadata(seqs: Sequence[tuple[int, int, Sequence[int]]], block_size: int) -> AttentionMetadata:
    """Sequences of (query rows, tokens, block references); blocks may be those of others too."""
    slot_mapping, positions = [], []
    for rows, context, refs in seqs:
        for position in range(context - rows, context):
            slot_mapping.append(slot_of(refs[position // block_size], position, block_size))
            positions.append(position)
    offsets = [0, *itertools.accumulate(len(refs) for _, _, refs in seqs)]
    cu_seqlens_q = [0, *itertools.accumulate(rows for rows, _, _ in seqs)]
    return AttentionMetadata(
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slot_mapping, dtype=torch.int64),
        cu_seqlens_q=torch.tensor(cu_seqlens_q, dtype=torch.int32),
        seq_lens=torch.tensor([context for _, context, _ in seqs], dtype=torch.int32),
        block_table=torch.tensor([ref for _, _, refs in seqs for ref in refs], dtype=torch.int32),
        block_table_offsets=torch.tensor(offsets, dtype=torch.int32),
        max_query_len=max(rows for rows, _, _ in seqs),
        max_seq_len=max(context for _, context, _ in seqs),
    )


def make_batch(
    lens: Sequence[tuple[int, int]], *, block_size: int, num_blocks: int, generator: torch.Generator
) -> AttentionMetadata:
    """Sequences of (query length, context length), in randomly placed and directed blocks."""
    free = torch.randperm(num_blocks, generator=generator).tolist()
    seqs = []
    for query_len, context_len in lens:
        needed = -(-context_len // block_size)
        directions = (torch.rand(needed, generator=generator) < 0.5).tolist()
        refs = [pack_block_ref(free.pop(), reverse) for reverse in directions]
        seqs.append((query_len, context_len, refs))
    return make_metadata(seqs, block_size)
