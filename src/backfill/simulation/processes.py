"""Runs many independent simulations, in one process or several, and counts how far they are."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from typing import Any, ClassVar

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


class Progress:
    """Counts the runs of all processes, a part of a run for what has been done of it."""

    def __init__(self) -> None:
        self.value: Synchronized[float] = multiprocessing.get_context("spawn").Value("d", 0.0)

    @property
    def num_done(self) -> float:
        # Without the lock, which a process that was ended may have taken with it.
        return self.value.get_obj().value


class RunShare:
    """One run tells how far it is.

    Attributes:
        num_done: where the runs of this process count; None where nobody watches.
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
def processes(num_processes: int, progress: Progress | None = None) -> Iterator[Map]:
    """A ``map`` over so many processes; this one alone where it is 1.

    Results come in the order of the work and do not depend on the number of processes. Functions must be
    importable, work and results small enough to be pickled. The processes end with the block; what they have
    begun is dropped if the block raises.

    Args:
        progress: counts what has been done of runs that say so (``RunShare``).
    """
    num_done = None if progress is None else progress.value
    if num_processes == 1:
        RunShare.num_done = num_done
        try:
            yield map
        finally:
            RunShare.num_done = None
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_begin, initargs=(num_done,))
    before = set(multiprocessing.active_children())
    try:
        yield pool.map
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(num_done: Synchronized[float] | None) -> None:
    """An interrupt of the terminal reaches every process; only the command itself reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    RunShare.num_done = num_done
