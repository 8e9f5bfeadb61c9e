"""The data folder: its lock and its permissions."""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock, Timeout

from backfill.core.errors import ConfigError

logger = logging.getLogger(__name__)

FILE_MODE = 0o600
FOLDER_MODE = 0o700

# What a server writes into its data folder. Other files in it are not changed.
_DATABASE = ("jobs.db", "jobs.db-wal", "jobs.db-shm", "jobs.db-journal")
_OWN_FILES = (*_DATABASE, "server.lock", "store.id", "store.id.part", "config.json", "config.json.part")
_OWN_FOLDERS = ("files", "suspects")  # in the second an earlier version kept losses


class DataFolderLock:
    """One server for one data folder.

    Held from ``acquire`` until ``release`` or the end of the process, also by a crash.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._path = folder / "server.lock"
        self._url = url
        # One thread acquires it, another releases it. A soft lock would outlive a crash.
        self._lock = FileLock(
            self._path, blocking=False, mode=FILE_MODE, thread_local=False, fallback_to_soft=False
        )

    def acquire(self) -> None:
        """Raises: ConfigError naming the holder, or if the folder cannot be written, or is not a server's."""
        check_own(self._path.parent)
        try:
            make_folder(self._path.parent)
            self._lock.acquire()
            self._path.write_text(f"the server with process id {os.getpid()} at {self._url}\n")
        except Timeout as error:
            holder = self._path.read_text(errors="replace").strip() or "another process"
            raise ConfigError(
                f"`data_dir` {self._path.parent} is in use by {holder}. "
                "Stop it, or give this server another `data_dir`."
            ) from error
        except OSError as error:
            self.release()
            raise unusable(self._path.parent, error) from error

    def release(self) -> None:
        self._lock.release()


def check_writable(folder: Path) -> None:
    """Make the data folder, if it is not there. Raises: ConfigError if it cannot be, or is none."""
    check_own(folder)
    try:
        make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise unusable(folder, error) from error


def check_own(folder: Path) -> None:
    """Refuse a folder of another program: a server deletes files that its database does not know.

    Raises: ConfigError naming what it holds.
    """
    if os.path.exists(folder / "store.id"):  # unlike Path.exists, False where permission is missing
        return
    held = None
    if _is_foreign_database(folder / "jobs.db"):
        held = "jobs.db"
    elif not _is_own_config(folder / "config.json"):
        held = "config.json"
    elif not os.path.exists(folder / "jobs.db"):
        with suppress(OSError):  # there is none, or who opens it says what is wrong
            held = "files/" if any(entry.is_file() for entry in os.scandir(folder / "files")) else None
    if held is not None:
        raise ConfigError(
            f"`data_dir` {folder} holds {held} of another program, which a server would overwrite or delete. "
            "Give an empty folder, or one that a Backfill server has used."
        )


def _is_own_config(path: Path) -> bool:
    """Whether a server may replace it: one has written it, or there is none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError:  # who writes it says what is wrong
        return True
    except ValueError:
        return False
    return isinstance(content, dict) and {"server", "engine"} <= content.keys()


def _is_foreign_database(path: Path) -> bool:
    """Whether it is no database, or one without our tables. Where it cannot be read, opening it tells."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return False
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    except sqlite3.OperationalError:  # such as one that waits for recovery, which writes
        return False
    except sqlite3.DatabaseError:
        return True
    return bool(names) and "data_folder" not in names


def unusable(data_dir: Path, error: OSError) -> ConfigError:
    """The error, for the caller to raise, of a data folder that cannot be written."""
    reason = error.strerror or str(error)
    for place in (data_dir, *data_dir.parents):
        if os.path.lexists(place) and not os.path.isdir(place):
            reason = f"{place} is no folder"
    return ConfigError(f"`data_dir` {data_dir} cannot be written: {reason}.")


def make_folder(folder: Path) -> None:
    """Make a private folder. One that exists keeps its mode."""
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def make_private(data_dir: Path) -> None:
    """Remove other users' permissions, which an earlier version or a copy may have left in a data folder.

    The folder's own permissions are kept where it also holds other files.
    """
    is_ours_alone = True
    for entry in os.scandir(data_dir):
        if entry.name in _OWN_FOLDERS and entry.is_dir(follow_symlinks=False):
            _restrict(Path(entry.path), FOLDER_MODE)
            for stored in os.scandir(entry.path):
                if stored.is_file(follow_symlinks=False):
                    _restrict(Path(stored.path), FILE_MODE)
        elif entry.name in _OWN_FILES and entry.is_file(follow_symlinks=False):
            _restrict(Path(entry.path), FILE_MODE)
        else:
            is_ours_alone = False
    if is_ours_alone:
        _restrict(data_dir, FOLDER_MODE)


def _restrict(path: Path, mode: int) -> None:
    if stat.S_IMODE(path.stat().st_mode) & ~mode:
        try:
            path.chmod(mode)
        except PermissionError:  # the file belongs to another user
            logger.warning("%s may be read by others, and its mode cannot be changed", path)
