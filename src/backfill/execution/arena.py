"""Device memory that the KV pool and the weights of layers share, each from its own end (Select-N, 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from backfill.models.movable import PAGE_BYTES


class DeviceArena:
    """One allocation: KV blocks from its beginning, layers' buffers from its end.

    The last buffers lie next to the KV. So blocks grow into the memory of buffers that are given up, and
    buffers into that of blocks beyond the pool's end, without any memory being mapped or copied.

    Attributes:
        buffers: each uint8 ``[buffer_bytes]``, aligned to a page, not set; the first one at the very end.

    Args:
        num_blocks: while all buffers are in use.
        buffer_bytes: whole pages.
    Raises: RuntimeError if the device has no memory for it.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, num_buffers: int, buffer_bytes: int, device: torch.device
    ) -> None:
        kv_bytes = -(-num_blocks * block_bytes // PAGE_BYTES) * PAGE_BYTES
        num_bytes = kv_bytes + num_buffers * buffer_bytes
        memory = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, device=device)
        self._bytes = memory[-memory.data_ptr() % PAGE_BYTES :][:num_bytes]
        ends = range(num_bytes, kv_bytes, -buffer_bytes)
        self.buffers = [self._bytes[end - buffer_bytes : end] for end in ends]

    def kv_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """KV blocks from the beginning on, first axis; the last ones may lie in the memory of buffers."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[:num_bytes].view(dtype).view(shape)
