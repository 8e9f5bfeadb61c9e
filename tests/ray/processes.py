"""Processes of a cluster that this process has started."""

from __future__ import annotations

from pathlib import Path


def parent(pid: int) -> int:
    """Raises: OSError if it has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
