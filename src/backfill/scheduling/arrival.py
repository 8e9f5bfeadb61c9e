"""What the arrival of an online request does to the step that is running (ConServe, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The step in flight.

    Attributes:
        predicted_s: of the whole step.
        preemptible: it serves no online request.
        stop_s: longest time to its next safepoint.
    """

    started_at_s: float
    predicted_s: float
    preemptible: bool
    stop_s: float

    def remaining_s(self, now_s: float) -> float:
        return max(0.0, self.predicted_s - (now_s - self.started_at_s))


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """An online request that waits for the step to end: tokens to compute and its TTFT deadline."""

    num_tokens: int
    first_token_by_s: float


def must_abort(step: RunningStep, waiting: Iterable[WaitingPrompt], now_s: float, cost: CostModel) -> bool:
    """Whether to stop the running step, so that the prompts that wait meet their TTFT objectives.

    They are computed together in the next step. The step is stopped when one of them would be late if it
    ran to its end, and would not be if it stopped at its next safepoint: a request that is lost anyway does
    not cost offline work too (Niyama's relegation). The printed algorithm's test on line 10 is inverted (it
    leaves when the objective would be missed), and it charges the next step for the offline requests of this
    one, which the policy does not put beside a prompt; see docs/coserving.md. The paper takes offline
    requests out of the estimate one by one; a step of offline requests only is stopped whole, so the loop
    has one round.
    """
    if not step.preemptible:
        return False
    prompts = list(waiting)
    next_s = cost.step_time_s(StepLoad.of((0, prompt.num_tokens, True) for prompt in prompts))
    at_end = now_s + step.remaining_s(now_s) + next_s
    at_safepoint = now_s + min(step.stop_s, step.remaining_s(now_s)) + next_s
    return any(at_safepoint <= prompt.first_token_by_s < at_end for prompt in prompts)
