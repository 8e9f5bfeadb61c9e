"""One offline request that is alone among those of its class: a line that may have ended the engine."""

from __future__ import annotations

from dataclasses import dataclass

from backfill.core.clock import Clock
from backfill.core.request import ServiceClass
from backfill.http.errors import TURN_KEPT, RateLimited

_RETRY_AFTER_S = 2
_HELD_S = 5.0  # for one that asks again each half of a second, or when it is told to


class LineAlone(RateLimited):
    """A line runs alone, or is to. ``is_next``: it is the one that is refused, whose turn is kept."""

    def __init__(self, *, is_next: bool = False) -> None:
        super().__init__(
            f"This server runs one offline request alone for now. Please retry in {_RETRY_AFTER_S} s.",
            TURN_KEPT if is_next else "resource_unavailable",
            _RETRY_AFTER_S,
            ServiceClass.OFFLINE,
            "line_alone",
        )


@dataclass(slots=True)
class Quarantine:
    """Admits a request that is to be alone once all others have ended; meanwhile it admits no others.

    Of several routers none sees what the others send, so only the server can say that nothing ran beside a
    line when its process died. Nothing waits here: what is refused has not run, so its loss counts for
    nothing. A request that is no longer asked for has its turn for five seconds more.
    """

    _clock: Clock
    _name: str = ""  # of the request that is alone, or is to be
    _is_running: bool = False
    _until_s: float = 0.0  # that it may begin

    def is_on(self, num_open: int) -> bool:
        """Others are refused.

        Args:
            num_open: offline choices in the server.
        """
        return num_open > 0 if self._is_running else self._clock.now_s() < self._until_s

    def check(self, name: str, num_open: int, num_lines: int = 0) -> None:
        """Whether an offline request may begin now; if so, it does.

        Args:
            name: of one that is to be alone; empty for others.
            num_open: as for ``is_on``.
            num_lines: lines of the server's own batches in the engine. While ``is_on`` no more may begin.
        Raises: LineAlone.
        """
        is_on = self.is_on(num_open)
        self._is_running = self._is_running and is_on
        if is_on and name != self._name:
            raise LineAlone
        if not name:
            return
        self._name = name
        if num_open + num_lines > 0:
            if not self._is_running:  # else it was lost on its way to who asks, and has not ended yet
                self._until_s = self._clock.now_s() + _HELD_S
            raise LineAlone(is_next=True)
        self._is_running, self._until_s = True, 0.0
