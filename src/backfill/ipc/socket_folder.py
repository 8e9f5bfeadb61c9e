"""The folder of the sockets between a process and one of its children."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from backfill.ipc.python_process import is_running

_PREFIX = "backfill-"
# A socket's path has at most 107 bytes; the names of this folder and of the socket take up to 35.
_LONGEST_PARENT = 72


class SocketFolder:
    """A new folder. Creating it also removes folders that this user's ended processes left behind.

    It is not a TemporaryDirectory, as a forked process that exits would remove its parent's.
    """

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > _LONGEST_PARENT:
            parent = "/tmp"
        remove_left_folders(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        # Locked while this process lives: in another container with the same /tmp the id means nothing.
        # By flock, since filelock cannot lock a folder.
        self._lock: int | None = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def url(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def remove_left_folders(parent: Path) -> None:
    """Remove the folders of processes that have ended without removing them, as by SIGKILL."""
    for path in parent.glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):  # another process removes it at the same time
            if pid.isdigit() and path.stat().st_uid == os.getuid() and not is_running(int(pid)):
                _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    """Raises: OSError if it is locked."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
