"""Reads stored files for clients."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from io import FileIO
from pathlib import Path

from backfill.jobs.threads import ThreadPool

CHUNK_BYTES = 1 << 20


class Download:
    """An open file. A slow client holds up no thread. Close it after use.

    Attributes:
        num_bytes: of the whole file.
    """

    def __init__(self, file: FileIO, threads: ThreadPool) -> None:
        self._file = file
        self._threads = threads
        self.num_bytes = os.fstat(file.fileno()).st_size

    @classmethod
    async def open(cls, path: Path, threads: ThreadPool) -> Download:
        """Raises: OSError."""
        return await threads.run(lambda: cls(FileIO(path, "rb"), threads))

    async def chunks(self, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes of [start, end), at most a MiB at a time. Raises: OSError."""
        end = self.num_bytes if end is None else end
        while start < end:
            chunk = await self._threads.run(self._read, start, min(CHUNK_BYTES, end - start))
            if not chunk:
                raise OSError(f"{self._file.name!r} has become shorter")
            start += len(chunk)
            yield chunk

    async def close(self) -> None:
        await self._threads.run(self._file.close)

    def _read(self, start: int, num_bytes: int) -> bytes:
        return os.pread(self._file.fileno(), num_bytes, start)
