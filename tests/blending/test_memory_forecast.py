"""How much KV requests will need, and what fits beside it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.blending.memory_forecast import MemoryForecast, reserve_frac
from tests.shared import examples


def test_what_is_held_before_each_end_adds_up() -> None:
    """10 + 90 tokens beside 10 + 40: both hold 50 after 40 steps, and the longer one 100 in the end."""
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 10, 90.0)
    assert forecast.free().most_output_tokens(10) == 40.0
    assert forecast.free().most_output_tokens(11) == 39.5
    assert forecast.free().most_output_tokens(90) == 0.0
    forecast.remove(0)
    assert forecast.free().most_output_tokens(10) == 90.0


def test_it_looks_past_the_ends_of_others() -> None:
    """After 20 steps the first one ends, and what it held is free."""
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 20, 20.0)
    assert forecast.free().most_output_tokens(40) == 60.0
    assert forecast.free().most_output_tokens(42) == 19.0


def test_short_requests_are_followed_by_others() -> None:
    forecast = MemoryForecast(1000, 0)
    forecast.add(100, 100, 400.0)
    assert forecast.free().most_output_tokens(0) == 1000.0
    for number in range(4):
        forecast.add(number, 98, 4.0)
    assert forecast.free().most_output_tokens(0) == 250.0  # (1000 - 4 * 100 - 100) / 2


def test_progress_brings_the_end_nearer_and_a_corrected_expectation_moves_it() -> None:
    """After 50 of 60 tokens 40 are free: 20 + 10 fit beside its last 10, and later all does."""
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 10, 60.0)
    assert forecast.free().most_output_tokens(20) == 35.0
    forecast.note_progress(0, 50)
    assert forecast.free().most_output_tokens(20) == 80.0
    assert forecast.free().most_output_tokens(22) == 9.0
    forecast.note_progress(0, 50, 80.0)
    assert forecast.free().most_output_tokens(20) == 10.0
    forecast.note_progress(1, 50)  # unknown
    forecast.remove(1)
    assert forecast.free().most_output_tokens(20) == 10.0


def test_one_that_outlives_its_expectation_may_end_at_any_step() -> None:
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 10, 20.0)
    forecast.note_progress(0, 40)
    assert forecast.free().most_output_tokens(50) == 0.0
    assert forecast.free().most_output_tokens(48) == 52.0


def test_choices_share_a_prompt_and_grow_each() -> None:
    """Four choices have 20 + 4 * 10 tokens after 10 of 15 steps."""
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 20, 15.0, num_choices=4)
    forecast.note_progress(0, 10)
    assert forecast.free().most_output_tokens(10) == 90.0
    assert forecast.free().most_output_tokens(20) == 4.0  # (100 - 60 - 20) / 5


def test_slack_is_of_each_output_and_online_requests_leave_the_rest() -> None:
    forecast = MemoryForecast(200, 8)
    assert forecast.free().most_output_tokens(0) == 192.0
    forecast.add(0, 10, 40.0, num_choices=2)
    forecast.online_tokens = 50
    assert forecast.offline_tokens == 150
    assert forecast.free().most_output_tokens(0) == (150 - 8 - 26) / 3
    assert forecast.free().most_output_tokens(30) == (150 - 8 - 26 - 30) / 3
    forecast.online_tokens = 300
    assert forecast.offline_tokens == 0
    assert forecast.free().most_output_tokens(0) == 0.0


def test_the_reserve_is_more_than_the_need_and_at_most_all() -> None:
    assert reserve_frac(0.0) == 0.0
    assert reserve_frac(0.4) > 0.4
    assert reserve_frac(0.9) == 1.0


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(50, 100)), min_size=1, max_size=12))
@settings(max_examples=examples(60))
def test_requests_that_are_admitted_never_hold_more_than_there_is(lengths: list[tuple[int, int]]) -> None:
    """Whatever is added as they decode, one token a step. What fits is not refused for ever."""
    capacity = 400
    forecast = MemoryForecast(capacity, 0)
    running: dict[int, int] = {}  # tokens generated
    waiting = list(enumerate(lengths))
    while running or waiting:
        while waiting:
            number, (prompt, output) = waiting[0]
            if forecast.free().most_output_tokens(prompt) < output:
                break
            waiting.pop(0)
            forecast.add(number, prompt, float(output))
            running[number] = 0
        assert running, "none runs and none fits"
        for number in list(running):
            running[number] += 1
            forecast.note_progress(number, running[number])
        assert sum(lengths[number][0] + so_far for number, so_far in running.items()) <= capacity
        for number, so_far in list(running.items()):
            if so_far == lengths[number][1]:
                forecast.remove(number)
                del running[number]
