"""Log lines about request fields that have no effect, at a limited rate."""

from __future__ import annotations

import logging

from backfill.core.clock import Clock, WallClock

logger = logging.getLogger(__name__)

_INTERVAL_S = 60.0


class FieldWarnings:
    """Logs at most one warning a minute, with the number of warnings suppressed since the last one."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = WallClock() if clock is None else clock
        self._logged_at_s: float | None = None
        self._num_suppressed = 0

    def add(self, warning: str) -> None:
        """Args: warning: printable text; it contains names that a client chose."""
        now_s = self._clock.now_s()
        if self._logged_at_s is not None and now_s - self._logged_at_s < _INTERVAL_S:
            self._num_suppressed += 1
            return
        others = f" ({self._num_suppressed} other requests since the last such line)"
        logger.warning("in a request: %s%s", warning, others if self._num_suppressed else "")
        self._logged_at_s, self._num_suppressed = now_s, 0
