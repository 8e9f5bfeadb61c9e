"""Operators that share their work among threads: called by several at once, after a fork, bound to places."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from backfill.kernels.cpu import CpuKernels

ROWS, INPUTS, OUTPUTS = 96, 256, 512
BOUND = """
import os
processors = os.sched_getaffinity(0)
import torch
from backfill.kernels.cpu import CpuKernels
torch.set_num_threads(1)  # for what torch computes itself
linear, x = CpuKernels().linear(torch.randn(512, 256)), torch.randn(96, 256)
torch.set_num_threads(2)
threads = set(os.listdir("/proc/self/task"))
linear(x)
(started,) = set(os.listdir("/proc/self/task")) - threads
places = {frozenset(os.sched_getaffinity(int(each))) for each in (0, started)}
assert len(places) == min(2, len(processors)), places
"""


@pytest.fixture(params=[2, 3, 5])
def num_threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_operators_of_several_threads_at_once(num_threads: int) -> None:
    kernels = CpuKernels()
    linears = [kernels.linear(torch.randn(OUTPUTS, INPUTS)) for _ in range(num_threads)]
    x = torch.randn(ROWS, INPUTS)
    expected = [linear(x) for linear in linears]
    wrong: list[int] = []

    def call(index: int) -> None:
        torch.set_num_threads(num_threads)  # of this thread
        for _ in range(100):
            if not torch.equal(linears[index](x), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_process_has_threads_of_its_own(thread_counts: Iterator[int]) -> None:
    linear, x = CpuKernels().linear(torch.randn(OUTPUTS, INPUTS)), torch.randn(ROWS, INPUTS)
    assert [next(thread_counts), next(thread_counts)] == [1, 2]
    expected = linear(x).numpy().tobytes()  # torch's own threads do not outlive a fork, so none compare
    child = os.fork()
    if child == 0:
        os._exit(0 if linear(x).numpy().tobytes() == expected else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"
    assert linear(x).numpy().tobytes() == expected


@pytest.mark.slow  # starts a process
def test_bound_threads_have_places_of_their_own() -> None:
    bound = {**os.environ, "OMP_PROC_BIND": "true", "OMP_PLACES": "threads"}
    subprocess.run([sys.executable, "-c", BOUND], check=True, timeout=60, env=bound)
