"""Runs the command line as a user does."""

from __future__ import annotations

import subprocess
import sys


def run_cli(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "backfill", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
