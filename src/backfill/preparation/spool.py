"""A temporary file of records."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO


@dataclass(frozen=True, slots=True)
class Span:
    """Where a record is, in bytes."""

    offset: int
    num_bytes: int


class Spool:
    """Records on disk. The file has no name, so it is gone when it is closed or its process ends.

    Args:
        folder: on the disk to use; empty for the system's folder of temporary files.
        min_free_bytes: of the disk, left for others.
    """

    def __init__(self, folder: str = "", min_free_bytes: int = 0) -> None:
        self._folder = folder or None
        self._min_free_bytes = min_free_bytes
        self._file: BinaryIO | None = None
        self._size = 0

    def append(self, records: Sequence[bytes]) -> list[Span]:
        """Write records. Raises: OSError, such as a full disk; nothing was appended then."""
        if self._file is None:
            # It stays open until ``close``.
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
        left, at = memoryview(b"".join(records)), self._size
        self._check_room(len(left))
        try:
            while left:
                num_written = os.pwrite(self._file.fileno(), left, at)
                left, at = left[num_written:], at + num_written
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)  # else a full disk stays full
            raise
        spans = []
        for record in records:
            spans.append(Span(self._size, len(record)))
            self._size += len(record)
        return spans

    def read(self, span: Span) -> bytes:
        """Raises: OSError, also where the file is shorter than it was."""
        assert self._file is not None
        data = os.pread(self._file.fileno(), span.num_bytes, span.offset)
        if len(data) < span.num_bytes:
            raise OSError("The temporary file of a batch's prepared lines was cut.")
        return data

    def _check_room(self, num_bytes: int) -> None:
        """Raises: OSError where the disk would be too full for others."""
        assert self._file is not None
        disk = os.fstatvfs(self._file.fileno())
        if self._min_free_bytes and disk.f_bavail * disk.f_frsize - num_bytes < self._min_free_bytes:
            raise OSError(errno.ENOSPC, "too little free space is left for results")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
