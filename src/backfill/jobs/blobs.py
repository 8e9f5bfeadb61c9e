"""Contents of files, by id. A client's filename never becomes a path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".part"


class BlobStore:
    """Files of one folder. An upload is written under a partial name and renamed once it is synced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def create(self, file_id: str) -> BinaryIO:
        return (self._folder / (file_id + _PARTIAL)).open("xb", buffering=0)

    def commit(self, file_id: str, file: BinaryIO) -> None:
        """Make an upload durable under its id, and close it."""
        os.fsync(file.fileno())
        file.close()
        os.replace(self._folder / (file_id + _PARTIAL), self.path(file_id))
        sync_folder(self._folder)

    def discard(self, file_id: str, file: BinaryIO) -> None:
        file.close()
        (self._folder / (file_id + _PARTIAL)).unlink(missing_ok=True)

    def delete(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def num_bytes(self) -> int:
        """Bytes of everything stored, unfinished results included."""
        num_bytes = 0
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                num_bytes += entry.stat().st_size
        return num_bytes

    def sweep(self, known: Iterable[str]) -> None:
        """Delete what a crash left: unfinished uploads, and blobs nobody knows."""
        kept = set(known)
        for entry in list(os.scandir(self._folder)):
            if entry.name not in kept and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
