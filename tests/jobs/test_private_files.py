"""Permissions of a data folder, and which folders are refused."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from backfill.core.errors import ConfigError
from backfill.jobs.private_files import (
    DataFolderLock,
    check_own,
    check_writable,
    make_private,
)
from tests.jobs.doubles import (
    InstantRunner,
    Start,
    input_of,
    make_manager,
    ready,
    run_batch,
    submit,
)

pytestmark = pytest.mark.anyio


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in [folder, *folder.rglob("*")]
    }


def assert_private(folder: Path) -> None:
    for name, mode in modes(folder).items():
        assert mode == (0o700 if (folder / name).is_dir() else 0o600), name


async def test_only_the_servers_user_may_read_the_data_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    manager = make_manager(folder, InstantRunner())
    umask = os.umask(0)
    try:
        await manager.start()
        ready(manager)
        await run_batch(manager, input_of(5))
        upload = await manager.files.begin_upload("owner")
        await upload.write(b"x")
        assert {"jobs.db", "jobs.db-wal", "jobs.db-shm", "server.lock", "store.id"} <= set(modes(folder))
        assert_private(folder)
        await upload.abort()
        await manager.stop()
    finally:
        os.umask(umask)


async def test_looser_modes_are_restricted_at_the_start(tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "data"
    manager = await start(folder=folder)
    await submit(manager, input_of(5))
    await manager.stop()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    manager = await start(folder=folder)
    assert_private(folder)


def test_other_files_are_not_changed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "server.lock").touch(0o644)
    (tmp_path / "notes.txt").touch(0o644)
    (tmp_path / "store.id").symlink_to("notes.txt")
    make_private(tmp_path)
    found = modes(tmp_path)
    assert (found["."], found["notes.txt"], found["server.lock"]) == (0o755, 0o644, 0o600)


async def test_a_data_folder_that_cannot_be_used_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").touch()  # not a folder
    with pytest.raises(ConfigError, match=r"`data_dir` .* cannot be used"):
        await make_manager(tmp_path, InstantRunner()).start()


def foreign(folder: Path, name: str) -> None:
    """A folder of another program, which holds a file or a folder of this name."""
    if name == "files":
        (folder / "files").mkdir()
        (folder / "files" / "thesis.txt").write_text("years of work")
    elif name == "table":
        with closing(sqlite3.connect(folder / "jobs.db")) as database:
            database.execute("CREATE TABLE files (name TEXT)")
    else:
        (folder / name).write_text('{"architectures": ["LlamaForCausalLM"]}')


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


@pytest.mark.parametrize("name", ["files", "config.json", "jobs.db", "table"])
async def test_a_folder_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    foreign(tmp_path, name)
    before = contents(tmp_path)
    held = {"files": "files/", "table": "jobs.db"}.get(name, name)
    for take in (check_writable, lambda folder: DataFolderLock(folder, "http://here").acquire()):
        with pytest.raises(ConfigError, match=rf"`data_dir` .* holds {held} of another program"):
            take(tmp_path)
    assert contents(tmp_path) == before


async def test_a_folder_that_a_server_has_used_is_taken_again(tmp_path: Path, start: Start) -> None:
    manager = await start(InstantRunner())
    await submit(manager, input_of(3))
    await manager.stop()
    check_own(tmp_path)
    (tmp_path / "store.id").unlink()  # as an earlier version left it
    check_own(tmp_path)
