"""All ranks of an engine, as its driver has them."""

from __future__ import annotations

import select
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, Protocol

from backfill.core.config import EngineConfig
from backfill.core.errors import ExecutorDead
from backfill.parallel.messages import FromRank
from backfill.parallel.progress import Progress
from backfill.parallel.rank import RankLoader

_WAKES = 4096  # taken at once


class StopRequests(Protocol):
    def request(self, step: int) -> None:
        """Stop the step at its next safepoint; from any thread, at any time."""


class Ranks(ABC):
    """Plans to all ranks, and reports from each. One thread owns it; any thread may wake it.

    Args:
        ranks: those that report here.
        num_ranks: of the engine.
    Attributes:
        reports: received and not taken yet, by rank.
        progress: how far each rank is.
        was_woken: ``wake`` was called since; whoever waited for that clears it.
    """

    def __init__(self, ranks: range, num_ranks: int) -> None:
        self.ranks = ranks
        self.reports: list[deque[FromRank]] = [deque() for _ in ranks]
        self.progress = Progress.of(num_ranks)
        self.was_woken = False
        self._error: ExecutorDead | None = None
        self._woken, self._waking = socket.socketpair()
        for end in (self._woken, self._waking):
            end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    @property
    @abstractmethod
    def stop(self) -> StopRequests: ...

    @property
    @abstractmethod
    def pids(self) -> list[int | None]:
        """By rank; on their nodes."""

    def send(self, message: bytes) -> None:
        """To all ranks. Raises: ExecutorDead if they are known to have ended; ``receive`` notices it."""
        if self._error is not None:
            raise self._error
        self._send(message)

    def receive(self, timeout_s: float | None) -> None:
        """Wait for reports or a wake, at most for so long, and put reports into ``reports``.

        Raises: ExecutorDead if a rank has ended. All others are ended then.
        """
        if self._error is not None:
            raise self._error
        self._receive(timeout_s)

    def check(self) -> None:
        """Raises: ExecutorDead if a rank has ended."""
        self.receive(0)

    def wake(self) -> None:
        """Let ``receive`` return. From any thread."""
        with suppress(OSError):  # it is closed, or woken often enough
            self._waking.send(b"!")

    def fail(self, message: str) -> NoReturn:
        """End all ranks. Raises: ExecutorDead with the message, now and in every later call."""
        self.close()
        self._error = ExecutorDead(message)
        raise self._error

    def close(self) -> None:
        """End all ranks and release what they share. May be called again."""
        self.progress.close()
        for end in (self._woken, self._waking):
            end.close()

    @abstractmethod
    def _send(self, message: bytes) -> None: ...

    @abstractmethod
    def _receive(self, timeout_s: float | None) -> None: ...

    def _take_wake(self, fd: int) -> bool:
        """Whether the descriptor, which can be read, was that of a wake."""
        if fd != self._woken.fileno():
            return False
        self._woken.recv(_WAKES)
        self.was_woken = True
        return True


# Starts the ranks of a configuration, with so many threads each. Raises: BackfillError, OSError.
RankStarter = Callable[[EngineConfig, int, RankLoader], Ranks]
