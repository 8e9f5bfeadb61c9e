"""Host memory that CUDA copies from, and what is said where memory is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from backfill.core.config import GIB
from backfill.core.errors import InsufficientMemory


@contextmanager
def allocating(what: str, num_bytes: int, where: str, advice: str) -> Iterator[None]:
    """Raises: InsufficientMemory with this advice if what is allocated within this cannot be."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        raise InsufficientMemory(
            f"{what} of {num_bytes / GIB:.2f} GiB could not be allocated {where}; {advice}."
        ) from error


def pin(host_pool: Tensor) -> None:
    """Pin memory, so that CUDA copies beside the steps: torch's allocator rounds up to a power of two."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = int(cudart.cudaHostRegister(host_pool.data_ptr(), host_pool.nbytes, 0))
    if result != 0:
        raise RuntimeError(f"{host_pool.nbytes} bytes could not be pinned: CUDA error {result}")


def unpin(host_pool: Tensor, stream: torch.cuda.Stream) -> None:
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host_pool.data_ptr())  # type: ignore[no-untyped-call]
