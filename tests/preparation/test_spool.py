"""Records on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.preparation.spool import Span, Spool


@given(groups=st.lists(st.lists(st.binary(max_size=50), max_size=5), max_size=5))
def test_each_record_is_read_as_it_was_written(groups: list[list[bytes]]) -> None:
    spool = Spool()
    written = [
        (span, record) for group in groups for span, record in zip(spool.append(group), group, strict=True)
    ]
    for span, record in reversed(written):
        assert spool.read(span) == record
    spool.close()
    spool.close()


def test_its_file_has_no_name(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path))
    spool.append([b"record"])
    assert not list(tmp_path.iterdir())
    spool.close()


def test_a_write_that_fails_adds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spool = Spool(str(tmp_path))
    (first,) = spool.append([b"first"])
    write = os.pwrite

    def refuse(file: int, data: bytes, at: int) -> int:
        if at > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:3], at)

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="No space"):
        spool.append([b"second", b"third"])
    monkeypatch.undo()
    assert spool._file is not None
    assert os.fstat(spool._file.fileno()).st_size == 5, "what was written of it is given back to the disk"
    (fourth,) = spool.append([b"fourth"])
    assert (spool.read(first), spool.read(fourth)) == (b"first", b"fourth")
    with pytest.raises(OSError, match="cut"):
        spool.read(Span(0, 1000))
    spool.close()


def test_a_folder_that_is_gone_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Spool(str(tmp_path / "none")).append([b"record"])


def test_a_disk_that_is_nearly_full_is_left_to_others(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    spool = Spool(str(tmp_path), min_free_bytes=disk.f_blocks * disk.f_frsize + 1)
    with pytest.raises(OSError, match="free space"):
        spool.append([b"record"])
    spool.close()
