"""Operators that share their work among threads, called by several threads at once, and after a fork."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from backfill.kernels.cpu import CpuKernels

ROWS, INPUTS, OUTPUTS = 96, 256, 512
IN_A_FORK = """
import os, torch
from backfill.kernels.cpu import CpuKernels
torch.set_num_threads(2)
linear = CpuKernels().linear(torch.randn(512, 256))
x = torch.randn(96, 256)
expected = linear(x).numpy().tobytes()  # torch's own threads do not outlive a fork, so none compare
child = os.fork()
if child == 0:
    os._exit(0 if linear(x).numpy().tobytes() == expected else 1)
_, status = os.waitpid(child, 0)
assert status == 0, f"the child ended with {status}"
assert linear(x).numpy().tobytes() == expected
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
        for _ in range(200):
            if not torch.equal(linears[index](x), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_process_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", IN_A_FORK], check=True, timeout=60)
