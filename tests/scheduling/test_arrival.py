from __future__ import annotations

import pytest

from backfill.scheduling.arrival import ArrivedPrompt, RunningStep, should_stop
from tests.builders import linear_cost

COST = linear_cost(token_s=0.001, step_s=1e-9)


def running(predicted_s: float = 1.0, *, online_s: float = 0.0, suspends: bool = False) -> RunningStep:
    return RunningStep(
        started_at_s=10.0,
        predicted_s=predicted_s,
        online_s=online_s,
        stop_s=0.005,
        suspends=suspends,
    )


@pytest.mark.parametrize(
    ("step", "ttft_deadline_at_s", "now_s", "expected"),
    [
        pytest.param(running(), 11.5, 10.2, False, id="the prompt is in time after the step"),
        pytest.param(running(), 10.9, 10.2, True, id="it would be late, and is in time if the step stops"),
        pytest.param(running(), 10.25, 10.2, False, id="it is late even so"),
        pytest.param(running(online_s=0.99), 10.9, 10.2, False, id="online slices take nearly as long"),
        pytest.param(running(), 10.9, 11.5, False, id="the step is past its predicted end"),
    ],
)
def test_slices_are_discarded_only_where_that_saves_a_first_token(
    step: RunningStep, ttft_deadline_at_s: float, now_s: float, expected: bool
) -> None:
    assert should_stop(step, [ArrivedPrompt(100, ttft_deadline_at_s)], now_s, COST) is expected


@pytest.mark.parametrize(
    ("step", "now_s", "expected"),
    [
        pytest.param(running(suspends=True), 10.2, True, id="most of the step is left"),
        pytest.param(running(suspends=True), 10.99, False, id="nearly at its end"),
        pytest.param(running(online_s=0.99, suspends=True), 10.2, False, id="online slices take as long"),
        pytest.param(running(online_s=0.2, suspends=True), 10.2, True, id="online slices are short"),
    ],
)
def test_slices_are_suspended_wherever_that_saves_a_wait(
    step: RunningStep, now_s: float, expected: bool
) -> None:
    prompt = ArrivedPrompt(100, ttft_deadline_at_s=100.0)
    assert should_stop(step, [prompt], now_s, COST) is expected
    assert not should_stop(step, [], now_s, COST)


def test_arrived_prompts_are_computed_together() -> None:
    prompts = [ArrivedPrompt(100, 11.15) for _ in range(2)]
    assert not should_stop(running(), prompts[:1], 10.2, COST)
    assert should_stop(running(), prompts, 10.2, COST)
