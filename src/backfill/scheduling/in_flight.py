"""Steps that are planned and not committed yet: their slices, and when they are predicted to end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from backfill.core.plan import ScheduledSlice, StepPlan
from backfill.core.request import FinishReason, OrderKey, PriorityLevel, Request, RequestId
from backfill.core.slo import SLO


@dataclass(frozen=True, slots=True)
class RequestInFlight:
    """A ``RequestView`` of a request in a step in flight: as it will be when that step ends, as predicted."""

    request_id: RequestId
    priority_level: PriorityLevel
    order_key: OrderKey
    slo: SLO | None
    arrived_at_s: float
    last_token_at_s: float | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_pending_tokens: int
    num_ever_computed_tokens: int
    is_decoding: bool
    next_token_by_s: float
    banked_s: float

    @classmethod
    def of(cls, request: Request, scheduled: ScheduledSlice, ends_at_s: float) -> RequestInFlight:
        end, slo, samples = scheduled.start + scheduled.num_tokens, request.slo, scheduled.samples
        next_by_s, banked_s = request.next_token_by_s, request.banked_s
        if samples and slo is not None:
            next_by_s = ends_at_s + slo.tpot_s
            first_at_s = ends_at_s if request.first_token_at_s is None else request.first_token_at_s
            banked_s = first_at_s + len(request.output_token_ids) * slo.tpot_s - ends_at_s
        return cls(
            request_id=request.request_id,
            priority_level=request.priority_level,
            order_key=request.order_key,
            slo=slo,
            arrived_at_s=request.arrived_at_s,
            last_token_at_s=ends_at_s if samples else request.last_token_at_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=end,
            num_pending_tokens=request.num_tokens + samples - end,
            num_ever_computed_tokens=max(request.num_ever_computed_tokens, end),
            is_decoding=samples or request.num_tokens - end == 1,
            next_token_by_s=next_by_s,
            banked_s=banked_s,
        )


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    submitted_at_s: float


class StepsInFlight:
    """The steps in flight, the oldest first, and the stages that they pass one behind the other.

    A request is in one of them at most. What it holds stays as it is until its step commits: it is in no
    other plan, is not preempted, and ends only then. A step depends on nothing of the steps before it that
    has not committed, so each can be stopped, or fail, without the others.

    Steps are predicted to spend in each stage the share of their time that it has of the layers.

    Attributes:
        max_steps: that may be in flight.
        slices: of all steps in flight, by request.
        ending: requests in flight that end when their step commits, and why.
        blocked: running requests that lack a block, and wait for who has it to be in flight no more.

    Args:
        stage_layers: layers of each stage; empty for one stage.
        time_scale: observed over predicted step time.
    """

    def __init__(
        self,
        max_steps: int = 1,
        stage_layers: Sequence[int] = (),
        time_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.max_steps = max_steps
        self.slices: dict[RequestId, ScheduledSlice] = {}
        self.ending: dict[RequestId, FinishReason] = {}
        self.blocked: set[RequestId] = set()
        self._steps: dict[int, _Step] = {}
        num_layers = sum(stage_layers)
        self._shares = [layers / num_layers for layers in stage_layers] or [1.0]
        # Of a step's time, what it spends in the stages behind each one.
        self._left = [1.0 - share for share in accumulate(self._shares)]
        self._time_scale = time_scale
        # Of the last step that ended: its predicted time, and when it ended. None: it says nothing of stages.
        self._last_ended: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def max_more(self) -> int:
        """Steps that may be submitted before one is collected."""
        return self.max_steps - len(self._steps)

    @property
    def may_suspend(self) -> bool:
        """An outcome to come may suspend slices."""
        return any(
            step.plan.safepoints is not None and step.plan.safepoints.suspends
            for step in self._steps.values()
        )

    def add(self, plan: StepPlan, now_s: float) -> None:
        """The plan is about to be submitted."""
        assert len(self._steps) < self.max_steps, f"{len(self._steps)} steps are in flight"
        self._steps[plan.step] = _Step(plan, now_s)
        slices = {scheduled.request_id: scheduled for scheduled in plan.slices}
        assert self.slices.keys().isdisjoint(slices), "a request is in two steps"
        self.slices |= slices
        self.blocked -= slices.keys()

    def remove(self, plan: StepPlan, ended_at_s: float | None) -> None:
        """The oldest step is not in flight any more.

        Args:
            ended_at_s: None if it failed or was stopped, and does not show how long a step takes.
        """
        step = self._steps.pop(plan.step, None)
        if step is None:
            return  # it did nothing
        assert all(each > plan.step for each in self._steps), f"step {plan.step} is not the oldest"
        for scheduled in plan.slices:
            del self.slices[scheduled.request_id]
        self._last_ended = None if ended_at_s is None else (plan.predicted_s, ended_at_s)

    def forget(self, request_id: RequestId) -> None:
        """The request has ended, or was preempted."""
        self.blocked.discard(request_id)

    def begins_at_s(self, now_s: float) -> float:
        """When a step that is submitted now is predicted to enter the first stage."""
        return max(now_s, self._pass_stages(now_s, {})[0]) if self._steps else now_s

    def waits_s(self, plan: StepPlan) -> float:
        """Seconds for which a step that has just been added waits behind those before it, as predicted."""
        if len(self._steps) == 1:
            return 0.0
        submitted_at_s = self._steps[plan.step].submitted_at_s
        ends_at_s = self._ends_at_s(submitted_at_s)[plan.step]
        return max(0.0, ends_at_s - submitted_at_s - self._time_scale() * plan.predicted_s)

    def interval_s(self, plan: StepPlan) -> tuple[float, float] | None:
        """From when the oldest step is timed, and the time that it is predicted to take from then on.

        It is timed from its submission, or from the end of the step before it if that is later: then the
        stages are full, and it takes the time of one stage. None where that is not predicted.
        """
        step = self._steps.get(plan.step)
        if step is None or plan.predicted_s <= 0.0:
            return None
        if self.max_steps == 1:
            return step.submitted_at_s, plan.predicted_s
        if self._last_ended is None:
            return None
        since_s = max(step.submitted_at_s, self._last_ended[1])
        free_at_s, at_s = self._free_when_last_ended(), step.submitted_at_s
        for free_s, share in zip(free_at_s, self._shares, strict=True):
            at_s = max(at_s, free_s) + share * plan.predicted_s
        return since_s, at_s - since_s

    def views(self, by_id: Mapping[RequestId, Request], now_s: float) -> list[RequestInFlight]:
        """Of the requests in flight that go on after their step."""
        views, ends = [], self._ends_at_s(now_s)
        for step in self._steps.values():
            for scheduled in step.plan.slices:
                if scheduled.request_id not in self.ending:
                    request = by_id[scheduled.request_id]
                    views.append(RequestInFlight.of(request, scheduled, ends[step.plan.step]))
        return views

    def _ends_at_s(self, now_s: float) -> dict[int, float]:
        ends: dict[int, float] = {}
        self._pass_stages(now_s, ends)
        return ends

    def _pass_stages(self, now_s: float, ends: dict[int, float]) -> list[float]:
        """When each stage is predicted to be free. Enters in ``ends`` when the steps in flight end."""
        free_at_s, scale = self._free_when_last_ended(), self._time_scale()
        for number, step in self._steps.items():
            at_s = step.submitted_at_s
            for index, share in enumerate(self._shares):
                at_s = free_at_s[index] = max(at_s, free_at_s[index]) + share * scale * step.plan.predicted_s
            # It has not ended yet, whatever was predicted.
            ends[number] = free_at_s[-1] = max(at_s, now_s)
        return free_at_s

    def _free_when_last_ended(self) -> list[float]:
        """When the last step that ended left each stage."""
        if self._last_ended is None:
            return [0.0] * len(self._shares)
        seconds, ended_at_s = self._time_scale() * self._last_ended[0], self._last_ended[1]
        return [ended_at_s - left * seconds for left in self._left]

    def check_integrity(self, unfinished: Collection[RequestId]) -> None:
        """Raise AssertionError unless the steps and their requests agree."""
        names = [each.request_id for step in self._steps.values() for each in step.plan.slices]
        assert sorted(names) == sorted(self.slices), "slices in flight are counted wrong"
        assert all(name in unfinished for name in names), "a request in flight has ended"
        assert all(name in self.slices for name in self.ending), "who is in no step waits for its end"
