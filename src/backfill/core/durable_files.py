"""Files that are whole after a crash."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file as a whole, for good: after a crash it has the old content, or the new if this returned.

    Others may not read it. It is written first to the name and ``.part``: one writer at a time.
    Raises: OSError; the file is as it was, or it is new and a crash may bring back the old one.
    """
    replace(path, content, mode=0o600, partial=path.with_name(path.name + ".part"))
    sync(path.parent)


def replace(path: Path, content: bytes, *, mode: int, partial: Path) -> None:
    """Replace a file as a whole: after a crash it has either the old content or the new.

    Args:
        mode: of the new file, less what the process's umask takes.
        partial: where the content is written first.
    Raises: OSError; the file is as it was.
    """
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            write_all(file, content)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_all(file: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a crash. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
