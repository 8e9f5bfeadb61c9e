"""One server for one data folder."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from backfill.core.errors import ConfigError
from backfill.jobs.private_files import FILE_MODE, make_folder


class DataFolderLock:
    """Held from ``acquire`` until ``release`` or the end of the process, also by a crash."""

    def __init__(self, folder: Path, url: str) -> None:
        self._path = folder / "server.lock"
        self._url = url
        # One thread acquires it, another releases it. A soft lock would outlive a crash.
        self._lock = FileLock(
            self._path, blocking=False, mode=FILE_MODE, thread_local=False, fallback_to_soft=False
        )

    def acquire(self) -> None:
        """Raises: ConfigError naming the holder, or when the folder cannot be written."""
        try:
            make_folder(self._path.parent)
            self._lock.acquire()
            self._path.write_text(f"the server with process id {os.getpid()} at {self._url}\n")
        except Timeout as error:
            holder = self._path.read_text(errors="replace").strip() or "another process"
            raise ConfigError(
                f"--data-dir {self._path.parent} is in use by {holder}. "
                "Stop it, or give this server another --data-dir."
            ) from error
        except OSError as error:
            self.release()
            reason = error.strerror or error
            raise ConfigError(f"--data-dir {self._path.parent} cannot be written: {reason}.") from error

    def release(self) -> None:
        self._lock.release()
