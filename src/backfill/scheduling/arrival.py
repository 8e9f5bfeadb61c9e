"""What the arrival of an online request does to the step that is running (ConServe, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel

# With suspending a stop costs little: it is worth more than this many times the wait for a safepoint.
_LEAST_GAIN = 2.0


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step in flight that has safepoints.

    Attributes:
        predicted_s: of the whole step.
        staying_s: what the step would take without the slices that yield; 0 where all do.
        stop_s: longest time to its next safepoint.
        suspends: what is stopped is kept and goes on later.
    """

    started_at_s: float
    predicted_s: float
    staying_s: float
    stop_s: float
    suspends: bool

    def ends_in_s(self, now_s: float) -> float:
        return max(0.0, self.predicted_s - (now_s - self.started_at_s))

    def ends_stopped_in_s(self, now_s: float) -> float:
        """Seconds to its end if it is stopped at the next safepoint and the slices that stay go on."""
        ends_in_s = self.ends_in_s(now_s)
        if ends_in_s <= self.stop_s:
            return ends_in_s
        return self.stop_s + self.staying_s * (ends_in_s - self.stop_s) / self.predicted_s


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """An online request that waits for the step to end: tokens to compute and its TTFT deadline."""

    num_tokens: int
    ttft_deadline_at_s: float


def must_stop(step: RunningStep, waiting: Sequence[WaitingPrompt], now_s: float, cost: CostModel) -> bool:
    """Whether to take the offline slices out of the running step for the prompts that wait.

    Where stopped work is suspended, whenever it saves the prompts a wait worth the stop. Where it is dropped,
    only as in the paper: when a prompt would miss its TTFT objective if the step ran to its end, and would
    not if it stopped; a prompt that is lost anyway does not cost offline work too (Niyama's relegation). The
    prompts are taken to be computed together in the next step.

    The printed algorithm's test on line 10 is inverted (it leaves when the objective would be missed), and it
    charges the next step for the offline requests of this one, which the policy does not put beside a prompt.
    It takes offline requests out of the estimate one by one; here all that yield go, so the loop has one
    round. See docs/coserving.md.
    """
    if not waiting:
        return False
    at_end_s, stopped_s = step.ends_in_s(now_s), step.ends_stopped_in_s(now_s)
    if step.suspends:
        return at_end_s - stopped_s > _LEAST_GAIN * step.stop_s
    prompts_s = cost.step_time_s(StepLoad.of((0, prompt.num_tokens, True) for prompt in waiting))
    return any(
        now_s + stopped_s + prompts_s <= prompt.ttft_deadline_at_s < now_s + at_end_s + prompts_s
        for prompt in waiting
    )
