"""Whether another process still runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backfill.ipc.python_process import is_running


def test_a_process_that_has_ended_does_not_run_even_before_it_was_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    assert is_running(child.pid)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(child.pid), "nobody has waited for it yet"
    child.wait()
    assert not is_running(child.pid)


def test_a_process_runs_where_proc_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_path: Path) -> bytes:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_bytes", missing)
    assert is_running(os.getpid())
