"""Corrects predicted step times by the times observed, and knows how far they still err."""

from __future__ import annotations

import math

_LOWEST, _HIGHEST = 0.5, 2.0
_MEAN_GAIN = 1 / 16
# Bounds an outlier (a page fault storm, a stopped process): it must not count for more than a slow step.
_MOST_FROM_ONE_STEP = 2.0

_BIN = math.log(1.01)  # ratios within a bin differ by at most 1 %
_NUM_BINS = 140  # from 0.5 to 2
_FIRST_BIN = -70
# Steps after which an observation counts for 1 / e. A machine that was disturbed for some seconds is itself
# again within half a minute.
_NUM_REMEMBERED = 300
_SHARE_GAIN = 0.02
_LEAST_SHARE, _MOST_SHARE = 0.9, 0.998


class BiasCorrection:
    """Follows observed over predicted step times, as TCP follows round-trip times (RFC 6298).

    ``mean`` is the smoothed ratio and corrects a prediction. It stays within [0.5, 2]: a larger ratio means
    that the profile is of another machine, and a larger correction would hide that.
    """

    def __init__(self) -> None:
        self._mean = 1.0

    @property
    def mean(self) -> float:
        return min(max(self._mean, _LOWEST), _HIGHEST)

    def restart(self) -> None:
        """Start at a mean of 1 for a new cost model."""
        self._mean = 1.0

    def observe(self, predicted_s: float, observed_s: float) -> None:
        if predicted_s <= 0:
            return
        ratio = min(observed_s / predicted_s, _MOST_FROM_ONE_STEP * self.mean)
        self._mean += _MEAN_GAIN * (ratio - self._mean)


class ErrorQuantile:
    """The ratio of observed to predicted times that a share of the recent steps does not exceed.

    A deadline is met with that probability if a step predicted to take ``1 / ratio`` of the time left is
    planned. Ratios are counted in bins of 1 % from 0.5 to 2, and forgotten within some hundred steps.

    Args:
        share: of the steps that are to be in time; ``adapt`` changes it.
        initial: what is assumed until steps have been observed; it counts as much as two of them.
    """

    def __init__(self, share: float, initial: float) -> None:
        self.share = share
        self._weights = [0.0] * _NUM_BINS
        self._end = _bin_of(initial) + 1  # bins from here on are empty
        self._weights[self._end - 1] = 2.0
        self._total, self._gain = 2.0, 1.0
        self._ratio = initial
        self._is_stale = False

    @property
    def ratio(self) -> float:
        if self._is_stale:
            self._ratio, self._is_stale = self._quantile(), False
        return self._ratio

    def observe(self, ratio: float) -> None:
        """Count a step's ratio of observed to predicted time; above 0."""
        # Later observations weigh more, which is the same as forgetting the earlier ones.
        self._gain *= 1.0 + 1.0 / _NUM_REMEMBERED
        index = _bin_of(ratio)
        self._weights[index] += self._gain
        self._end = max(self._end, index + 1)
        self._total += self._gain
        if self._gain > 1e12:
            self._weights = [weight / self._gain for weight in self._weights]
            self._total /= self._gain
            self._gain = 1.0
        self._is_stale = True

    def adapt(self, kept: float, wanted: float) -> None:
        """Move ``share`` so that what it is meant for is kept as often as is wanted.

        Adaptive conformal inference (arXiv 2106.00170, equation 2): in the long run the mean of ``kept`` is
        ``wanted``, whatever the errors do, as far as the bounds of ``share`` allow.

        Args:
            kept: share of the latest step's deadlines that were kept.
        """
        moved = self.share + _SHARE_GAIN * (wanted - kept)
        self.share = min(max(moved, _LEAST_SHARE), _MOST_SHARE)
        self._is_stale = True

    def _quantile(self) -> float:
        """The upper edge of the bin that holds the quantile."""
        beyond = (1.0 - self.share) * self._total
        index = self._end
        while index > 0 and beyond >= 0.0:
            index -= 1
            beyond -= self._weights[index]
        return math.exp((index + 1 + _FIRST_BIN) * _BIN)


def _bin_of(ratio: float) -> int:
    index = math.ceil(math.log(ratio) / _BIN - 1e-9) - 1 - _FIRST_BIN
    return min(max(index, 0), _NUM_BINS - 1)
