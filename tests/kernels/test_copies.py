"""Copies between KV pools in host memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backfill.kernels import cpu_copies

NUM_BLOCKS = 4


def make_pool() -> Tensor:
    return torch.randn(NUM_BLOCKS, 3, 2, 2, 8, 8)


def test_blocks_that_pools_do_not_have_are_refused() -> None:
    pool, other = make_pool(), make_pool()
    for blocks, others, name in (
        ([NUM_BLOCKS], [0], "destination"),
        ([-1], [0], "destination"),
        ([0], [NUM_BLOCKS], "source"),
        ([0, 1], [0], "source"),
    ):
        with pytest.raises(ValueError, match=name):
            cpu_copies.copy_blocks(pool, blocks, other, others)
    with pytest.raises(ValueError, match="source: expected blocks of"):
        cpu_copies.copy_blocks(pool, [0], other.bfloat16(), [0])
    with pytest.raises(ValueError, match="destination: expected a contiguous pool"):
        cpu_copies.copy_blocks(pool.transpose(1, 2), [0], other, [0])
    cpu_copies.copy_blocks(pool, [], other, [])


@pytest.mark.parametrize("size", [8, 24, 64, 72, 136, 4096 + 8])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_blocks_of_any_size_and_place_are_copied(size: int, offset: int) -> None:
    """Sizes and addresses in float32, so some of neither are whole cache lines or vectors."""
    source = torch.arange(5 * size + offset, dtype=torch.float32)[offset:].view(5, size)
    destination = torch.full((4 * size + offset + 1,), -1.0)
    cpu_copies.copy_blocks(destination[offset:-1].view(4, size), [3, 0], source, [1, 4])
    expected = torch.full((4, size), -1.0)
    expected[3], expected[0] = source[1], source[4]
    assert torch.equal(destination[offset:-1].view(4, size), expected)
    assert (destination[:offset] == -1.0).all() and destination[-1] == -1.0
