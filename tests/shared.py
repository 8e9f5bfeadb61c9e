"""What all workers of one test run share: a folder, and what is made in it once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

RUN_FOLDER_VARIABLE = "BACKFILL_TESTS_RUN_FOLDER"


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """``name`` in the run's folder, made by the first worker that asks while the others wait."""
    path = Path(os.environ[RUN_FOLDER_VARIABLE]) / name
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{name}")
            make(unfinished)
            unfinished.rename(path)
    return path
