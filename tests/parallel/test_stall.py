"""When a step counts as standing still, and what is said of it."""

from __future__ import annotations

import math

import pytest

from backfill.parallel.stall import StallWatch, stall_limit_s, unwatched_s


@pytest.mark.parametrize(
    ("engine_hang_timeout", "predicted_s", "limit_s"),
    [(None, 0.0, 150.0), (None, 0.1, 15.0), (None, 4.0, 40.0), (8.0, 4.0, 4.0), (0.0, 4.0, math.inf)],
)
def test_the_limit(engine_hang_timeout: float | None, predicted_s: float, limit_s: float) -> None:
    assert stall_limit_s(engine_hang_timeout, predicted_s) == limit_s


@pytest.mark.parametrize("engine_hang_timeout", [0.1, 8.0, 300.0])
def test_ranks_that_stand_still_are_named_before_the_engine_is_killed(engine_hang_timeout: float) -> None:
    limit_s = stall_limit_s(engine_hang_timeout, 0.1)
    assert unwatched_s(engine_hang_timeout) + limit_s <= 0.75 * engine_hang_timeout
    assert unwatched_s(None) + stall_limit_s(None, 0.1) < 30.0  # the least that it is by default
    assert unwatched_s(0.0) == unwatched_s(None)


def test_progress_begins_the_count_again_and_a_pause_of_the_machine_hardly_counts() -> None:
    watch = StallWatch(100.0)
    for look in range(9):
        watch.look("layer 1", 100.0 + look / 4)
    assert watch.still_s == 2.0
    watch.look("layer 1", 5000.0)
    assert watch.still_s == 2.5
    watch.look("layer 2", 5000.25)
    assert watch.still_s == 0.0
    watch.look("layer 2", 5000.5)
    assert watch.still_s == 0.25
