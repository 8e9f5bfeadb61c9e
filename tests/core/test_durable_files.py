"""Files that are whole after a crash."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from backfill.core.durable_files import write_durably
from tests.builders import linear_cost, make_profile


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.id"
    write_durably(path, b"old")
    real_write = os.write

    def write(file: int, data: Any) -> int:
        real_write(file, bytes(data[:1]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space"):
            write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"


def test_content_and_name_are_on_the_disk_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(file: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        real_fsync(file)

    def replace(source: Any, target: Any) -> None:
        done.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_durably(tmp_path / "store.id", b"id")
    assert done == ["file", "replace", "folder"]


def test_a_measured_file_is_saved_where_folders_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What must not be lost is not: its writer hears of it, with the new content in place."""
    real_fsync = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real_fsync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    profile = make_profile(linear_cost(1e-3))
    profile.save(tmp_path / "profile.json")
    assert type(profile).load(tmp_path / "profile.json") == profile
    with pytest.raises(OSError, match="Invalid"):
        write_durably(tmp_path / "store.id", b"id")
    assert {path.name for path in tmp_path.iterdir()} == {"profile.json", "store.id"}
