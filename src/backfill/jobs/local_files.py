"""The files of a run without a server: which input they are of, and who may write them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from backfill.core.errors import ConfigError
from backfill.jobs.results import ForeignResults

_SLICE_BYTES = 1 << 20


def digest_of(path: Path) -> str:
    """A digest of the contents up to the last line that is not blank."""
    digest = hashlib.sha256()
    blank = b""
    with path.open("rb") as file:
        while block := file.read(_SLICE_BYTES):
            content = block.rstrip()
            if content:
                digest.update(blank)
                digest.update(content)
                blank = b""
            blank += block[len(content) :]
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file for this process. Raises: ConfigError when another process has the lock.

    The lock is on the result file itself; filelock's would be on a second file beside it. A file that was
    made here, and is still empty where the block raises, is removed.
    """
    is_new = not path.exists()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path} is being written by another run-batch.") from None
        try:
            yield
        except BaseException:
            if is_new and os.fstat(file).st_size == 0:
                path.unlink(missing_ok=True)
            raise
    finally:
        os.close(file)


def check_tail(path: Path, head: bytes) -> None:
    """Raise ForeignResults where the last line is neither whole nor a torn result: it would be cut off."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = end
        while start > 0:
            block_start = max(0, start - _SLICE_BYTES)
            file.seek(block_start)
            newline = file.read(start - block_start).rfind(b"\n")
            if newline >= 0:
                start = block_start + newline + 1
                break
            start = block_start
        file.seek(start)
        tail = file.read(len(head))
    # A power loss may leave zeros in place of data.
    if not (head.startswith(tail) or not tail.strip(b"\0")):
        raise ForeignResults(f"{path.name} holds a line that is no result of a batch.")
