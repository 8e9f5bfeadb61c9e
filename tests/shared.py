"""What the workers of one test run share: a folder, what is made in it once, the number of examples."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from hypothesis import settings

SHORT, LONG = "short", "long"  # Hypothesis profiles; SHORT is that of make test and make test-all
RUN_FOLDER_VARIABLE = "TESTS_OF_BACKFILL_RUN_FOLDER"


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """``name`` in the run's folder, made by the first worker that asks while the others wait."""
    path = Path(os.environ[RUN_FOLDER_VARIABLE]) / name
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{name}")
            make(unfinished)
            unfinished.rename(path)
    return path


def examples(count: int) -> int:
    """For ``max_examples``: ``count``, or half as many where time is short."""
    return count if settings.get_current_profile_name() != SHORT else (count + 1) // 2
