"""Copies of slots: C++, Triton and the reference against slices of the pool."""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backfill.kernels import cpu_copies
from backfill.kernels.slots import SlotKernels, SlotRange, num_packed
from backfill.kernels.triton_ops import slots as triton_slots
from tests.kernels import reference
from tests.shared import examples

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# With a GPU, Triton compiles, and the interpreter's case does not exist.
IMPLEMENTATIONS = [
    pytest.param(reference, "cpu", id="reference"),
    pytest.param(cpu_copies, "cpu", id="cpu"),
    *([pytest.param(triton_slots, "cpu", id="triton-interpreted")] if INTERPRETED else []),
    pytest.param(triton_slots, "cuda", id="triton", marks=pytest.mark.gpu),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8]


class Case(NamedTuple):
    """Ranges of a pool; ``offset`` elements of its memory are before it, so that it is not aligned."""

    shape: tuple[int, int, int, int, int, int]
    dtype: torch.dtype
    ranges: tuple[SlotRange, ...]
    offset: int
    seed: int

    def pool(self, device: str) -> Tensor:
        return self._random(self.seed).to(device)

    def other_pool(self) -> Tensor:
        return self._random(self.seed + 1)

    def _random(self, seed: int) -> Tensor:
        """Random bytes, so some floats are NaN, with bits of their own."""
        generator = torch.Generator().manual_seed(seed)
        size = torch.Size(self.shape).numel() + self.offset
        data = torch.randint(0, 256, (size * self.dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return data.view(self.dtype)[self.offset :].view(self.shape)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to two ranges of a block, from both its ends, of some of the blocks in any order."""
    block_size = draw(st.sampled_from([8, 16, 32]))
    num_blocks = draw(st.integers(1, 4))
    row_size = draw(st.sampled_from([3, 8, 40, 64, 68]))
    shape = (num_blocks, draw(st.integers(1, 3)), 2, draw(st.integers(1, 3)), block_size, row_size)
    ranges = []
    for block in range(num_blocks):
        front = draw(st.integers(0, block_size))
        back = draw(st.integers(0, block_size - front))
        ranges += [SlotRange(block, 0, front)] * (front > 0)
        ranges += [SlotRange(block, block_size - back, back)] * (back > 0)
    chosen = tuple(draw(st.permutations(ranges))[: draw(st.integers(0, len(ranges)))])
    return Case(
        shape, draw(st.sampled_from(DTYPES)), chosen, draw(st.integers(0, 9)), draw(st.integers(0, 99))
    )


def bits(x: Tensor) -> Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def slots_of(pool: Tensor, each: SlotRange) -> Tensor:
    return pool[each.block, :, :, :, each.first : each.first + each.num]


@pytest.mark.parametrize(("kernels", "device"), IMPLEMENTATIONS)
@settings(max_examples=examples(40))
@given(case=cases(), unused=st.integers(0, 3))
def test_slots_are_packed_one_range_after_another(
    kernels: SlotKernels, device: str, case: Case, unused: int
) -> None:
    pool = case.pool(device)
    size = num_packed(pool, case.ranges)
    packed = torch.zeros(size + unused, dtype=case.dtype, device=device)
    kernels.gather_slots(pool, case.ranges, packed)
    parts = [bits(slots_of(pool, each)).flatten() for each in case.ranges]
    rest = torch.zeros(unused * case.dtype.itemsize, dtype=torch.uint8)
    assert torch.equal(bits(packed), torch.cat([*parts, rest]))
    assert torch.equal(bits(pool), bits(case.pool("cpu"))), "the pool is only read"


@pytest.mark.parametrize(("kernels", "device"), IMPLEMENTATIONS)
@settings(max_examples=examples(40))
@given(case=cases())
def test_packed_slots_return_and_no_other_byte_changes(kernels: SlotKernels, device: str, case: Case) -> None:
    pool, expected = case.pool(device), case.pool("cpu")
    packed = torch.empty(num_packed(pool, case.ranges), dtype=case.dtype)
    reference.gather_slots(case.other_pool(), case.ranges, packed)
    kernels.scatter_slots(packed.to(device), pool, case.ranges)
    for each in case.ranges:
        slots_of(expected, each).copy_(slots_of(case.other_pool(), each))
    assert torch.equal(bits(pool), bits(expected))


@given(case=cases(), data=st.data())
def test_slots_are_copied_between_pools_and_no_other_byte_changes(case: Case, data: st.DataObject) -> None:
    source, destination, expected = case.pool("cpu"), case.other_pool(), case.other_pool()
    mapping = data.draw(st.permutations(range(case.shape[0])))
    cpu_copies.copy_slots(destination, [mapping[each.block] for each in case.ranges], source, case.ranges)
    for each in case.ranges:
        slots_of(expected, each._replace(block=mapping[each.block])).copy_(slots_of(source, each))
    assert torch.equal(bits(destination), bits(expected))
    assert torch.equal(bits(source), bits(case.pool("cpu")))


def test_another_thread_may_write_the_other_slots_meanwhile() -> None:
    """Slots of 24 bytes, so the two ends of a plane share cache lines."""
    source, destination = torch.ones(50, 30, 2, 3, 8, 6), torch.zeros(50, 30, 2, 3, 8, 6)
    front = [SlotRange(block, 0, 3) for block in range(50)]
    ends = threading.Event()

    def copy_on() -> None:
        while not ends.is_set():
            cpu_copies.copy_slots(destination, range(50), source, front)

    thread = threading.Thread(target=copy_on)
    thread.start()
    try:
        for value in range(200):
            destination[:, :, :, :, 3:] = value
            assert (destination[:, :, :, :, 3:] == value).all()
    finally:
        ends.set()
        thread.join()
    assert (destination[:, :, :, :, :3] == 1.0).all()


@pytest.mark.parametrize("kernels", [reference, cpu_copies, triton_slots])
def test_what_the_pool_lacks_is_refused(kernels: SlotKernels) -> None:
    pool = torch.zeros(4, 3, 2, 2, 8, 8)
    packed = torch.zeros(pool.numel())
    for wrong in ((4, 0, 1), (-1, 0, 1), (0, 8, 1), (0, -1, 2), (0, 4, 5), (0, 4, 0), (0, 4, -1)):
        ranges = [SlotRange(0, 0, 1), SlotRange(*wrong)]
        with pytest.raises(ValueError, match="pool: expected"):
            kernels.gather_slots(pool, ranges, packed)
        with pytest.raises(ValueError, match="pool: expected"):
            kernels.scatter_slots(packed, pool, ranges)
    one = [SlotRange(0, 0, 8)]
    for wrong_pool in (pool[0], pool.transpose(1, 2)):
        with pytest.raises(ValueError, match=r"pool: expected .*contiguous"):
            kernels.gather_slots(wrong_pool, one, packed)
    size = num_packed(pool, one)
    for wrong_packed in (
        packed[: size - 1],
        packed[: 2 * size : 2],
        packed.bfloat16(),
        packed.view(1, -1),
        packed.to("meta"),
    ):
        with pytest.raises(ValueError, match="packed: expected contiguous"):
            kernels.gather_slots(pool, one, wrong_packed)
        with pytest.raises(ValueError, match="packed: expected contiguous"):
            kernels.scatter_slots(wrong_packed, pool, one)
    assert not packed.any() and not pool.any()


def test_pools_that_do_not_match_are_refused() -> None:
    pool, other = torch.zeros(4, 3, 2, 2, 8, 8), torch.ones(2, 3, 2, 2, 8, 8)
    for destination_blocks, each, name in (
        ([4], SlotRange(0, 0, 1), "destination"),
        ([-1], SlotRange(0, 0, 1), "destination"),
        ([3], SlotRange(2, 0, 1), "source"),
        ([3], SlotRange(1, 0, 9), "source"),
        ([2, 3], SlotRange(1, 0, 8), "source"),
    ):
        with pytest.raises(ValueError, match=name):
            cpu_copies.copy_slots(pool, destination_blocks, other, [each])
    with pytest.raises(ValueError, match="source: expected blocks of"):
        cpu_copies.copy_slots(pool, [0], other.bfloat16(), [SlotRange(0, 0, 1)])
    with pytest.raises(ValueError, match="source: expected blocks of"):
        cpu_copies.copy_slots(pool, [0], torch.ones(2, 3, 2, 2, 4, 16), [SlotRange(0, 0, 1)])
    with pytest.raises(ValueError, match="destination: expected a contiguous pool"):
        cpu_copies.copy_slots(pool.transpose(1, 2), [0], other, [SlotRange(0, 0, 1)])
    assert not pool.any()
