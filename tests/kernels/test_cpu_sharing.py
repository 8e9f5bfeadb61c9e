"""Decodes that begin with the same blocks: computed together, and to the bit as each alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from backfill import _kernels  # type: ignore[attr-defined]
from backfill.core.block import KVLayout, pack_block_ref
from backfill.kernels.cpu import CpuKernels, available_isas
from tests.kernels.batches import make_metadata, make_pool
from tests.kernels.cpu import random_rows, seeded

# Heads, key/value heads, head size, block size: shapes that AMX computes in tiles, and shapes that it cannot.
# There are as many heads as make a few sequences worth computing together.
GEOMETRIES = [(16, 2, 64, 16), (24, 1, 40, 16), (40, 1, 64, 8), (24, 3, 32, 48), (20, 1, 64, 32)]
NUM_BLOCKS = 700


class Tree:
    """Sequences that share beginnings of random lengths with others, or none, in a pool of random KV."""

    def __init__(
        self, geometry: tuple[int, int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype, seed: int
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim, self.block_size = geometry
        self.generator = seeded("sharing", geometry, seed)
        self.dtype = dtype
        layout = KVLayout(1, self.num_kv_heads, self.head_dim, self.block_size, kv_dtype.itemsize)
        self.pool = make_pool(layout, NUM_BLOCKS, kv_dtype, self.generator)
        self.unused = torch.randperm(NUM_BLOCKS, generator=self.generator).tolist()

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.generator))

    def new_blocks(self, count: int) -> list[int]:
        return [pack_block_ref(self.unused.pop(), bool(self.draw(0, 2))) for _ in range(count)]

    def sequences(self) -> list[tuple[int, int, list[int]]]:
        """Beginnings fork from one; each forks into sequences of their own lengths, most of them decodes."""
        size = self.block_size
        trunk = self.new_blocks(self.draw(1, 560 // size))
        seqs = []
        for _ in range(self.draw(1, 4)):
            stem = trunk[: self.draw(0, len(trunk) + 1)] + self.new_blocks(self.draw(0, 320 // size))
            for _ in range(self.draw(1, 16)):
                own = self.draw(0, 3) if self.draw(0, 6) else 400 // size
                refs = stem[: self.draw(0, len(stem) + 1)] if self.draw(0, 4) == 0 else list(stem)
                refs += self.new_blocks(own if refs else 1)
                context = (len(refs) - 1) * size + self.draw(1, size + 1)
                seqs.append((1 if self.draw(0, 5) else self.draw(1, min(context, 40) + 1), context, refs))
        order = torch.randperm(len(seqs), generator=self.generator).tolist()
        return [seqs[i] for i in order]

    def attend(self, kernels: CpuKernels, seqs: Sequence[tuple[int, int, list[int]]], qkv: Tensor) -> Tensor:
        batch = make_metadata(seqs, self.block_size)
        return kernels.attention(qkv, self.pool, 0, batch, self.num_heads, self.head_dim**-0.5)

    def queries(self, rows: int) -> Tensor:
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return random_rows(self.generator, rows, width, dtype=self.dtype) * 1.5


@pytest.mark.parametrize(
    "geometry",
    [*GEOMETRIES[:3], *(pytest.param(each, marks=pytest.mark.slow) for each in GEOMETRIES[3:])],
    ids=str,
)
def test_results_do_not_depend_on_sharing(
    kernels: CpuKernels,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    geometry: tuple[int, int, int, int],
    thread_counts: Iterator[int],
) -> None:
    tree, seqs = sharing_tree(kernels.isa, geometry, dtype, kv_dtype)
    qkv = tree.queries(sum(rows for rows, _, _ in seqs))
    alone = [
        tree.attend(kernels, [seq], rows)
        for seq, rows in zip(seqs, qkv.split([rows for rows, _, _ in seqs]), strict=True)
    ]
    for threads in thread_counts:
        together = tree.attend(kernels, seqs, qkv).split([rows for rows, _, _ in seqs])
        for seq, result, expected in zip(seqs, together, alone, strict=True):
            assert torch.equal(result, expected), (threads, seq)


def sharing_tree(
    isa: str, geometry: tuple[int, int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[Tree, list[tuple[int, int, list[int]]]]:
    """Another for each variant and type; some sequences share keys on any number of threads."""
    num_heads, num_kv_heads, _, block_size = geometry
    min_sharers = max(_kernels.min_sharers(num_heads, num_kv_heads, threads) for threads in (1, 2, 3))
    cases = [*itertools.product(available_isas(), [torch.float32, torch.bfloat16], [False, True])]
    for seed in itertools.count(cases.index((isa, dtype, kv_dtype == torch.int8)), len(cases)):
        tree = Tree(geometry, dtype, kv_dtype, seed)
        seqs = tree.sequences()
        if any(shared_keys(block_size, seqs, min_sharers)):
            return tree, seqs
    raise AssertionError


def shared_keys(block_size: int, seqs: Sequence[tuple[int, int, list[int]]], min_sharers: int) -> list[int]:
    batch = make_metadata(seqs, block_size)
    arrays = batch.cu_seqlens_q, batch.seq_lens, batch.block_table, batch.block_table_offsets
    cpp = _kernels.Batch(0, 0, *(each.data_ptr() for each in arrays), 0, batch.num_seqs)
    keys: list[int] = cpp.shared_keys(block_size, min_sharers)
    return keys


def in_same_blocks(a: tuple[int, int, list[int]], b: tuple[int, int, list[int]], block_size: int) -> int:
    """Tokens in whole chunks of 128."""
    blocks = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a[2], b[2], strict=False))
    )
    return min(blocks * block_size, a[1], b[1]) // 128 * 128


@pytest.mark.parametrize("min_sharers", [2, 3, 6])
def test_keys_of_enough_decodes_are_shared(min_sharers: int) -> None:
    for seed in range(15):
        tree = Tree(GEOMETRIES[seed % len(GEOMETRIES)], torch.float32, torch.float32, seed)
        seqs = tree.sequences()
        decodes = [seq for seq in seqs if seq[0] == 1]
        expected = []
        for seq in seqs:
            common = sorted((in_same_blocks(seq, other, tree.block_size) for other in decodes), reverse=True)
            is_shared = seq[0] == 1 and len(common) >= min_sharers
            expected.append(common[min_sharers - 1] if is_shared else 0)
        assert shared_keys(tree.block_size, seqs, min_sharers) == expected
