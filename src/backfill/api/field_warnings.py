"""Fields without an effect in the log: a line now and then, however many requests have them."""

from __future__ import annotations

import logging

from backfill.core.clock import Clock, WallClock

logger = logging.getLogger(__name__)

_INTERVAL_S = 60.0


class FieldWarnings:
    """Logs the first warning, and then at most one a minute with how many others there were."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = WallClock() if clock is None else clock
        self._logged_at_s: float | None = None
        self._num_silent = 0

    def add(self, warning: str) -> None:
        """Args: warning: printable, since a client chose the names in it."""
        now_s = self._clock.now_s()
        if self._logged_at_s is not None and now_s - self._logged_at_s < _INTERVAL_S:
            self._num_silent += 1
            return
        others = f" ({self._num_silent} other requests likewise since the last such line)"
        logger.warning("in a request: %s%s", warning, others if self._num_silent else "")
        self._logged_at_s, self._num_silent = now_s, 0
