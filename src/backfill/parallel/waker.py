"""Ends a wait for file descriptors from another thread."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

_WAKES = 4096  # taken at once


class Waker:
    """Attributes:
    was_woken: ``wake`` was called, and ``take`` after it; whoever waited for that clears it.
    """

    def __init__(self, poll: select.poll) -> None:
        self.was_woken = False
        self._woken, self._waking = socket.socketpair()
        for end in (self._woken, self._waking):
            end.setblocking(False)
        poll.register(self._woken, select.POLLIN)

    def wake(self) -> None:
        """Let ``poll`` return. From any thread."""
        with suppress(OSError):  # it is closed, or woken often enough
            self._waking.send(b"!")

    def is_at(self, fd: int) -> bool:
        return fd == self._woken.fileno()

    def take(self) -> None:
        """After ``poll`` has returned for it."""
        self._woken.recv(_WAKES)
        self.was_woken = True

    def close(self) -> None:
        """May be called again."""
        for end in (self._woken, self._waking):
            end.close()
