"""Copies between the KV pools: the bytes, their order, what is reported and when, and a request's tokens."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from backfill.core.block import BlockCopy
from backfill.core.plan import BlockCopies, CopyDirections
from backfill.execution.copies import BlockCopier, ThreadBlockCopier
from backfill.execution.pool_pair import CompletedCopies, CpuPools, CudaPools
from tests.execution.tiny import Gate, copies

BOTH = CopyDirections.CHECKPOINT | CopyDirections.RESTORE
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_BLOCKS, NUM_HOST_BLOCKS = 40, 30
SHAPE = (3, 2, 2, 8, 8)  # layers, K and V, heads, slots, head size
BLOCK_SIZE = 8


def make_pool(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((NUM_BLOCKS, *SHAPE), generator=generator).to(dtype).to(device)


def make_copier(pool: Tensor, blocks_per_group: int | None = None) -> tuple[BlockCopier, Tensor]:
    host_pool = torch.empty((NUM_HOST_BLOCKS, *SHAPE), dtype=pool.dtype)
    pools = CudaPools(pool, host_pool) if pool.is_cuda else CpuPools(pool, host_pool)
    if blocks_per_group is not None:
        pools.max_group_slots = blocks_per_group * BLOCK_SIZE
    return ThreadBlockCopier(pools), host_pool


def wait_for(copier: BlockCopier, count: int) -> list[BlockCopy]:
    """Take completed copies until there are so many."""
    taken: list[BlockCopy] = []
    until_s = time.monotonic() + 30.0
    while len(taken) < count:
        assert time.monotonic() < until_s
        copier.wait(10.0)
        taken += copier.take_completed().blocks
    return taken


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_arrive_both_ways(device: str, dtype: torch.dtype) -> None:
    pool = make_pool(device, dtype)
    original = pool.cpu().clone()
    rng = random.Random(0)
    copier, host_pool = make_copier(pool, blocks_per_group=7)
    pairs = copies(
        list(zip(rng.sample(range(NUM_BLOCKS), 25), rng.sample(range(NUM_HOST_BLOCKS), 25), strict=True))
    )
    copier.begin(BlockCopies(pairs))
    assert sorted(wait_for(copier, 25)) == sorted(pairs)
    for copied in pairs:
        assert torch.equal(host_pool[copied.host], original[copied.device])
    pool.zero_()
    back = copies(list(zip(rng.sample(range(NUM_BLOCKS), 25), (pair.host for pair in pairs), strict=True)))
    copier.begin(BlockCopies(restore=back))
    assert sorted(wait_for(copier, 25)) == sorted(back)
    expected = torch.zeros_like(original)
    for (came_from, _), (device_block, _) in zip(pairs, back, strict=True):
        expected[device_block] = original[came_from]
    assert torch.equal(pool.cpu(), expected)
    copier.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks_per_group", [1, 2, 100])
def test_a_block_is_saved_before_another_is_restored_into_it(device: str, blocks_per_group: int) -> None:
    pool = make_pool(device)
    original = pool.cpu().clone()
    copier, host_pool = make_copier(pool, blocks_per_group)
    copier.begin(BlockCopies(copies([(1, 4), (2, 5), (3, 6)]), blocking=BOTH))
    copier.begin(
        BlockCopies(copies([(7, 0), (8, 1), (9, 2)]), copies([(7, 4), (8, 0), (9, 6)]), blocking=BOTH)
    )
    assert copier.take_completed() == CompletedCopies()
    for device_block, host in ((1, 4), (2, 5), (3, 6), (7, 0), (8, 1), (9, 2)):
        assert torch.equal(host_pool[host], original[device_block])
    for device_block, came_from in ((7, 1), (8, 7), (9, 3)):
        assert torch.equal(pool[device_block].cpu(), original[came_from])
    copier.wait(30.0)  # nothing is in flight
    copier.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocking_copies", [CopyDirections.CHECKPOINT, CopyDirections.RESTORE])
def test_what_is_waited_for_is_complete_and_not_reported(
    device: str, blocking_copies: CopyDirections
) -> None:
    pool = make_pool(device)
    copier, host_pool = make_copier(pool, blocks_per_group=1)
    copier.begin(BlockCopies(copies([(0, 0), (1, 1)]), blocking=BOTH))
    saves, restores = copies([(2, 2), (3, 3)]), copies([(4, 0), (5, 1)])
    copier.begin(BlockCopies(saves, restores, blocking_copies))
    if blocking_copies is CopyDirections.CHECKPOINT:
        assert torch.equal(host_pool[2:4], pool[2:4].cpu())
        reported = restores
    else:
        assert torch.equal(pool[4:6], pool[0:2])
        reported = saves
    assert wait_for(copier, 2) == list(reported)
    copier.wait(30.0)
    assert copier.take_completed() == CompletedCopies()
    copier.close()


@pytest.mark.gpu
def test_copies_wait_for_what_is_queued_on_the_device() -> None:
    pool = make_pool("cuda")
    copier, host_pool = make_copier(pool)
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # cycles: tens of milliseconds
    pool[3].fill_(5.0)
    began_s = time.monotonic()
    copier.begin(BlockCopies(copies([(3, 0)])))
    assert copier.take_completed() == CompletedCopies()
    assert time.monotonic() - began_s < 0.01
    assert wait_for(copier, 1) == list(copies([(3, 0)]))
    assert (host_pool[0] == 5.0).all()
    copier.close()
    assert not host_pool.is_pinned()


def test_completions_are_reported_once_as_they_come_and_nothing_blocks(gate: Gate) -> None:
    copier, _ = make_copier(make_pool(), blocks_per_group=2)
    pairs = copies([(index, index) for index in range(5)])
    copier.begin(BlockCopies(pairs[:4]))
    copier.begin(BlockCopies(restore=pairs[4:]))
    assert copier.take_completed() == CompletedCopies()
    copier.wait(0.0)  # the timeout ends it: the thread is held
    assert copier.take_completed() == CompletedCopies()
    gate.let(1)
    copier.wait(30.0)
    assert copier.take_completed() == CompletedCopies(pairs[:2])
    assert copier.take_completed() == CompletedCopies()
    gate.let(2)
    assert wait_for(copier, 3) == list(pairs[2:])
    copier.wait(30.0)
    assert copier.take_completed() == CompletedCopies()


@pytest.mark.parametrize("blocking_copies", [CopyDirections.NONE, BOTH])
def test_a_copy_that_fails_is_raised_by_every_call_after_it(blocking_copies: CopyDirections) -> None:
    copier, _ = make_copier(make_pool())
    with pytest.raises(RuntimeError, match="between device and host memory failed") as raised:  # noqa: PT012
        copier.begin(BlockCopies(copies([(0, NUM_HOST_BLOCKS)]), blocking=blocking_copies))
        copier.wait(30.0)
    assert isinstance(raised.value.__cause__, ValueError)
    for call in (lambda: copier.begin(BlockCopies()), copier.take_completed, lambda: copier.wait(30.0)):
        with pytest.raises(RuntimeError, match="failed"):
            call()
    copier.close()


def test_copies_that_cannot_be_begun_end_the_copier_too(monkeypatch: pytest.MonkeyPatch) -> None:
    copier, _ = make_copier(make_pool())

    def no_memory(*arguments: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr("backfill.execution.copies.copy_groups", no_memory)
        with pytest.raises(MemoryError):
            copier.begin(BlockCopies(copies([(0, 0)])))
    with pytest.raises(RuntimeError, match="failed"):
        copier.take_completed()
    copier.close()


def test_the_thread_ends_with_its_copier_and_leaves_the_pool() -> None:
    others = set(threading.enumerate())
    copier, host_pool = make_copier(make_pool())
    (thread,) = set(threading.enumerate()) - others
    gone = weakref.ref(host_pool)
    del copier, host_pool
    gc.collect()
    thread.join(30.0)
    assert not thread.is_alive()
    assert gone() is None


def test_a_process_may_end_while_blocks_are_copied() -> None:
    """The interpreter must not be gone when the thread comes back to it."""
    script = """if True:
        import torch
        from backfill.core.block import BlockCopy
        from backfill.core.plan import BlockCopies
        from backfill.execution.copies import create_copier
        copier = create_copier(torch.ones(64, 1, 2, 1, 1 << 7, 1 << 10), 64)
        copier.begin(BlockCopies(tuple(BlockCopy(block, block) for block in range(64)) * 50))
        copier.wait(30.0)
        print("ends")
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
