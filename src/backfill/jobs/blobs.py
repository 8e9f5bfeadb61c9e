"""The contents of stored files, by id. No path comes from a client."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from backfill.core.durable_files import sync, write_durably
from backfill.jobs.private_files import FILE_MODE, make_folder
from backfill.jobs.threads import ThreadPool

CHUNK_BYTES = 1 << 20
# What no record names and nobody has written to for so long was left by a server that died.
GARBAGE_AGE_S = 24 * 3600.0
_PARTIAL = ".part"
_ID_FILE = "store.id"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A stored file, open for reading. Blocking. Raises: OSError.

    Attributes:
        read: takes the first byte's position and a number of bytes. Fewer come only at the end of the file.
    """

    num_bytes: int
    read: Callable[[int, int], bytes]
    close: Callable[[], None]


class FileStore:
    """Keeps files by id in a folder: a file is there whole, or it is not. Blocking: run calls in threads.

    An upload is written under a partial name and renamed once it is synced. Several servers may share the
    folder, on a file system that renames atomically.

    Raises: OSError from any method; FileNotFoundError where there is no such file.

    Args:
        root: holds the folder ``files``, and the id of the database.
        option: that names it.

    Attributes:
        is_remote: files are elsewhere. ``fetch`` copies them, so each has to be released, and none can be
            appended to.
        is_given: a user named the place, so what it holds may be of another program.
        shown: the option and the place, for messages.
        to_give_up: what a user deletes who gives the files up.
    """

    is_remote = False

    def __init__(self, root: Path, option: str = "data_dir") -> None:
        self._root = root
        self._folder = root / "files"
        self.is_given = option != "data_dir"
        self.shown = f"`{option}` {root}"
        self.to_give_up = f"{self._folder} and {root / _ID_FILE}"

    # ---- The database that the files belong to ----

    def read_id(self) -> str:
        """Empty where there is none."""
        try:
            return (self._root / _ID_FILE).read_text().strip()
        except FileNotFoundError:
            return ""

    def write_id(self, store_id: str) -> None:
        make_folder(self._root)
        write_durably(self._root / _ID_FILE, f"{store_id}\n".encode())

    def holds_files(self) -> bool:
        return self._folder.is_dir() and any(entry.is_file() for entry in os.scandir(self._folder))

    # ---- Files ----

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def create(self, file_id: str) -> FileIO:
        """A new file, for ``commit`` or ``discard``, which close it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return FileIO(os.open(self._partial(file_id), flags, FILE_MODE), "wb")

    def commit(self, file_id: str, file: FileIO) -> None:
        """Store a file under its id, durably."""
        with file:
            os.fsync(file.fileno())
        os.replace(self._partial(file_id), self.path(file_id))
        sync(self._folder)

    def discard(self, file_id: str, file: FileIO | None) -> None:
        """Give a new file up. ``file`` is None where ``create`` was cancelled; it may have made the file."""
        if file is not None:
            file.close()
        self._partial(file_id).unlink(missing_ok=True)

    def open(self, file_id: str) -> StoredFile:
        file = FileIO(self.path(file_id), "rb")
        read = partial(_read_at, file.fileno())
        return StoredFile(os.fstat(file.fileno()).st_size, read, file.close)

    def delete(self, file_id: str) -> None:
        """One that is gone already is no error."""
        self.path(file_id).unlink(missing_ok=True)

    def fetch(self, file_id: str, user: str) -> Path:
        """A path at which the file can be read until ``release``."""
        return self.path(file_id)

    def release(self, user: str) -> None:
        """The user's fetched file is not read any more."""

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
        """Of everything stored, unfinished results included."""
        num_bytes = 0
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                num_bytes += entry.stat().st_size
        return num_bytes

    def num_free_bytes(self) -> int:
        """Bytes that this user may still write to the disk that new files and results go through."""
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize

    def open_folder(self, known: Iterable[str] | None) -> None:
        """Make the folder. Delete what a crash left in it: unfinished uploads, and files not in ``known``.

        With None nothing is deleted, as where other servers use the folder.
        """
        make_folder(self._folder)
        if known is None:
            return
        kept = set(known)
        for entry in list(os.scandir(self._folder)):
            if entry.name not in kept and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)

    def garbage(self, now_s: float) -> list[str]:
        """Names of what may be left over: of files, and of unfinished ones, untouched for a day."""
        names, before_s = [], now_s - GARBAGE_AGE_S
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < before_s:
                    names.append(entry.name)
        return names

    def _partial(self, file_id: str) -> Path:
        return self._folder / (file_id + _PARTIAL)


class Download:
    """A stored file, open for a client. A slow client holds up no thread. Close it after use."""

    def __init__(self, file: StoredFile, threads: ThreadPool) -> None:
        self._file = file
        self._threads = threads
        self.num_bytes = file.num_bytes

    async def chunks(self, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes of [start, end), at most a MiB at a time. Raises: OSError."""
        end = self.num_bytes if end is None else end
        while start < end:
            chunk = await self._threads.run(self._file.read, start, min(CHUNK_BYTES, end - start))
            if not chunk:
                raise OSError("a stored file has become shorter")
            start += len(chunk)
            yield chunk

    async def close(self) -> None:
        await self._threads.run(self._file.close)


def _read_at(file: int, start: int, num_bytes: int) -> bytes:
    return os.pread(file, num_bytes, start)
