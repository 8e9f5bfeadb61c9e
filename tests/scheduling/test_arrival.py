from __future__ import annotations

import pytest

from backfill.scheduling.arrival import RunningStep, WaitingPrompt, must_abort
from tests.builders import linear_cost

COST = linear_cost(token_s=0.001, step_s=1e-9)


def running(predicted_s: float = 1.0, *, preemptible: bool = True) -> RunningStep:
    return RunningStep(started_at_s=10.0, predicted_s=predicted_s, preemptible=preemptible, stop_s=0.005)


@pytest.mark.parametrize(
    ("step", "first_token_by_s", "now_s", "expected"),
    [
        pytest.param(running(), 11.5, 10.2, False, id="the prompt is in time after the step"),
        pytest.param(running(), 10.9, 10.2, True, id="it would be late, and is in time if the step stops"),
        pytest.param(running(), 10.25, 10.2, False, id="it is late even so"),
        pytest.param(running(preemptible=False), 10.9, 10.2, False, id="the step serves online requests"),
        pytest.param(running(), 10.9, 11.5, False, id="the step is past its predicted end"),
    ],
)
def test_a_step_is_stopped_only_where_that_saves_a_first_token(
    step: RunningStep, first_token_by_s: float, now_s: float, expected: bool
) -> None:
    assert must_abort(step, [WaitingPrompt(100, first_token_by_s)], now_s, COST) is expected


def test_prompts_that_wait_are_computed_together() -> None:
    prompts = [WaitingPrompt(100, 11.15) for _ in range(2)]
    assert not must_abort(running(), prompts[:1], 10.2, COST)
    assert must_abort(running(), prompts, 10.2, COST)
    assert not must_abort(running(), [], 10.2, COST)
