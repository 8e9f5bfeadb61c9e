"""Host memory that CUDA copies to and from beside the steps."""

from __future__ import annotations

import torch
from torch import Tensor


def pin(host_pool: Tensor) -> None:
    """Pin allocated memory: torch's own pinned allocator rounds up to a power of two."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = int(cudart.cudaHostRegister(host_pool.data_ptr(), host_pool.nbytes, 0))
    if result != 0:
        raise RuntimeError(f"{host_pool.nbytes} bytes could not be pinned: CUDA error {result}")


def unpin(host_pool: Tensor, stream: torch.cuda.Stream) -> None:
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host_pool.data_ptr())  # type: ignore[no-untyped-call]
