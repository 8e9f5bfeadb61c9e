"""When an engine counts as failing, and how much is spent on retries; pauses of the router itself."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.router.health import MOST_RETRIES, Health, RetryBudget
from backfill.router.looks import within


def lose_and_open(health: Health, now_s: float, num_periods: int, *, may_eject: bool = True) -> bool:
    opens = True
    for _ in range(num_periods):
        for _ in range(100):  # a process that dies loses all its requests
            health.note_loss()
        opens = health.opens(now_s, may_eject=may_eject)
    return opens


def test_an_engine_that_loses_requests_again_and_again_is_ejected_for_longer_and_longer() -> None:
    health = Health()
    assert lose_and_open(health, 0.0, 4)
    health.note_answer()
    assert lose_and_open(health, 0.0, 4)
    assert not lose_and_open(health, 0.0, 1)
    assert not health.opens(29.9, may_eject=True) and health.opens(30.0, may_eject=True)
    assert lose_and_open(health, 30.0, 5, may_eject=False), "too few others"
    assert not lose_and_open(health, 30.0, 1)
    assert health.is_ejected(89.9) and not health.is_ejected(90.0)
    health.note_answer()
    assert not lose_and_open(health, 100.0, 5)
    assert not health.is_ejected(130.0)


def test_failed_looks_within_a_moment_are_no_dead_engine() -> None:
    health = Health()
    assert not any(health.note_failed_look(10.0 + 0.1 * number, 0.25) for number in range(10))
    assert health.note_failed_look(12.0, 0.25)
    health.num_failed_looks = 0  # it has answered one
    assert not any(health.note_failed_look(at_s, 0.25) for at_s in (20.0, 25.0)), "two are too few"
    assert health.note_failed_look(26.0, 0.25)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2000), st.floats(0.0, 10.0)), max_size=30))
def test_retries_are_at_most_a_share_of_requests_beside_ten_a_second(
    events: list[tuple[int, int, float]],
) -> None:
    budget, now_s, num_requests, num_taken = RetryBudget(), 0.0, 0, 0
    for num_new, num_lost, seconds in events:
        now_s += seconds
        num_requests += num_new
        for _ in range(num_new):
            budget.note_request()
        taken = sum(budget.take(now_s) for _ in range(num_lost))
        num_taken += taken
        assert taken >= min(num_lost, int(min(MOST_RETRIES, 10.0 * seconds))), "none is starved for long"
        assert num_taken <= MOST_RETRIES + 0.2 * num_requests + 10.0 * now_s + 1e-6


def test_a_pause_of_this_process_is_no_time_that_an_engine_took() -> None:
    async def answer(pause_s: float) -> int:
        await asyncio.sleep(0.0)
        time.sleep(pause_s)
        await asyncio.sleep(0.01)
        return 1

    async def hang() -> None:
        await asyncio.sleep(1000.0)

    assert asyncio.run(within(0.2, answer(0.5))) == 1
    with pytest.raises(TimeoutError):
        asyncio.run(within(0.05, hang()))
