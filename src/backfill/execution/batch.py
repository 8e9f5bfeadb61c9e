"""From a plan's slices to the flat tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backfill.core.plan import ScheduledSlice
from backfill.execution.shared_keys import SharedKeyArrays, find_shared_keys
from backfill.kernels.inputs import AttentionMetadata, SharedKeys

# Bytes, of arrays in one memory: Triton compiles a kernel anew for a pointer that is aligned to less.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step's tokens, slice after slice, and the rows whose logits are sampled."""

    token_ids: Tensor  # int64 [T]
    attention: AttentionMetadata
    sampled_rows: Tensor  # int64 [number of slices that sample]


class HostBatch(NamedTuple):
    """What a ``FlatBatch`` is made of, on the host. The block table is the last: its length varies.

    Where no keys are shared, ``sharers``, ``sharer_offsets`` and ``shared_lens`` are empty; where a batch is
    padded they are as long as its rows may need.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    sampled_rows: NDArray[np.int64]
    cu_seqlens_q: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table_offsets: NDArray[np.int32]
    sharers: NDArray[np.int32]
    sharer_offsets: NDArray[np.int32]
    shared_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]

    @classmethod
    def of_padding(cls, num_rows: int, shares: bool, max_blocks: int) -> HostBatch:
        """Rows of no sequence, and a block table for sequences of up to ``max_blocks``.

        Args:
            shares: with groups of no sequence.
        """
        rows, sequences = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows + 1, dtype=np.int32)
        blocks = np.zeros(num_rows * max_blocks, dtype=np.int32)
        groups = SharedKeyArrays.empty()
        if shares:
            groups = SharedKeyArrays(sequences[1:], sequences[: num_rows // 2 + 1], sequences[1:])
        return cls(rows, rows, rows, rows, sequences, sequences[1:], sequences, *groups, blocks)

    def with_shared_keys(self, block_size: int) -> HostBatch:
        """The same with the keys that decodes share: for kernels that do not look for them."""
        found = find_shared_keys(
            self.cu_seqlens_q, self.seq_lens, self.block_table, self.block_table_offsets, block_size
        )
        return self._replace(**found._asdict())

    def padded(self, num_rows: int) -> HostBatch:
        """A batch of decodes alone, with rows of no sequence up to ``num_rows``: they write no KV.

        Of the sampled rows only the first are those of the batch.
        """
        shares = len(self.sharers) > 0

        def with_last(array: NDArray[np.int32], length: int) -> NDArray[np.int32]:
            return np.concatenate((array, np.repeat(array[-1:], length - len(array))))

        def with_value(array: NDArray[Any], value: int, length: int = num_rows) -> NDArray[Any]:
            return np.concatenate((array, np.full(length - len(array), value, dtype=array.dtype)))

        return HostBatch(
            token_ids=with_value(self.token_ids, 0),
            positions=with_value(self.positions, 0),
            slot_mapping=with_value(self.slot_mapping, -1),
            sampled_rows=with_value(self.sampled_rows, 0),
            cu_seqlens_q=with_last(self.cu_seqlens_q, num_rows + 1),
            seq_lens=with_value(self.seq_lens, 0),
            block_table_offsets=with_last(self.block_table_offsets, num_rows + 1),
            sharers=with_value(self.sharers, 0, num_rows if shares else 0),
            sharer_offsets=with_last(self.sharer_offsets, num_rows // 2 + 1 if shares else 0),
            shared_lens=with_value(self.shared_lens, 0, num_rows if shares else 0),
            block_table=self.block_table,
        )


@dataclass(frozen=True, slots=True)
class PackedArrays:
    """Arrays whose bytes lie one after another in one memory.

    Attributes:
        starts: byte at which each begins.
    """

    arrays: Sequence[NDArray[Any]]
    starts: Sequence[int]
    num_bytes: int

    @classmethod
    def of(cls, arrays: Sequence[NDArray[Any]]) -> PackedArrays:
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        *starts, end = accumulate(sizes, initial=0)
        return cls(arrays, starts, end)

    def pinned(self) -> Tensor:
        """uint8 ``[num_bytes]`` in pinned memory, which torch reuses when its transfers are done."""
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
        there = memory.numpy()
        for start, array in zip(self.starts, self.arrays, strict=True):
            there[start : start + array.nbytes] = array.view(np.uint8)
        return memory

    def views(self, memory: Tensor) -> list[Tensor]:
        """The arrays' places in ``memory``, uint8 of at least ``num_bytes``."""
        return [
            memory[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
            for start, array in zip(self.starts, self.arrays, strict=True)
        ]


def build_batch(
    slices: Sequence[ScheduledSlice],
    token_ids: Sequence[NDArray[np.int64]],
    block_size: int,
    device: torch.device,
) -> FlatBatch:
    """Concatenate the slices, at least one; ``token_ids`` has the ``num_tokens`` tokens of each."""
    host = host_batch(slices, token_ids, block_size)
    if device.type == "cpu":
        tensors = list(map(torch.from_numpy, host))
    else:
        host = host.with_shared_keys(block_size)
        # In one transfer, which the host does not wait for.
        arrays = PackedArrays.of(host)
        tensors = arrays.views(arrays.pinned().to(device, non_blocking=True))
    max_query_len = max(each.num_tokens for each in slices)
    max_shared_len = int(host.shared_lens.max(initial=0))
    return flat_batch(tensors, max_query_len, int(host.seq_lens.max()), max_shared_len)


def host_batch(
    slices: Sequence[ScheduledSlice], token_ids: Sequence[NDArray[np.int64]], block_size: int
) -> HostBatch:
    """See ``build_batch``."""
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
    samples = np.array([scheduled.samples for scheduled in slices], dtype=bool)
    return HostBatch(
        token_ids=np.concatenate(token_ids),
        positions=positions,
        slot_mapping=slot_mapping_of(refs_of_rows, positions, block_size),
        sampled_rows=(cu_seqlens_q[1:] - 1)[samples],
        cu_seqlens_q=cu_seqlens_q.astype(np.int32),
        seq_lens=(starts + lens).astype(np.int32),
        block_table_offsets=block_table_offsets.astype(np.int32),
        **SharedKeyArrays.empty()._asdict(),
        block_table=block_table.astype(np.int32),
    )


def flat_batch(
    tensors: Sequence[Tensor], max_query_len: int, max_seq_len: int, max_shared_len: int = 0
) -> FlatBatch:
    """Of tensors in the order of ``HostBatch``."""
    token_ids, positions, slot_mapping, sampled_rows, *of_seqs = tensors
    cu_seqlens_q, seq_lens, offsets, sharers, sharer_offsets, shared_lens, table = of_seqs
    shared = SharedKeys(sharers, sharer_offsets, shared_lens, max_shared_len) if max_shared_len else None
    attention = AttentionMetadata(
        positions=positions,
        slot_mapping=slot_mapping,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_table=table,
        block_table_offsets=offsets,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        shared=shared,
    )
    return FlatBatch(token_ids, attention, sampled_rows)


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
