"""Copies between the KV pools: the bytes, their order, what is reported and when, and the time on a bus."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backfill.bus.file import BusFile
from backfill.bus.throttle import BusThrottle
from backfill.core.block import BlockCopy, SlotCopy
from backfill.core.plan import BlockCopies, CopyDirections
from backfill.execution.copies import BlockCopier, create_copier
from backfill.execution.pool_pair import CompletedCopies, CpuPools, CudaPools
from tests.execution.tiny import Gate

BOTH = CopyDirections.CHECKPOINT | CopyDirections.RESTORE
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_BLOCKS, BLOCK_SIZE = 6, 8
SHAPE = (3, 2, 2, BLOCK_SIZE, 8)  # layers, K and V, heads, slots, head size


def make_pool(seed: int, device: str = "cpu") -> Tensor:
    return torch.randn((NUM_BLOCKS, *SHAPE), generator=torch.Generator().manual_seed(seed)).to(device)


def make_copier(kv_pool: Tensor, host_pool: Tensor, max_group_slots: int | None = None) -> BlockCopier:
    pools = CudaPools(kv_pool, host_pool) if kv_pool.is_cuda else CpuPools(kv_pool, host_pool)
    if max_group_slots is not None:
        pools.max_group_slots = max_group_slots
    return BlockCopier(pools)


def wait_for(copier: BlockCopier, count: int) -> CompletedCopies:
    """Take completed copies until there are so many."""
    taken = copier.take_completed()
    while len(taken.blocks) + len(taken.slots) < count:
        copier.wait(30.0)
        more = copier.take_completed()
        taken = CompletedCopies(taken.blocks + more.blocks, taken.slots + more.slots)
    return taken


@st.composite
def copies_of_one_plan(draw: st.DrawFn) -> BlockCopies:
    """Copies of whole blocks, and of slots of other blocks; blocks of a direction go to different ones."""
    directions = []
    for _ in range(2):
        pairs = list(
            zip(
                draw(st.permutations(range(NUM_BLOCKS))),
                draw(st.permutations(range(NUM_BLOCKS))),
                strict=True,
            )
        )
        num_blocks = draw(st.integers(0, 3))
        slots = []
        for device, host in pairs[num_blocks : num_blocks + draw(st.integers(0, 3))]:
            first = draw(st.integers(0, BLOCK_SIZE - 1))
            slots.append(SlotCopy(device, host, first, draw(st.integers(1, BLOCK_SIZE - first))))
        directions.append((tuple(BlockCopy(*pair) for pair in pairs[:num_blocks]), tuple(slots)))
    (checkpoint, slot_checkpoint), (restore, slot_restore) = directions
    blocking = draw(st.sampled_from([CopyDirections.NONE, *CopyDirections, BOTH]))
    return BlockCopies(checkpoint, restore, blocking, slot_checkpoint, slot_restore)


def apply(copies: BlockCopies, device: Tensor, host: Tensor) -> None:
    """What the copies mean, one after another."""
    for block in copies.checkpoint:
        host[block.host] = device[block.device]
    for each in copies.slot_checkpoint:
        at = slice(each.first, each.first + each.num)
        host[each.host, :, :, :, at] = device[each.device, :, :, :, at]
    for block in copies.restore:
        device[block.device] = host[block.host]
    for each in copies.slot_restore:
        at = slice(each.first, each.first + each.num)
        device[each.device, :, :, :, at] = host[each.host, :, :, :, at]


@pytest.mark.parametrize("device", DEVICES)
@given(plans=st.lists(copies_of_one_plan(), min_size=1, max_size=4), max_group_slots=st.integers(8, 24))
def test_copies_do_what_they_mean_in_their_order(
    device: str, plans: list[BlockCopies], max_group_slots: int
) -> None:
    pool, host_pool = make_pool(0, device), make_pool(1)
    expected, expected_host = make_pool(0), make_pool(1)
    copier = make_copier(pool, host_pool, max_group_slots)
    blocks: tuple[BlockCopy, ...] = ()
    slots: tuple[SlotCopy, ...] = ()
    for copies in plans:
        copier.begin(copies)
        apply(copies, expected, expected_host)
        if CopyDirections.CHECKPOINT in copies.blocking:
            if copies.checkpoint or copies.slot_checkpoint:
                assert torch.equal(host_pool, expected_host), "checkpoints begin first"
        else:
            blocks, slots = blocks + copies.checkpoint, slots + copies.slot_checkpoint
        if CopyDirections.RESTORE in copies.blocking:
            if copies.restore or copies.slot_restore:
                assert torch.equal(pool.cpu(), expected)
        else:
            blocks, slots = blocks + copies.restore, slots + copies.slot_restore
    assert wait_for(copier, len(blocks) + len(slots)) == CompletedCopies(blocks, slots), "each once, in order"
    copier.begin(BlockCopies(checkpoint=(BlockCopy(0, 0),), blocking=BOTH))  # after all others
    apply(BlockCopies(checkpoint=(BlockCopy(0, 0),)), expected, expected_host)
    assert torch.equal(pool.cpu(), expected)
    assert torch.equal(host_pool, expected_host)
    assert copier.take_completed() == CompletedCopies()
    copier.close()


@pytest.mark.parametrize("blocking", [CopyDirections.NONE, BOTH])
@pytest.mark.parametrize(
    "copies",
    [
        BlockCopies(checkpoint=(BlockCopy(0, NUM_BLOCKS),)),
        BlockCopies(slot_checkpoint=(SlotCopy(0, NUM_BLOCKS, 0, 1),)),
        BlockCopies(slot_restore=(SlotCopy(0, 0, 4, 5),)),
    ],
    ids=str,
)
def test_a_copy_that_fails_is_raised_by_every_call_after_it(
    copies: BlockCopies, blocking: CopyDirections
) -> None:
    copier = make_copier(make_pool(0), make_pool(1))
    copies = replace(copies, blocking=blocking)
    with pytest.raises(RuntimeError, match="between device and host memory failed") as raised:  # noqa: PT012
        copier.begin(copies)
        copier.wait(30.0)
    assert isinstance(raised.value.__cause__, ValueError)
    for call in (lambda: copier.begin(BlockCopies()), copier.take_completed, lambda: copier.wait(30.0)):
        with pytest.raises(RuntimeError, match="failed"):
            call()
    copier.close()


@pytest.mark.gpu
def test_copies_wait_for_what_is_queued_on_the_device() -> None:
    pool, host_pool = make_pool(0, "cuda"), make_pool(1)
    copier = make_copier(pool, host_pool)
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # cycles: tens of milliseconds
    pool[3].fill_(5.0)
    began_s = time.monotonic()
    copier.begin(BlockCopies((BlockCopy(3, 0),)))
    assert copier.take_completed() == CompletedCopies()
    assert time.monotonic() - began_s < 0.01
    assert wait_for(copier, 1).blocks == (BlockCopy(3, 0),)
    assert (host_pool[0] == 5.0).all()
    copier.close()
    assert not host_pool.is_pinned()


def test_completions_are_reported_once_as_they_come_and_nothing_blocks(gate: Gate) -> None:
    copier = make_copier(make_pool(0), make_pool(1), max_group_slots=2 * BLOCK_SIZE)
    pairs = tuple(BlockCopy(index, index) for index in range(5))
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
    assert wait_for(copier, 3).blocks == pairs[2:]
    copier.wait(30.0)
    assert copier.take_completed() == CompletedCopies()


def test_copies_that_cannot_be_begun_end_the_copier_too(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = make_copier(make_pool(0), make_pool(1))

    def no_memory(*arguments: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr("backfill.execution.copies.copy_groups", no_memory)
        with pytest.raises(MemoryError):
            copier.begin(BlockCopies((BlockCopy(0, 0),)))
    with pytest.raises(RuntimeError, match="failed"):
        copier.take_completed()
    copier.close()


def test_the_thread_ends_with_its_copier_and_leaves_the_pool() -> None:
    others = set(threading.enumerate())
    host_pool = make_pool(1)
    copier = make_copier(make_pool(0), host_pool)
    (thread,) = set(threading.enumerate()) - others
    gone = weakref.ref(host_pool)
    del copier, host_pool
    gc.collect()
    thread.join(30.0)
    assert not thread.is_alive()
    assert gone() is None


@pytest.mark.slow  # starts a process
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


def test_copies_take_the_time_that_the_bus_needs(tmp_path: Path) -> None:
    pool = torch.randn((12, 3, 2, 2, BLOCK_SIZE, 8))
    original = pool.clone()
    slept_s: list[float] = []
    bus = BusFile(tmp_path / "bus", 1e6, clock=lambda: 0.0)
    throttle = BusThrottle(bus, 1.0, clock=lambda: 0.0, sleep=slept_s.append)
    copier = create_copier(pool, 4, throttle)
    blocks = (BlockCopy(3, 1), BlockCopy(5, 2))
    both = CopyDirections.CHECKPOINT | CopyDirections.RESTORE
    copier.begin(BlockCopies(blocks, (), both, (SlotCopy(4, 3, 1, 3),), ()))
    pool.zero_()
    copier.begin(BlockCopies((), blocks, both, (), (SlotCopy(4, 3, 1, 3),)))
    copier.close()
    for copied in (3, 5):
        assert torch.equal(pool[copied], original[copied])
    assert torch.equal(pool[4, ..., 1:4, :], original[4, ..., 1:4, :])
    num_bytes = 2 * (2 * BLOCK_SIZE + 3) * pool[0].nbytes // BLOCK_SIZE
    assert throttle.num_bytes == num_bytes
    assert slept_s
    assert bus.reserve(0) * 1e6 - num_bytes < 1.0
    bus.close()
