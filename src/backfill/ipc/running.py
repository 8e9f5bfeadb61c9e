"""Whether another process, which need not be a child, still runs."""

from __future__ import annotations

import os
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process has not ended. One that nobody has waited for yet has, where ``/proc`` says so."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return True  # it ends just now, or there is no /proc
    return state not in (b"Z", b"X")
