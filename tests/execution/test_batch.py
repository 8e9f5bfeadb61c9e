from __future__ import annotations

import numpy as np
import torch

from backfill.core.block import pack_block_ref
from backfill.core.plan import ScheduledSlice
from backfill.core.request import RequestId
from backfill.execution.batch import (
    HostBatch,
    PackedArrays,
    build_batch,
    flat_batch,
    host_batch,
    slot_mapping_of,
)


def test_slices_lie_one_after_another() -> None:
    refs = tuple(pack_block_ref(index, reverse) for index, reverse in ((7, False), (3, True), (5, False)))
    slices = [
        ScheduledSlice(RequestId("chunk"), start=3, num_tokens=4, blocks=refs[:2], samples=False),
        ScheduledSlice(RequestId("decode"), start=2, num_tokens=1, blocks=refs[2:], samples=True),
    ]
    tokens = [np.array([10, 11, 12, 13]), np.array([20])]
    batch = build_batch(slices, tokens, block_size=4, device=torch.device("cpu"))
    attention = batch.attention
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 20]
    assert attention.positions.tolist() == [3, 4, 5, 6, 2]
    # Position 3 is in block 7; 4, 5 and 6 fill block 3 from its end.
    assert attention.slot_mapping.tolist() == [31, 15, 14, 13, 22]
    assert attention.cu_seqlens_q.tolist() == [0, 4, 5]
    assert attention.seq_lens.tolist() == [7, 3]
    assert attention.block_table.tolist() == list(refs)
    assert attention.block_table_offsets.tolist() == [0, 2, 3]
    assert (attention.max_query_len, attention.max_seq_len, attention.shared) == (4, 7, None)
    assert batch.sampled_rows.tolist() == [4]


def test_slot_addresses_follow_the_direction() -> None:
    refs = np.array([pack_block_ref(2), pack_block_ref(2, reverse=True)])
    assert slot_mapping_of(refs, np.array([1, 1]), 8).tolist() == [17, 22]


def test_rows_of_no_sequence_follow_the_others() -> None:
    refs = tuple(pack_block_ref(index) for index in (7, 3, 5))
    slices = [
        ScheduledSlice(RequestId("a"), start=5, num_tokens=1, blocks=refs[:2], samples=False),
        ScheduledSlice(RequestId("b"), start=2, num_tokens=1, blocks=refs[2:], samples=True),
    ]
    host = host_batch(slices, [np.array([10]), np.array([20])], block_size=4)
    padded = host.padded(4)
    assert padded.token_ids.tolist() == [10, 20, 0, 0]
    assert padded.positions.tolist() == [5, 2, 0, 0]
    assert padded.slot_mapping.tolist() == [13, 22, -1, -1]
    assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2]
    assert padded.seq_lens.tolist() == [6, 3, 0, 0]
    assert padded.block_table_offsets.tolist() == [0, 2, 3, 3, 3]
    assert padded.block_table.tolist() == list(refs)
    assert padded.sampled_rows.tolist() == [1, 0, 0, 0]
    assert [each.dtype for each in padded] == [each.dtype for each in host]


def test_arrays_in_one_memory() -> None:
    arrays = [np.arange(3), np.arange(5, dtype=np.int32), np.arange(0), np.arange(7, dtype=np.int32)]
    packed = PackedArrays.of(arrays)
    memory = torch.zeros(packed.num_bytes, dtype=torch.uint8)
    views = packed.views(memory)
    for view, array in zip(views, arrays, strict=True):
        view.copy_(torch.from_numpy(array))
    assert [view.tolist() for view in packed.views(memory)] == [array.tolist() for array in arrays]
    assert all(start % 16 == 0 for start in packed.starts)


def after_one_prompt() -> HostBatch:
    """Three decodes of 8,320 tokens in the same blocks of 64, and a few of their own."""
    system = tuple(map(pack_block_ref, range(130)))
    slices = [
        ScheduledSlice(RequestId(f"{i}"), 8320 + i, 1, (*system, pack_block_ref(200 + i)), samples=True)
        for i in range(3)
    ]
    return host_batch(slices, [np.array([i]) for i in range(3)], block_size=64)


def test_shared_keys_of_decodes() -> None:
    """For kernels that do not find them; they go to the device with the other arrays."""
    host = after_one_prompt().with_shared_keys(64)
    arrays = PackedArrays.of(host)
    memory = torch.zeros(arrays.num_bytes, dtype=torch.uint8)
    views = arrays.views(memory)
    for view, array in zip(views, host, strict=True):
        view.copy_(torch.from_numpy(array))
    shared = flat_batch(views, 1, 8323, max_shared_len=8320).attention.shared
    assert shared is not None
    assert shared.sharers.tolist() == [0, 1, 2]
    assert shared.offsets.tolist() == [0, 3]
    assert shared.lens.tolist() == [8320] * 3
    assert flat_batch(views, 1, 8323).attention.shared is None


def test_padded_arrays_lie_where_those_of_padding_do() -> None:
    alone = after_one_prompt()
    shared = alone.with_shared_keys(64)
    for batch, shares in ((alone, False), (shared, True)):
        padded, padding = batch.padded(7), HostBatch.of_padding(7, shares, max_blocks=131)
        assert PackedArrays.of(padded).starts == PackedArrays.of(padding).starts
        assert [each.dtype for each in padded] == [each.dtype for each in padding]
        assert all(len(x) == len(y) for x, y in zip(padded[:-1], padding[:-1], strict=True))
    padded = shared.padded(7)
    assert padded.sharers.tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert padded.sharer_offsets.tolist() == [0, 3, 3, 3]
    assert padded.shared_lens.tolist() == [8320] * 3 + [0] * 4
