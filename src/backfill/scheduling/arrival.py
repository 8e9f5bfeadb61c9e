"""Whether an arriving online request stops the running step (ConServe, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel

# With suspending, a step is stopped only if that saves more than this many times the wait for a safepoint.
_MIN_GAIN = 2.0


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A running step that has safepoints.

    Attributes:
        predicted_s: of the whole step.
        online_s: what the step would take with its online slices alone; 0 without any.
        stop_s: longest time to its next safepoint.
        suspends: stopped slices are suspended; otherwise they are discarded.
    """

    started_at_s: float
    predicted_s: float
    online_s: float
    stop_s: float
    suspends: bool

    def ends_in_s(self, now_s: float) -> float:
        return max(0.0, self.predicted_s - (now_s - self.started_at_s))

    def ends_stopped_in_s(self, now_s: float) -> float:
        """Seconds to its end if it is stopped at the next safepoint and its online slices continue."""
        ends_in_s = self.ends_in_s(now_s)
        if ends_in_s <= self.stop_s:
            return ends_in_s
        return self.stop_s + self.online_s * (ends_in_s - self.stop_s) / self.predicted_s


@dataclass(frozen=True, slots=True)
class ArrivedPrompt:
    """An online request that arrived during the step: tokens to compute and its TTFT deadline."""

    num_tokens: int
    ttft_deadline_at_s: float


def should_stop(step: RunningStep, arrived: Sequence[ArrivedPrompt], now_s: float, cost: CostModel) -> bool:
    """Whether to stop the running step for the prompts that arrived during it.

    Where stopped slices are suspended: whenever the stop saves enough of the prompts' wait. Where they are
    discarded: only as in the paper, when a prompt would miss its TTFT objective if the step ran to its end,
    and would not if it stopped. A prompt that would be late either way does not cost offline work as well
    (Niyama's relegation). The estimate computes all prompts together in the next step.

    The printed algorithm's test on line 10 is inverted (it leaves when the objective would be missed), and it
    charges the next step for the offline requests of this one, which the policy does not put beside a prompt.
    It takes offline requests out of the estimate one by one; here all offline slices are stopped, so the loop
    has one round. See docs/coserving.md.
    """
    if not arrived:
        return False
    at_end_s, stopped_s = step.ends_in_s(now_s), step.ends_stopped_in_s(now_s)
    if step.suspends:
        return at_end_s - stopped_s > _MIN_GAIN * step.stop_s
    prompts_s = cost.step_time_s(StepLoad.of((0, prompt.num_tokens, True) for prompt in arrived))
    return any(
        now_s + stopped_s + prompts_s <= prompt.ttft_deadline_at_s < now_s + at_end_s + prompts_s
        for prompt in arrived
    )
