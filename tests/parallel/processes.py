"""What is left of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from backfill.ipc.python_process import is_running

TIMEOUT_S = 60.0


def wait_ended(pids: Iterable[int | None]) -> None:
    """Until the processes have ended. Those that nobody has waited for yet have."""
    until_s = time.monotonic() + TIMEOUT_S
    for pid in pids:
        assert pid is not None
        while is_running(pid):
            assert time.monotonic() < until_s, f"process {pid} is still there"
            time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parent(pid: int) -> int:
    """Raises: OSError if it has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
