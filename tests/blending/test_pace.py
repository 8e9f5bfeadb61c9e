"""How long work takes over its least time."""

from __future__ import annotations

import pytest

from backfill.blending.deadlines import Pace


def paced(slowdown: float, *, num_s: int, is_busy: bool = True, pace: Pace | None = None) -> Pace:
    """Work of a second every ``slowdown`` seconds."""
    pace = pace or Pace()
    at_s = 0.0
    pace.advance(at_s, is_busy=False)
    while at_s < num_s:
        at_s += slowdown
        pace.advance(at_s, is_busy=is_busy)
        pace.add(1.0, 0.5)
    return pace


def test_a_device_is_ideal_until_it_was_seen() -> None:
    assert Pace().slowdown == 1.0


@pytest.mark.parametrize("slowdown", [2.0, 10.0, 300.0])
def test_the_pace_is_learned(slowdown: float) -> None:
    assert paced(slowdown, num_s=6000).slowdown == pytest.approx(slowdown, rel=0.3)


def test_a_device_faster_than_its_model_counts_as_ideal() -> None:
    assert paced(0.1, num_s=600).slowdown == 1.0


def test_time_without_requests_in_flight_says_nothing() -> None:
    pace = Pace()
    pace.advance(0.0, is_busy=False)
    pace.advance(1e6, is_busy=False)
    assert pace.slowdown == 1.0


def test_work_that_never_ends_makes_every_deadline_urgent() -> None:
    pace = Pace()
    pace.advance(0.0, is_busy=False)
    for at_s in range(10, 100_000, 10):
        pace.advance(float(at_s), is_busy=True)
    assert pace.slowdown > 1e9
