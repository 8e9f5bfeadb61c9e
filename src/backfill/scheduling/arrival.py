"""Whether an arriving online request stops the running step (ConServe, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backfill.core.plan import ScheduledSlice
from backfill.core.request import Request, RequestId
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel

# With suspending, a step is stopped only if that saves more than this many times the wait for a safepoint.
_MIN_GAIN = 1.0
# A stop that costs offline work saves at least this part of the time to the first token's deadline.
_MIN_GAIN_SHARE = 0.02
# What stops may cost offline work: a share of its time, and of so much of it at most at once.
_STOP_SHARE = 0.03
_MAX_EARNED_S = 600.0


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A running step that has safepoints.

    Attributes:
        predicted_s: of the whole step.
        online_s: what the step would take with its online slices alone; 0 without any.
        offline_s: the same with its offline ones.
        stop_s: longest time to its next safepoint.
        suspends: stopped slices are suspended; otherwise they are discarded.
        yields: among its ``offline_s`` are online slices of an owner that gives way to those who arrived.
        overlap: the part of the arrival's step that runs beside this one, in stages that this one has left.
    """

    started_at_s: float
    predicted_s: float
    online_s: float
    offline_s: float
    stop_s: float
    suspends: bool
    overlap: float = 0.0
    yields: bool = False

    def ends_in_s(self, now_s: float) -> float:
        return max(0.0, self.predicted_s - (now_s - self.started_at_s))

    def ends_stopped_in_s(self, now_s: float) -> float:
        """Seconds to its end if it is stopped at the next safepoint and its online slices continue."""
        ends_in_s = self.ends_in_s(now_s)
        if ends_in_s <= self.stop_s:
            return ends_in_s
        return self.stop_s + self.online_s * (ends_in_s - self.stop_s) / self.predicted_s

    def stop_costs_s(self, now_s: float) -> float:
        """Seconds by which its slices take longer in all if it is stopped at the next safepoint.

        Its online and its offline slices then go on apart, and both read the weights of the layers that are
        left.
        """
        left = max(0.0, self.ends_in_s(now_s) - self.stop_s) / self.predicted_s
        return left * max(0.0, self.online_s + self.offline_s - self.predicted_s)


class StopBudget:
    """What stops may cost: a share of the time that offline slices take in steps.

    Stops beyond it are worth it only where a first token would be late without them. In a step of offline
    slices alone a stop costs nothing. The thread that plans steps earns, and whoever may stop one spends.
    """

    def __init__(self) -> None:
        self._earned_s = 0.0
        self._spent_s = 0.0

    def earn(self, offline_s: float) -> None:
        """A step is planned that offline slices make longer by so much."""
        most_s = self._spent_s + _STOP_SHARE * _MAX_EARNED_S
        self._earned_s = min(most_s, max(self._earned_s, self._spent_s) + _STOP_SHARE * offline_s)

    def allows(self, costs_s: float) -> bool:
        return costs_s <= max(0.0, self._earned_s - self._spent_s)

    def spend(self, costs_s: float) -> None:
        self._spent_s += costs_s


@dataclass(frozen=True, slots=True)
class ArrivedPrompt:
    """An online request that arrived during the step: its tokens, TTFT deadline, and the tokens cached."""

    num_tokens: int
    ttft_deadline_at_s: float
    num_cached_tokens: int = 0


def online_load(
    running: Iterable[Request], waiting: Iterable[Request], slices: Iterable[ScheduledSlice]
) -> StepLoad:
    """Load of a step that computes all that online requests lack once the slices have run.

    Args:
        running: online requests that hold blocks.
        waiting: online requests that wait for theirs.
        slices: of the running step.
    """
    computed: dict[RequestId, int] = {
        each.request_id: each.start + each.num_tokens for each in slices if not each.stoppable
    }
    load = StepLoad()
    for request in running:
        start = computed.get(request.request_id, request.num_computed_tokens)
        left = request.num_tokens - start
        load.put(start, max(1, left), True)  # 1: the slice samples the token that is computed next
    for request in waiting:
        load.put(request.num_computed_tokens, request.num_pending_tokens, True)
    return load


def should_stop(
    step: RunningStep,
    arrived: Sequence[ArrivedPrompt],
    online: StepLoad,
    now_s: float,
    cost: CostModel,
    time_scale: float,
    budget: StopBudget,
) -> bool:
    """Whether to stop the running step for the prompts that arrived during it.

    Where stopped slices are suspended: whenever the stop saves enough of the prompts' wait, and of the time
    to their deadlines if it costs offline work; an owner that gives way bears any cost. Where they are
    discarded: only as in the paper, when a prompt would miss its TTFT objective if the step ran to its end,
    and would not if it stopped. A prompt that would be late either way does not cost offline work as well
    (Niyama's relegation). The estimate computes all prompts together in the next step, the queued ones too,
    beside the online decodes: they go with or before those that arrived. In a pipeline a part of that step
    may run beside the running one, and does not wait for it.

    The printed algorithm's test on line 10 is inverted (it leaves when the objective would be missed), and it
    charges the next step for the offline requests of this one, which the policy does not put beside a prompt.
    It takes offline requests out of the estimate one by one; here all offline slices are stopped, so the loop
    has one round. See docs/conserve.md.

    Args:
        online: what the online requests that were there before compute in the next step (``online_load``).
        time_scale: observed over predicted step times; those of ``step`` are scaled already.
    """
    if not arrived:
        return False
    load = online.copy()
    for prompt in arrived:
        start = prompt.num_cached_tokens
        load.put(start, prompt.num_tokens - start, True)
    next_step_s = time_scale * cost.step_time_s(load)
    # What is left of this step when the next one can be beside it no more.
    at_end_s, stopped_s = (
        max(0.0, each - step.overlap * next_step_s)
        for each in (step.ends_in_s(now_s), step.ends_stopped_in_s(now_s))
    )
    if step.suspends:
        gain_s, costs_s = at_end_s - stopped_s, step.stop_costs_s(now_s)
        if gain_s <= _MIN_GAIN * step.stop_s:
            return False
        if step.yields:
            return True
        slack_s = min(prompt.ttft_deadline_at_s for prompt in arrived) - now_s
        if budget.allows(costs_s) and (costs_s == 0.0 or gain_s >= _MIN_GAIN_SHARE * slack_s):
            return True
    return any(
        now_s + stopped_s + next_step_s <= prompt.ttft_deadline_at_s < now_s + at_end_s + next_step_s
        for prompt in arrived
    )
