"""The contents of stored files, by id. No path comes from a client."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Iterable
from io import FileIO
from pathlib import Path

from backfill.jobs.private_files import FILE_MODE, make_folder, sync_folder
from backfill.jobs.threads import ThreadPool

CHUNK_BYTES = 1 << 20
_PARTIAL = ".part"


class BlobStore:
    """Files of one folder. An upload is written under a partial name and renamed once it is synced.

    Calls block: run them in threads.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def create(self, file_id: str) -> FileIO:
        """A new file for an upload. ``commit`` or ``discard`` closes it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return FileIO(os.open(self._partial(file_id), flags, FILE_MODE), "wb")

    def commit(self, file_id: str, file: FileIO) -> None:
        """Make an upload durable under its id, and close it."""
        with file:
            os.fsync(file.fileno())
        os.replace(self._partial(file_id), self.path(file_id))
        sync_folder(self._folder)

    def discard(self, file_id: str, file: FileIO | None) -> None:
        """Delete an upload. ``file`` is None where ``create`` was cancelled; it may have made the file."""
        if file is not None:
            file.close()
        self._partial(file_id).unlink(missing_ok=True)

    def delete(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def size_or_delete(self, file_id: str) -> int:
        """Bytes of a file; 0 where there is none. An empty file is deleted."""
        try:
            num_bytes = self.path(file_id).stat().st_size
        except FileNotFoundError:
            return 0
        if num_bytes == 0:
            self.delete(file_id)
        return num_bytes

    def num_bytes(self) -> int:
        """Bytes of everything stored, unfinished results included."""
        num_bytes = 0
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                num_bytes += entry.stat().st_size
        return num_bytes

    def num_free_bytes(self) -> int:
        """Bytes that this user may still write to the disk."""
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize

    def open_folder(self, known: Iterable[str]) -> None:
        """Make the folder. Delete what a crash left in it: unfinished uploads, and files not in ``known``."""
        make_folder(self._folder)
        kept = set(known)
        for entry in list(os.scandir(self._folder)):
            if entry.name not in kept and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)

    def _partial(self, file_id: str) -> Path:
        return self._folder / (file_id + _PARTIAL)


class Download:
    """A stored file, open for a client. A slow client holds up no thread. Close it after use."""

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
