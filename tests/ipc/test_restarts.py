from __future__ import annotations

from backfill.ipc.restarts import Restarts


def test_restarts_wait_longer_and_longer_after_quick_deaths() -> None:
    restarts, delays = Restarts("it", 1.0, 30.0), []
    for is_quick in (False, *[True] * 7, False, True):
        restarts.on_death(is_quick=is_quick)
        delays.append(restarts.delay_s)
    assert delays == [1, 1, 2, 4, 8, 16, 30, 30, 1, 1]
