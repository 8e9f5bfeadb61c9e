"""From a plan's slices to the flat tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backfill.core.plan import ScheduledSlice
from backfill.kernels.base import AttentionMetadata


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step's tokens, slice after slice, and the rows whose logits are sampled."""

    token_ids: Tensor  # int64 [T]
    attention: AttentionMetadata
    sampled_rows: Tensor  # int64 [number of slices that sample]


def build_batch(
    slices: Sequence[ScheduledSlice],
    token_ids: Sequence[NDArray[np.int64]],
    block_size: int,
    device: torch.device,
) -> FlatBatch:
    """Concatenate the slices, at least one; ``token_ids`` has the ``num_tokens`` tokens of each."""
    starts = np.array([scheduled.start for scheduled in slices], dtype=np.int64)
    lens = np.array([scheduled.num_tokens for scheduled in slices], dtype=np.int64)
    num_blocks = np.array([len(scheduled.blocks) for scheduled in slices], dtype=np.int64)
    block_table_offsets = _offsets(num_blocks)
    block_table = np.fromiter(
        chain.from_iterable(scheduled.blocks for scheduled in slices),
        dtype=np.int64,
        count=int(block_table_offsets[-1]),
    )
    cu_seqlens_q = _offsets(lens)
    positions = np.arange(int(cu_seqlens_q[-1]), dtype=np.int64) + np.repeat(starts - cu_seqlens_q[:-1], lens)
    refs_of_rows = block_table[np.repeat(block_table_offsets[:-1], lens) + positions // block_size]
    seq_lens = starts + lens
    samples = np.array([scheduled.samples for scheduled in slices], dtype=bool)

    def tensor(array: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    return FlatBatch(
        token_ids=tensor(np.concatenate(token_ids), torch.int64),
        attention=AttentionMetadata(
            positions=tensor(positions, torch.int64),
            slot_mapping=tensor(slot_mapping_of(refs_of_rows, positions, block_size), torch.int64),
            cu_seqlens_q=tensor(cu_seqlens_q, torch.int32),
            seq_lens=tensor(seq_lens, torch.int32),
            block_table=tensor(block_table, torch.int32),
            block_table_offsets=tensor(block_table_offsets, torch.int32),
            max_query_len=int(lens.max()),
            max_seq_len=int(seq_lens.max()),
        ),
        sampled_rows=tensor((cu_seqlens_q[1:] - 1)[samples], torch.int64),
    )


def slot_mapping_of(
    refs: NDArray[np.int64], positions: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Pool slot (block index * block_size + slot) of each position, given its packed BlockRef."""
    offsets = positions % block_size
    in_block = np.where(refs & 1 == 1, block_size - 1 - offsets, offsets)
    return (refs >> 1) * block_size + in_block


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Exclusive prefix sums with the total at the end."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
