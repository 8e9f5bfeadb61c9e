"""One server for one data folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from backfill.core.errors import ConfigError
from backfill.jobs.private_files import FILE_MODE, make_folder


class DataFolderLock:
    """Held from ``acquire`` until ``release`` or the end of the process, however it ends."""

    def __init__(self, folder: Path, url: str) -> None:
        self._path = folder / "server.lock"
        self._url = url
        self._file: int | None = None

    def acquire(self) -> None:
        """Raises: ConfigError naming the holder, or when the folder cannot be written."""
        try:
            make_folder(self._path.parent)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"--data-dir {self._path.parent} cannot be written: {reason}.") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(file, 512).decode(errors="replace").strip() or "another process"
            os.close(file)
            raise ConfigError(
                f"--data-dir {self._path.parent} is in use by {holder}. "
                "Stop it, or give this server another --data-dir."
            ) from error
        os.ftruncate(file, 0)
        os.write(file, f"the server with process id {os.getpid()} at {self._url}\n".encode())
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
