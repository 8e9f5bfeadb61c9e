from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.execution.shared_keys import MIN_SAVED_KEYS, MIN_SHARED_KEYS, find_shared_keys
from backfill.kernels.inputs import SHARED_UNIT
from tests.shared import examples


class Sequence(NamedTuple):
    query_len: int
    num_keys: int
    blocks: list[int]

    def blocks_of(self, num_keys: int, block_size: int) -> list[int]:
        return self.blocks[: -(-num_keys // block_size)]


def found(sequences: list[Sequence], block_size: int) -> tuple[list[list[int]], list[int]]:
    """The groups, and the shared keys of each sequence, or nothing."""
    sharers, offsets, lens = find_shared_keys(
        np.array([0, *itertools.accumulate(each.query_len for each in sequences)], dtype=np.int32),
        np.array([each.num_keys for each in sequences], dtype=np.int32),
        np.array([ref for each in sequences for ref in each.blocks], dtype=np.int32),
        np.array([0, *itertools.accumulate(len(each.blocks) for each in sequences)], dtype=np.int32),
        block_size,
    )
    assert {array.dtype for array in (sharers, offsets, lens)} == {np.dtype(np.int32)}
    return [sharers[a:b].tolist() for a, b in itertools.pairwise(offsets)], lens.tolist()


def expected(sequences: list[Sequence], block_size: int) -> tuple[list[list[int]], list[int]]:
    """By comparing every two sequences."""
    groups: list[list[int]] = []
    for index, each in enumerate(sequences):
        if each.query_len > 1 or each.num_keys <= MIN_SHARED_KEYS:
            continue
        beginning = each.blocks_of(MIN_SHARED_KEYS, block_size)
        for group in groups:
            if sequences[group[0]].blocks_of(MIN_SHARED_KEYS, block_size) == beginning:
                group.append(index)
                break
        else:
            groups.append([index])
    groups = [group for group in groups if len(group) > 1]
    lens, num_saved = [0] * len(sequences), 0
    for group in groups:
        members = [sequences[index] for index in group]
        num_keys = 0
        while num_keys + SHARED_UNIT < min(each.num_keys for each in members):
            beginnings = [each.blocks_of(num_keys + SHARED_UNIT, block_size) for each in members]
            if any(beginning != beginnings[0] for beginning in beginnings):
                break
            num_keys += SHARED_UNIT
        num_saved += (len(group) - 1) * num_keys
        for index in group:
            lens[index] = num_keys
    return (groups, lens) if num_saved >= MIN_SAVED_KEYS else ([], [])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Sequence], int]:
    """Sequences that go on from some of the blocks of one of two beginnings, or of a third that leaves it."""
    block_size = draw(st.sampled_from([8, 16, 48, 64, 320]))
    unused = itertools.count()

    def new_blocks(most_keys: int) -> list[int]:
        return [next(unused) for _ in range(draw(st.integers(0, most_keys // block_size + 1)))]

    stems = [new_blocks(2000), new_blocks(600)]
    stems.append(stems[0][: draw(st.integers(0, len(stems[0])))] + new_blocks(600))
    sequences = []
    for _ in range(draw(st.integers(1, 20))):
        stem = draw(st.sampled_from(stems))
        if draw(st.integers(0, 3)) == 0:
            stem = stem[: draw(st.integers(0, len(stem)))]
        blocks = stem + [next(unused) for _ in range(draw(st.integers(0 if stem else 1, 3)))]
        num_keys = (len(blocks) - 1) * block_size + draw(st.integers(1, block_size))
        query_len = draw(st.sampled_from([1, 1, 1, 1, 1, 5]))
        sequences.append(Sequence(min(query_len, num_keys), num_keys, blocks))
    return sequences, block_size


@given(batches())
@settings(max_examples=examples(200))
def test_groups_are_those_of_every_two_sequences(batch: tuple[list[Sequence], int]) -> None:
    sequences, block_size = batch
    assert found(sequences, block_size) == expected(sequences, block_size)


def test_decodes_after_one_prompt_are_a_group() -> None:
    system = list(range(70))
    decodes = [Sequence(1, 16 * 71 + 1 + i, [*system, 100 + 2 * i, 101 + 2 * i]) for i in range(9)]
    other, prompt = Sequence(1, 700, list(range(200, 244))), Sequence(30, 1150, [*system, 300, 301])
    groups, lens = found([*decodes[:4], other, prompt, *decodes[4:]], 16)
    # 70 blocks have 1,120 keys: 17 units of 64.
    assert groups == [[0, 1, 2, 3, 6, 7, 8, 9, 10]]
    assert lens == [1088] * 4 + [0, 0] + [1088] * 5


def test_few_keys_are_not_shared() -> None:
    short = [Sequence(1, 300, [*range(16), 100 + i, 200 + i, 300 + i]) for i in range(8)]
    assert found(short, 16) == ([], [])
    assert found(short[:1], 16) == ([], [])


def test_each_keeps_a_key_of_its_own() -> None:
    same = [Sequence(1, 1024, list(range(64)))] * 12
    assert found(same, 16) == ([list(range(12))], [960] * 12)
