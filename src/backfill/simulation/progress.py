"""How far the runs of a sweep are, over all its processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from typing import ClassVar


class SweepProgress:
    """Counts runs, a part of a run for what has been done of it. See ``sweep.processes``."""

    def __init__(self) -> None:
        self.value: Synchronized[float] = multiprocessing.get_context("spawn").Value("d", 0.0)

    @property
    def num_done(self) -> float:
        # Without the lock, which a process that was ended may have taken with it.
        return self.value.get_obj().value


class RunShare:
    """One run tells how far it is.

    Attributes:
        num_done: where the runs of this process count; None where nobody watches the sweep.
    """

    num_done: ClassVar[Synchronized[float] | None] = None

    def __init__(self) -> None:
        self._share = 0.0

    def note(self, share: float) -> None:
        """``share`` of the run is done, at most 1; one that is less than before changes nothing."""
        share = min(share, 1.0)
        if self.num_done is not None and share > self._share:
            with self.num_done.get_lock():
                self.num_done.value += share - self._share
            self._share = share


@contextmanager
def reporting_to(progress: SweepProgress | None) -> Iterator[None]:
    """Runs of this process count there in the block."""
    RunShare.num_done = None if progress is None else progress.value
    try:
        yield
    finally:
        RunShare.num_done = None
