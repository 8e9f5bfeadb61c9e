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
from backfill.kernels.base import AttentionBatch


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step's tokens, sequence after sequence, and where the sampled rows are."""

    token_ids: Tensor  # int64 [T]
    attention: AttentionBatch
    sampled_rows: Tensor  # int64 [number of slices that sample]


def build_batch(
    slices: Sequence[ScheduledSlice],
    token_ids: Sequence[NDArray[np.int64]],
    block_size: int,
    device: torch.device,
) -> FlatBatch:
    """Lay the slices out one after another.

    Args:
        slices: at least one.
        token_ids: for each slice, the ``num_tokens`` tokens it computes.
    """
    starts = np.array([piece.start for piece in slices], dtype=np.int64)
    lens = np.array([piece.num_tokens for piece in slices], dtype=np.int64)
    num_blocks = np.array([len(piece.blocks) for piece in slices], dtype=np.int64)
    block_offsets = _offsets(num_blocks)
    block_refs = np.fromiter(
        chain.from_iterable(piece.blocks for piece in slices), dtype=np.int64, count=int(block_offsets[-1])
    )
    query_offsets = _offsets(lens)
    positions = np.arange(int(query_offsets[-1]), dtype=np.int64) + np.repeat(
        starts - query_offsets[:-1], lens
    )
    refs_of_rows = block_refs[np.repeat(block_offsets[:-1], lens) + positions // block_size]
    context_lens = starts + lens
    samples = np.array([piece.samples for piece in slices], dtype=bool)

    def tensor(array: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    return FlatBatch(
        token_ids=tensor(np.concatenate(token_ids), torch.int64),
        attention=AttentionBatch(
            positions=tensor(positions, torch.int64),
            slots=tensor(slot_addresses(refs_of_rows, positions, block_size), torch.int64),
            query_offsets=tensor(query_offsets, torch.int32),
            context_lens=tensor(context_lens, torch.int32),
            block_refs=tensor(block_refs, torch.int32),
            block_offsets=tensor(block_offsets, torch.int32),
            max_query_len=int(lens.max()),
            max_context_len=int(context_lens.max()),
        ),
        sampled_rows=tensor((query_offsets[1:] - 1)[samples], torch.int64),
    )


def slot_addresses(
    refs: NDArray[np.int64], positions: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Pool slot (block index * block_size + slot) of each position, given its packed BlockRef."""
    offsets = positions % block_size
    in_block = np.where(refs & 1 == 1, block_size - 1 - offsets, offsets)
    return (refs >> 1) * block_size + in_block


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Exclusive prefix sums with the total at the end."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
