"""Corrects predicted step times by the times observed."""

from __future__ import annotations

_LOWEST, _HIGHEST = 0.5, 2.0
_MEAN_GAIN, _DEVIATION_GAIN = 1 / 16, 1 / 8
_DEVIATIONS = 2.0
# Bounds an outlier (a page fault storm, a stopped process): it must not count for more than a slow step.
_MOST_FROM_ONE_STEP = 2.0


class BiasCorrection:
    """Follows observed over predicted step times, as TCP follows round-trip times (RFC 6298).

    ``mean`` is the smoothed ratio and corrects a prediction. ``upper`` adds a multiple of the smoothed
    deviation; deadlines are checked against it. Both stay within [0.5, 2]: a larger ratio means that the
    profile is of another machine, and a larger correction would hide that.
    """

    def __init__(self, deviation: float = 0.0) -> None:
        self._mean = 1.0
        self._deviation = deviation

    @property
    def mean(self) -> float:
        return min(max(self._mean, _LOWEST), _HIGHEST)

    @property
    def upper(self) -> float:
        return min(max(self._mean + _DEVIATIONS * self._deviation, _LOWEST), _HIGHEST)

    def restart(self) -> None:
        """Start at a mean of 1 for a new cost model. The deviation is kept: steps vary as much as before."""
        self._mean = 1.0

    def observe(self, predicted_s: float, observed_s: float) -> None:
        if predicted_s <= 0:
            return
        ratio = min(observed_s / predicted_s, _MOST_FROM_ONE_STEP * self.mean)
        self._deviation += _DEVIATION_GAIN * (abs(ratio - self._mean) - self._deviation)
        self._mean += _MEAN_GAIN * (ratio - self._mean)
