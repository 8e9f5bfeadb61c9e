"""Tests of what depends on time, on machines that may stall."""

from __future__ import annotations

import asyncio
import inspect
import time
import warnings
from collections.abc import Callable

import pytest

# Far above any duration on a busy machine: only a hang reaches it.
TIMEOUT_S = 300.0
_TIMES = (1.0, 5.0, 25.0)


async def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition``, which may be a coroutine's function, returns something true."""
    began_at_s = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        while not (await found if inspect.isawaitable(found := condition()) else found):
            # To ask takes time of the processors that what is waited for needs.
            await asyncio.sleep(min(max(0.001, 0.03 * (time.monotonic() - began_at_s)), 0.02))


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
