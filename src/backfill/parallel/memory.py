"""Memory that several processes share and that has no name, so none is left behind however they end."""

from __future__ import annotations

import mmap
import os
import tempfile


def create_memory(num_bytes: int) -> int:
    """File descriptor of a new file in memory, filled with zeros. The caller closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("backfill", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


def map_memory(fd: int) -> memoryview:
    """All of the file; what one process writes, the others read."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
