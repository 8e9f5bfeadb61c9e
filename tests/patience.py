"""Tests of what depends on time, on machines that may stall."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

_TIMES = (1.0, 5.0, 25.0)


def with_more_time(attempt: Callable[[float], None]) -> None:
    """Run ``attempt``, and again with all its times longer if it fails.

    For what must happen within a time, or in the order of times: a test cannot tell a machine that stalled
    from code that is late, but code that is late stays so with more time.

    Args:
        attempt: gets the factor of its times; the first is 1.
    """
    *first, last = _TIMES
    for factor in first:
        try:
            attempt(factor)
        except (Exception, pytest.fail.Exception) as error:
            # For the run's summary: a failure that has nothing to do with time is not to pass unseen.
            warnings.warn(f"tried again with more time than {factor:g}: {error!r}", stacklevel=2)
            continue
        return
    attempt(last)
