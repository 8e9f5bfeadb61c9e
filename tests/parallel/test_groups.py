"""Sums over ranks, through shared memory and through torch.distributed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backfill.execution.collectives import PeerFailed, SafepointGroup
from backfill.parallel import torch_group
from backfill.parallel.shared_memory import create_memory, map_memory
from backfill.parallel.shared_memory_group import SharedMemoryGroup
from backfill.parallel.shared_state import RankProgress, SharedState
from backfill.parallel.torch_group import TorchGroup, create_process_group

Result = TypeVar("Result")
Groups = list[SafepointGroup]
PART_BYTES = 256
CPU = torch.device("cpu")


def unseen() -> RankProgress:
    return RankProgress(memoryview(bytearray(64)).cast("q"))


def shared_memory_groups(size: int) -> Groups:
    fd = create_memory(SharedMemoryGroup.num_bytes(size, PART_BYTES))
    groups: Groups = [
        SharedMemoryGroup(map_memory(fd), rank, size, unseen(), PART_BYTES) for rank in range(size)
    ]
    os.close(fd)
    return groups


def gloo_groups(size: int) -> Groups:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(size) as threads:
        found = [
            threads.submit(
                lambda rank=rank: TorchGroup(create_process_group(store, "g", rank, size, CPU), unseen())
            )
            for rank in range(size)
        ]
        return [each.result() for each in found]


def on_ranks(groups: Groups, run: Callable[[SafepointGroup], Result]) -> list[Result]:
    """What ``run`` returns on a thread of each rank."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(run, groups))


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize(
    ("make", "size"),
    [(shared_memory_groups, 2), (shared_memory_groups, 3), (gloo_groups, 2)],  # the sum of two has no order
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 30])  # in one part, and in several, the last one smaller
def test_a_sum_is_taken_in_the_order_of_ranks_in_float32(
    make: Callable[[int], Groups], size: int, dtype: torch.dtype, num_rows: int
) -> None:
    groups = make(size)

    def run(group: SafepointGroup) -> list[Tensor]:
        found = []
        for step in range(3):
            group.begin_step()
            for each in range(3):
                seed = 100 * step + 10 * each + group.rank
                found.append(group.all_reduce(values(seed, num_rows, 7, dtype=dtype)))
        return found

    sums = on_ranks(groups, run)
    for index in range(9):
        step, each = divmod(index, 3)
        total = torch.zeros(num_rows, 7)
        for rank in range(size):
            total += values(100 * step + 10 * each + rank, num_rows, 7, dtype=dtype).float()
        for rank in range(size):
            assert torch.equal(sums[rank][index], total.to(dtype))
    for group in groups:
        group.close()


@pytest.mark.parametrize("make", [shared_memory_groups, gloo_groups])
@pytest.mark.parametrize("shape", [(1, 5), (23, 5), (3, 100)])  # a row of the last is larger than a part
def test_columns_are_gathered_on_rank_0(make: Callable[[int], Groups], shape: tuple[int, int]) -> None:
    groups = make(3)

    def run(group: SafepointGroup) -> Tensor | None:
        group.begin_step()
        return group.gather_columns(values(group.rank, *shape))

    first, *others = on_ranks(groups, run)
    assert first is not None
    assert torch.equal(first, torch.cat([values(rank, *shape) for rank in range(3)], dim=1))
    assert others == [None, None]
    for group in groups:
        group.close()


@pytest.mark.parametrize("make", [shared_memory_groups, gloo_groups])
def test_what_rank_0_answers_travels_with_armed_sums(make: Callable[[int], Groups]) -> None:
    groups = make(2)

    def run(group: SafepointGroup) -> list[bool]:
        answers, found = iter([False, True, False, True]), []
        asked = (lambda: next(answers)) if group.rank == 0 else (lambda: True)
        group.begin_step()
        for _ in range(4):
            group.arm(asked)
            assert torch.equal(group.all_reduce(torch.ones(2, 3)), torch.full((2, 3), 2.0))
            found.append(group.stop_agreed)
            group.arm(None)
            group.all_reduce(torch.ones(2, 3))
            assert not group.stop_agreed
        return found

    assert on_ranks(groups, run) == [[False, True, False, True]] * 2
    for group in groups:
        group.close()


def test_an_answer_on_a_device_is_read_a_layer_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo in NCCL's place."""
    monkeypatch.setattr(torch_group, "_answer_on_device", torch_group._answer)
    groups = gloo_groups(2)

    def run(group: SafepointGroup) -> list[bool]:
        assert isinstance(group, TorchGroup)
        group._is_nccl = True
        group.begin_step()
        found = []
        for layer in range(5):
            group.arm(None if layer == 3 else lambda layer=layer: layer == 1)
            for _ in range(2):
                assert torch.equal(group.all_reduce(torch.ones(2, 3)), torch.full((2, 3), 2.0))
            found.append(group.stop_agreed)
        return found

    assert on_ranks(groups, run) == [[False, False, True, False, False]] * 2
    for group in groups:
        group.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("num_sums", [0, 1, 2, 3])  # done before the failure
def test_ranks_meet_again_after_a_step_that_one_of_them_left(failing: int, num_sums: int) -> None:
    groups = shared_memory_groups(3)

    def run(group: SafepointGroup) -> list[float]:
        found = []
        for step in range(6):
            group.begin_step()
            try:
                for each in range(4):
                    if (group.rank, step % 2, each) == (failing, 1, num_sums):
                        raise ZeroDivisionError
                    found.append(float(group.all_reduce(torch.full((3,), 10.0 * step + group.rank))[0]))
            except (PeerFailed, ZeroDivisionError):
                group.fail_step()
                found.append(-1.0)
        return found

    for found in on_ranks(groups, run):
        rest = iter(found)
        for step in range(6):
            total, of_step = 30.0 * step + 3, []
            while len(of_step) < 4 and (not of_step or of_step[-1] == total):
                of_step.append(next(rest))
            if step % 2 == 0:
                assert of_step == [total] * 4
            else:  # the failure may be seen before a sum that is already there
                assert of_step[-1] == -1.0 and len(of_step) <= num_sums + 1
        assert list(rest) == []


def test_a_rank_that_closes_ends_the_wait_of_others() -> None:
    groups = shared_memory_groups(2)
    groups[0].begin_step()
    closing = threading.Timer(0.05, groups[1].close)
    closing.start()
    with pytest.raises(PeerFailed, match="tensor rank 1"):
        groups[0].all_reduce(torch.ones(2))
    closing.join()


def test_gloo_ranks_notice_one_that_left_a_step_and_stay_apart() -> None:
    groups = gloo_groups(2)

    def run(group: SafepointGroup) -> int:
        num_failed = 0
        for step in range(3):
            group.begin_step()
            try:
                if step == 1 and group.rank == 1:
                    raise ZeroDivisionError
                group.all_reduce(torch.ones(2))
            except (PeerFailed, ZeroDivisionError):
                group.fail_step()
                num_failed += 1
        return num_failed

    assert on_ranks(groups, run) == [2, 2]


def sum_and_die(fd: int) -> None:
    try:
        group = SharedMemoryGroup(map_memory(fd), 1, 2, SharedState(2).of_rank(1))
        group.begin_step()
        group.all_reduce(torch.ones(2))
    finally:
        os._exit(1)


def test_a_process_that_dies_is_noticed_within_seconds() -> None:
    fd = create_memory(SharedMemoryGroup.num_bytes(2))
    if (other := os.fork()) == 0:  # which need not import torch
        sum_and_die(fd)
    group = SharedMemoryGroup(map_memory(fd), 0, 2, unseen())
    os.close(fd)
    group.begin_step()
    assert group.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    began = time.monotonic()
    with pytest.raises(PeerFailed, match=f"pid {other}"):
        group.all_reduce(torch.ones(2))
    assert time.monotonic() - began < 30.0
    os.waitpid(other, 0)
