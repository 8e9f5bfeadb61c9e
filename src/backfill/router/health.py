"""When an engine counts as dead or as failing, and how much of a fleet may be spent on retries.

Pure: no I/O, and time is an argument. Source: outlier detection and retry budgets of Envoy, with the periods
between two losses in place of single responses: a process that dies loses all its requests at once.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_FAILED_LOOKS = 3
"""In a row, from which an engine counts as dead. A single one may be the network's, or a proxy's."""

LEAST_FAILED_INTERVALS = 8
"""Intervals between looks that the failed ones must span: requests that end look at once, and some failures
within a moment are one failure."""

_MAX_FAILED_PERIODS = 5
_EJECTION_S = 30.0
_LONGEST_EJECTION_S = 300.0
MOST_RETRIES = 1024.0
"""As many as one engine may have requests, so that the end of one loses none."""

_RETRIES_PER_REQUEST = 0.2
_RETRIES_PER_S = 10.0


@dataclass(slots=True)
class Health:
    """Of one engine.

    Attributes:
        num_failed_looks: at its state, in a row.
    """

    num_failed_looks: int = 0
    _failing_since_s: float = 0.0
    _has_failed: bool = False  # a request, since it was opened last
    _num_failed_periods: int = 0  # in a row
    _num_ejections: int = 0
    _ejected_until_s: float = 0.0

    def note_failed_look(self, now_s: float, interval_s: float) -> bool:
        """A look has failed. Returns: whether the engine counts as dead.

        Args:
            interval_s: between two looks.
        """
        if self.num_failed_looks == 0:
            self._failing_since_s = now_s
        self.num_failed_looks += 1
        is_long = now_s - self._failing_since_s >= LEAST_FAILED_INTERVALS * interval_s
        return is_long and self.num_failed_looks >= MAX_FAILED_LOOKS

    def note_answer(self) -> None:
        """It has answered a request."""
        self._num_failed_periods = self._num_ejections = 0
        self._has_failed = False

    def note_loss(self) -> None:
        """It has lost a request."""
        self._has_failed = True

    def is_ejected(self, now_s: float) -> bool:
        """It gets no requests for now, whatever it says of itself."""
        return now_s < self._ejected_until_s

    def opens(self, now_s: float, *, may_eject: bool) -> bool:
        """It says that it is ready. Returns: whether it gets requests.

        Args:
            may_eject: the others are enough without it.
        """
        if self._has_failed:
            self._has_failed = False
            self._num_failed_periods += 1
            if self._num_failed_periods >= _MAX_FAILED_PERIODS and may_eject:
                self._num_failed_periods = 0
                self._num_ejections += 1
                seconds = min(_EJECTION_S * self._num_ejections, _LONGEST_EJECTION_S)
                self._ejected_until_s = now_s + seconds
        return not self.is_ejected(now_s)


@dataclass(slots=True)
class RetryBudget:
    """Of all online requests: those that end engines must not go through the whole fleet.

    Each request adds a fifth of a retry, and each second ten. A request that an engine lost takes one to run
    elsewhere.
    """

    _left: float = MOST_RETRIES
    _at_s: float = 0.0

    def note_request(self) -> None:
        self._left = min(MOST_RETRIES, self._left + _RETRIES_PER_REQUEST)

    def take(self, now_s: float) -> bool:
        """Whether a lost request may run elsewhere."""
        self._left = min(MOST_RETRIES, self._left + _RETRIES_PER_S * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
