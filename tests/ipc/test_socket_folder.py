from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from backfill.ipc.socket_folder import SocketFolder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: pytest's may be too long for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="bf-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def run(script: str) -> subprocess.CompletedProcess[str]:
    script = f"import os, sys\nfrom backfill.ipc.socket_folder import SocketFolder\n{script}"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )


def test_sockets_can_be_made_where_the_temporary_folder_has_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = SocketFolder()
    try:
        assert list(long.iterdir()) == []
        assert len(folder.url("commands").removeprefix("ipc://")) <= 107
    finally:
        folder.remove()
    assert not folder.path.exists()


def test_a_new_folder_removes_only_those_of_killed_processes(tmp_path: Path) -> None:
    mine = SocketFolder()
    others = [tmp_path / "backfill-models", tmp_path / "backfill-abc123"]
    for other in others:
        other.mkdir()
    killed = run("print(SocketFolder().path, flush=True); os.kill(os.getpid(), 9)")
    left = Path(killed.stdout.strip())
    assert left.is_dir() and left.name.startswith("backfill-")
    second = SocketFolder()
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, second.path, *others])
    for folder in (mine, second, mine):
        folder.remove()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_locked_folder_stays_even_if_its_process_is_unknown(tmp_path: Path) -> None:
    held = SocketFolder()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    foreign = held.path.rename(tmp_path / f"backfill-{ended.pid}-x")  # as in another container
    SocketFolder().remove()
    assert foreign.is_dir()
    held.remove()  # releases the lock
    SocketFolder().remove()
    assert not foreign.exists()


def test_a_fork_that_exits_leaves_its_parents_folder() -> None:
    forked = run(
        "folder = SocketFolder()\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit()\n"
        "os.waitpid(pid, 0)\n"
        "print(folder.path.is_dir(), os.getpid() == int(folder.path.name.split('-')[1]))\n"
        "folder.remove()\n"
    )
    assert forked.stdout == "True True\n", forked.stderr
