"""Files in an object store, such as S3, through fsspec.

An object is there whole or not at all, and cannot be appended to. So a new file is first written to a folder
of this machine, and stored as one object when it is committed; results, which grow line by line, are kept in
the database meanwhile (``database_results.py``).
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Iterable, Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from backfill.core.errors import ConfigError
from backfill.jobs.blobs import GARBAGE_AGE_S, FileStore, StoredFile

# By the schemes of fsspec, of which the second is of this process alone. File systems that it also knows
# promise less than an object store.
_SCHEMES = ("s3", "memory")
_ONE_SLASH = re.compile(r"[a-z0-9]+:/")  # such as s3:/bucket, which would be a folder
_S3_CONFIG = {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 2, "mode": "standard"}}


def open_file_store(place: str | None, data_dir: Path) -> FileStore:
    """The store of ``--batch-file-store``. Nothing is read yet. Raises: ConfigError."""
    if place is None:
        return FileStore(data_dir)
    scheme, separator, rest = place.partition("://")
    is_slip = not separator and _ONE_SLASH.match(place)
    if scheme == "file" or not (separator or is_slip):
        folder = Path(rest if separator else place).expanduser()
        if not folder.is_absolute():
            folder = Path.cwd() / folder
        return FileStore(folder, "batch_file_store")
    if is_slip or scheme not in _SCHEMES or not rest.strip("/"):
        raise ConfigError(
            f"must be a folder or s3://BUCKET/PREFIX, got {place!r:.200}.", field="batch_file_store"
        )
    return ObjectStore(place, data_dir)


class ObjectStore(FileStore):
    """Files as objects under a prefix.

    Its folder, of this server alone, has new files until they are committed, and copies of inputs that are
    being read.

    Args:
        url: fsspec's, with the bucket and the prefix.

    Raises: ConfigError where the package of the scheme is missing.
    """

    is_remote = True

    def __init__(self, url: str, data_dir: Path) -> None:
        super().__init__(data_dir)
        scheme = url.partition("://")[0]
        options: dict[str, Any] = {"config_kwargs": _S3_CONFIG} if scheme == "s3" else {}
        try:
            from fsspec.core import url_to_fs

            filesystem, root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"`batch_file_store` {url} cannot be used ({error}). For S3: pip install 'backfill[s3]'."
            ) from error
        self.is_given = True
        self.shown = f"`batch_file_store` {url}"
        self.to_give_up = f"all objects under {url}"
        self._filesystem: Any = filesystem
        self._prefix = root.rstrip("/")

    # ---- The database that the files belong to ----

    def read_id(self) -> str:
        try:
            with _as_os_errors():
                content: bytes = self._filesystem.cat_file(f"{self._prefix}/store.id")
        except FileNotFoundError:
            return ""
        return content.decode().strip()

    def write_id(self, store_id: str) -> None:
        with _as_os_errors():
            self._filesystem.pipe_file(f"{self._prefix}/store.id", f"{store_id}\n".encode())

    def holds_files(self) -> bool:
        return bool(self._objects())

    # ---- Files ----

    def commit(self, file_id: str, file: FileIO) -> None:
        super().commit(file_id, file)
        try:
            with _as_os_errors():
                self._filesystem.put_file(str(self.path(file_id)), self._object(file_id))
        finally:
            super().delete(file_id)

    def open(self, file_id: str) -> StoredFile:
        path = self._object(file_id)
        with _as_os_errors():
            num_bytes = int(self._filesystem.info(path)["size"])
        return StoredFile(num_bytes, partial(self._read, path), lambda: None)

    def delete(self, file_id: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self._filesystem.rm_file(self._object(file_id))

    def fetch(self, file_id: str, user: str) -> Path:
        """Copies the file, for each user once."""
        path = self.path(user)
        if not path.exists():
            partial = path.with_suffix(".part")
            try:
                with _as_os_errors():
                    self._filesystem.get_file(self._object(file_id), str(partial))
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)
        return path

    def release(self, user: str) -> None:
        super().delete(user)

    def num_bytes(self) -> int:
        return sum(int(found["size"] or 0) for found in self._objects().values())

    def garbage(self, now_s: float) -> list[str]:
        before_s = now_s - GARBAGE_AGE_S
        return [name for name, found in self._objects().items() if _changed_at_s(found) < before_s]

    def open_folder(self, known: Iterable[str] | None) -> None:
        """Make the staging folder, and empty it. Objects may be other servers'."""
        super().open_folder(())

    def _read(self, path: str, start: int, num_bytes: int) -> bytes:
        with _as_os_errors():
            content: bytes = self._filesystem.cat_file(path, start=start, end=start + num_bytes)
        return content

    def _object(self, file_id: str) -> str:
        return f"{self._prefix}/files/{file_id}"

    def _objects(self) -> dict[str, dict[str, Any]]:
        """By name, what the store says of each."""
        with _as_os_errors():
            try:
                found: list[dict[str, Any]] = self._filesystem.ls(f"{self._prefix}/files", detail=True)
            except FileNotFoundError:
                return {}
        return {each["name"].rsplit("/", 1)[-1]: each for each in found if each["type"] == "file"}


def _changed_at_s(found: dict[str, Any]) -> float:
    """When an object was stored; now where the store does not say."""
    changed_at = found.get("LastModified")
    return time.time() if changed_at is None else float(changed_at.timestamp())


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Clients of object stores also raise errors of their own, for a connection, a name or a permission."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
