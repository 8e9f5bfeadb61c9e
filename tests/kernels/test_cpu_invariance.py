"""Batch invariance: a row's result depends on its own tokens alone, to the bit, in every variant."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from backfill.core.block import KVLayout
from backfill.kernels.cpu import CpuKernels
from tests.kernels.batches import make_batch, make_metadata, unset_kv
from tests.kernels.cpu import random_rows, seeded

# Heads, key/value heads, head size, block size: shapes that AMX computes in tiles, and shapes that it cannot.
GEOMETRIES = [
    (9, 3, 64, 16),
    (4, 1, 40, 16),
    (3, 1, 64, 8),
    (8, 4, 128, 16),
    # Others in test_cpu.py, against the reference.
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in [(8, 2, 96, 16), (2, 2, 32, 32), (10, 1, 64, 16)]
    ),
]
LENGTH = 300  # several chunks of keys, and a last one that is not full
DECODED = ([LENGTH] * 8, [LENGTH, 1, 127, 128, 129, 257, 256, 255, 200, 299, 16, 3])


class Tokens:
    """The projections ``[LENGTH, (H + 2G) * D]`` of one sequence's tokens."""

    def __init__(
        self,
        geometry: tuple[int, int, int, int],
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        self.geometry = self.num_heads, self.num_kv_heads, self.head_dim, self.block_size = geometry
        self.kv_dtype = kv_dtype
        self.generator = generator
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        # Scores of this size make the maximum move from chunk to chunk.
        self.qkv = random_rows(generator, LENGTH, width, dtype=dtype) * 1.5

    def attend(self, kernels: CpuKernels, lens: list[tuple[int, int]]) -> Tensor:
        """Attention of rows ``[context - rows, context)`` of sequences that all have these tokens.

        In blocks of random places and directions; unused slots are unset.
        """
        block_size = self.block_size
        num_blocks = sum(-(-context // block_size) for _, context in lens) + 2
        layout = KVLayout(1, self.num_kv_heads, self.head_dim, block_size, self.kv_dtype.itemsize)
        pool = torch.full(layout.shape(num_blocks), unset_kv(self.kv_dtype), dtype=self.kv_dtype)
        whole = make_batch(
            [(context, context) for _, context in lens],
            block_size=block_size,
            num_blocks=num_blocks,
            generator=self.generator,
        )
        contexts = torch.cat([self.qkv[:context] for _, context in lens])
        kernels.rotate_and_write_kv(contexts.clone(), pool, 0, whole, self.num_heads, None)
        starts = whole.block_table_offsets.tolist()
        refs = [whole.block_table[start:end].tolist() for start, end in itertools.pairwise(starts)]
        batch = make_metadata([(*each, own) for each, own in zip(lens, refs, strict=True)], block_size)
        qkv = torch.cat([self.qkv[context - rows : context] for rows, context in lens])
        return kernels.attention(qkv, pool, 0, batch, self.num_heads, self.head_dim**-0.5)


@pytest.fixture(params=GEOMETRIES, ids=str)
def tokens(request: pytest.FixtureRequest, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tokens:
    return Tokens(request.param, dtype, kv_dtype, seeded("attention", request.param))


def test_attention_does_not_depend_on_the_batch(
    kernels: CpuKernels, tokens: Tokens, thread_counts: Iterator[int]
) -> None:
    """Prefill in one step, in chunks of any size, and decode, in any company, on any number of threads."""
    expected = tokens.attend(kernels, [(LENGTH, LENGTH)])
    for threads in thread_counts:
        assert torch.equal(tokens.attend(kernels, [(LENGTH, LENGTH)]), expected), threads
        generator = seeded(
            "company", kernels.isa, tokens.qkv.dtype, tokens.kv_dtype, tokens.geometry, threads
        )

        def draw(low: int, high: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        for _ in range(2):
            lens = []
            for _ in range(draw(1, 6)):
                context = draw(1, LENGTH + 1)
                lens.append((1 if draw(0, 2) else draw(1, min(context, 200) + 1), context))
            results = tokens.attend(kernels, lens).split([rows for rows, _ in lens])
            for (rows, context), result in zip(lens, results, strict=True):
                assert torch.equal(result, expected[context - rows : context]), (threads, lens, context)


def test_decodes_of_many_keys_share_items_and_threads(
    kernels: CpuKernels, tokens: Tokens, thread_counts: Iterator[int]
) -> None:
    """Enough of them that an item has several heads: of parts of a context, and of whole ones."""
    expected = tokens.attend(kernels, [(LENGTH, LENGTH)])
    for threads in thread_counts:
        for contexts in DECODED:
            results = tokens.attend(kernels, [(1, context) for context in contexts])
            assert torch.equal(results, expected[[context - 1 for context in contexts]]), (threads, contexts)


@pytest.mark.parametrize(("out_size", "in_size"), [(96, 320), (70, 40), (33, 3200)])
def test_a_row_of_a_linear_layer_does_not_depend_on_the_others(
    kernels: CpuKernels, dtype: torch.dtype, out_size: int, in_size: int, thread_counts: Iterator[int]
) -> None:
    generator = seeded("linear", in_size)
    linear = kernels.linear(random_rows(generator, out_size, in_size, dtype=dtype))
    x = random_rows(generator, 600, in_size, dtype=dtype)
    whole = linear(x)
    for threads in thread_counts:
        for first, last in [(0, 600), (0, 1), (5, 22), (31, 33), (60, 100), (63, 128), (7, 300), (599, 600)]:
            assert torch.equal(linear(x[first:last]), whole[first:last]), (threads, first)
