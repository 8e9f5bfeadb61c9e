from __future__ import annotations

import numpy as np
import torch

from backfill.core.block import pack_block_ref
from backfill.core.plan import ScheduledSlice
from backfill.core.request import RequestId
from backfill.execution.batch import build_batch, slot_mapping_of


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
    assert (attention.max_query_len, attention.max_seq_len) == (4, 7)
    assert batch.sampled_rows.tolist() == [4]


def test_slot_addresses_follow_the_direction() -> None:
    refs = np.array([pack_block_ref(2), pack_block_ref(2, reverse=True)])
    assert slot_mapping_of(refs, np.array([1, 1]), 8).tolist() == [17, 22]
