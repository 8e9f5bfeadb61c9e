"""Triton's attention of decodes that begin with the same blocks, against the reference."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from backfill.kernels.inputs import SHARED_UNIT, AttentionMetadata, SharedKeys
from tests.kernels.batches import make_batch
from tests.kernels.test_triton import DEVICES, AttentionCase, check_attention


def lens_of(num_long: int) -> list[tuple[int, int]]:
    """Of decodes, of which so many are long, and of two parts of prompts."""
    long = [(1, 130 + 9 * index) for index in range(num_long)]
    return [(1, 65), (1, 128), (9, 80), (1, 300), (1, 7), *long, (1, 81), (30, 30)]


def groups_of(case: AttentionCase) -> list[list[int]]:
    """One whose member's own part has no whole tile, one of long decodes, one of different lengths."""
    last = len(case.lens) - 2
    return [[last, 1], [6, *range(8, last)], [7, 3]]


# A tile has 5 sharers of six heads for a KV head, and 3 of twenty: the last two cases have more.
CASES = [
    pytest.param(AttentionCase(torch.float32, 16, 8, 2, 16, lens_of(4)), id="fp32-d16-gqa4-b16"),
    pytest.param(AttentionCase(torch.bfloat16, 64, 3, 1, 32, lens_of(4)), id="bf16-d64-gqa3-b32"),
    pytest.param(AttentionCase(torch.float16, 40, 2, 2, 8, lens_of(4)), id="fp16-d40-gqa1-b8"),
    pytest.param(AttentionCase(torch.float32, 128, 6, 1, 48, lens_of(9)), id="fp32-d128-gqa6-b48"),
    pytest.param(AttentionCase(torch.bfloat16, 8, 20, 1, 64, lens_of(8)), id="bf16-d8-gqa20-b64"),
]


def with_shared_keys(
    batch: AttentionMetadata, groups: Sequence[Sequence[int]], lens: Sequence[int], block_size: int
) -> AttentionMetadata:
    """The sequences of each group begin with the same blocks, and share so many keys of these."""
    shared_lens = torch.zeros(batch.num_seqs, dtype=torch.int32)
    for (first, *others), num_shared in zip(groups, lens, strict=True):
        shared_lens[[first, *others]] = num_shared
        num_blocks = -(-num_shared // block_size)
        starts = batch.block_table_offsets
        for each in others:
            refs = batch.block_table[starts[first] : starts[first] + num_blocks].clone()
            batch.block_table[starts[each] : starts[each] + num_blocks] = refs
    shared = SharedKeys(
        torch.tensor([seq for group in groups for seq in group], dtype=torch.int32),
        torch.tensor([0, *itertools.accumulate(map(len, groups))], dtype=torch.int32),
        shared_lens,
        max(lens),
    )
    return dataclasses.replace(batch, shared=shared)


def made_batch(case: AttentionCase, generator: torch.Generator) -> AttentionMetadata:
    num_blocks = sum(-(-context // case.block_size) for _, context in case.lens)
    return make_batch(case.lens, block_size=case.block_size, num_blocks=num_blocks, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_groups_of_decodes(device: str, case: AttentionCase, generator: torch.Generator) -> None:
    batch = with_shared_keys(made_batch(case, generator), groups_of(case), [64, 128, 64], case.block_size)
    check_attention(device, case, generator, batch=batch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "programs"),
    [
        (torch.float32, 20),
        *(pytest.param(torch.bfloat16, programs, marks=pytest.mark.slow) for programs in (1, 1000)),
    ],
)
def test_random_groups(device: str, dtype: torch.dtype, programs: int, generator: torch.Generator) -> None:
    """Shared keys and those of a sequence alone are split or not; some splits hold nothing."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    lens = [(1, draw(65, 400)) if draw(0, 6) else (draw(2, 20), draw(20, 90)) for _ in range(7)]
    lens.append((1, 350))
    decodes = [seq for seq, (rows, _) in enumerate(lens) if rows == 1]
    order = [decodes[i] for i in torch.randperm(len(decodes), generator=generator).tolist()]
    first, second = (order[: len(order) // 2], order[len(order) // 2 : -1]) if len(order) > 4 else (order, [])
    groups = [group for group in (first, second) if group]
    shared_lens = [draw(1, (min(lens[i][1] for i in group) - 1) // SHARED_UNIT + 1) * 64 for group in groups]
    case = AttentionCase(dtype, 40, 6, 2, 16, lens)
    batch = with_shared_keys(made_batch(case, generator), groups, shared_lens, case.block_size)
    check_attention(device, case, generator, programs, batch)


@pytest.mark.parametrize("device", DEVICES)
def test_groups_of_no_sequence(device: str, generator: torch.Generator) -> None:
    """As in a CUDA graph: bounds are higher than what there is, and arrays are longer."""
    case = AttentionCase(torch.float32, 16, 4, 2, 16, [(1, 150), (1, 20), (1, 200), (1, 133)])
    batch = with_shared_keys(made_batch(case, generator), [[2, 0, 3]], [128], case.block_size)
    assert batch.shared is not None
    sharers = torch.cat((batch.shared.sharers, torch.zeros(5, dtype=torch.int32)))
    offsets = torch.cat((batch.shared.offsets, torch.full((3,), 3, dtype=torch.int32)))
    shared = dataclasses.replace(batch.shared, sharers=sharers, offsets=offsets, max_len=700)
    batch = dataclasses.replace(batch, shared=shared, max_seq_len=700)
    check_attention(device, case, generator, 35, batch)
