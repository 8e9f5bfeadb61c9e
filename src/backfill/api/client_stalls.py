"""The time that a connection's client takes from the server by not reading."""

from __future__ import annotations

from backfill.core.clock import Clock


class ClientStalls:
    """Adds up the times in which the server may not write, since its buffer for the client is full."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended_s = 0.0  # of stalls that are over
        self._began_at_s: float | None = None

    def begin(self) -> None:
        """The buffer is full."""
        if self._began_at_s is None:
            self._began_at_s = self._clock.now_s()

    def end(self) -> None:
        """The buffer has room again, or the connection is lost. Does nothing outside a stall."""
        self._ended_s, self._began_at_s = self.total_s(), None

    def total_s(self) -> float:
        """Seconds so far, a stall that goes on included."""
        running_s = 0.0 if self._began_at_s is None else self._clock.now_s() - self._began_at_s
        return self._ended_s + running_s
