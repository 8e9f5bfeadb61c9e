from __future__ import annotations

import pytest

from backfill.core.clock import VirtualClock, WallClock


def test_a_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock(start_s=5.0)
    assert clock.now_s() == 5.0
    clock.advance(0.25)
    assert clock.now_s() == 5.25


def test_no_clock_moves_backwards() -> None:
    with pytest.raises(ValueError, match="cannot go back"):
        VirtualClock().advance(-1.0)
    clock = WallClock()
    assert clock.now_s() <= clock.now_s()
