"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from backfill import _kernels  # type: ignore[attr-defined]
from backfill.kernels.cpu import CpuKernels, available_isas

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=available_isas())
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


@pytest.fixture
def all_kernels() -> list[CpuKernels]:
    """One of each variant: for results that take longer to compute in another way."""
    return [CpuKernels(isa) for isa in available_isas()]


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=[False, True], ids=["", "int8 KV"])
def kv_dtype(request: pytest.FixtureRequest, dtype: torch.dtype) -> torch.dtype:
    """That of the rows, or int8."""
    return torch.int8 if request.param else dtype


@pytest.fixture
def thread_counts() -> Iterator[Iterator[int]]:
    """Numbers of threads, each of which is set as it is drawn."""
    before = torch.get_num_threads()

    def counts() -> Iterator[int]:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            yield count

    yield counts()
    torch.set_num_threads(before)


@pytest.fixture
def scratch_limit() -> Iterator[Callable[[int], None]]:
    """Sets the most bytes of scratch memory that a kernel's thread gets."""
    yield _kernels.limit_scratch
    _kernels.limit_scratch(1 << 62)


@pytest.fixture
def generator() -> torch.Generator:
    """New inputs in each run; a failure's report has the seed."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
