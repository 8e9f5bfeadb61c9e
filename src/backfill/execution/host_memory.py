"""Host memory: address ranges of which only a part has memory, and memory that CUDA copies from."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from backfill.core.config import GIB
from backfill.core.errors import InsufficientMemory

_HUGE_PAGE_BYTES = 2 << 20


class ReservedMemory:
    """An address range whose pages get memory when they are first written, and can give it back.

    Attributes:
        bytes: all of it, uint8 ``[num_bytes]``, aligned to a page. What was not written reads as 0.

    Raises: OSError if the system does not grant the range.
    """

    def __init__(self, num_bytes: int) -> None:
        # Private: pages of a shared mapping would stay in memory when they are given back.
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= _HUGE_PAGE_BYTES:
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self, first: int, last: int) -> None:
        """Give back the memory of the whole pages in bytes ``[first, last)``; they read as 0 afterwards."""
        page = mmap.PAGESIZE
        first, last = -(-first // page) * page, min(last, len(self._map)) // page * page
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


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
