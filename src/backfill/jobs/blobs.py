"""Contents of files, by id. A client's filename never becomes a path. Blocking: for threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from backfill.jobs.private_files import FILE_MODE, make_folder, sync_folder

_PARTIAL = ".part"


class BlobStore:
    """Files of one folder. An upload is written under a partial name and renamed once it is synced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def create(self, file_id: str) -> FileIO:
        """A new upload, for ``commit`` or ``discard`` to close."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return FileIO(os.open(self._partial(file_id), flags, FILE_MODE), "wb")

    def commit(self, file_id: str, file: FileIO) -> None:
        """Make an upload durable under its id, and close it."""
        with file:
            os.fsync(file.fileno())
        os.replace(self._partial(file_id), self.path(file_id))
        sync_folder(self._folder)

    def discard(self, file_id: str, file: FileIO | None) -> None:
        """``file`` is None where none was given out, though one may have been made."""
        if file is not None:
            file.close()
        self._partial(file_id).unlink(missing_ok=True)

    def delete(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def size_or_delete(self, file_id: str) -> int:
        """Bytes of it; 0 where it is missing, or was empty and is deleted."""
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
        """Bytes the disk has left for us."""
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize

    def open_folder(self, known: Iterable[str]) -> None:
        """Make the folder, or delete what a crash left in it: unfinished uploads, and blobs nobody knows."""
        make_folder(self._folder)
        kept = set(known)
        for entry in list(os.scandir(self._folder)):
            if entry.name not in kept and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)

    def _partial(self, file_id: str) -> Path:
        return self._folder / (file_id + _PARTIAL)
