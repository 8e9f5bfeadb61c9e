"""A temporary file of records."""

from __future__ import annotations

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
    """

    def __init__(self, folder: str = "") -> None:
        self._folder = folder or None
        self._file: BinaryIO | None = None
        self._size = 0

    def append(self, records: Sequence[bytes]) -> list[Span]:
        """Write records. Raises: OSError, such as a full disk; nothing was appended then."""
        if self._file is None:
            # It stays open until ``close``.
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
        left, at = memoryview(b"".join(records)), self._size
        while left:
            num_written = os.pwrite(self._file.fileno(), left, at)
            left, at = left[num_written:], at + num_written
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

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
