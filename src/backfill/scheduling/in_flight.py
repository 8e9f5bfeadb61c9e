"""Steps that are planned and not committed yet: their slices, and when they are predicted to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

from backfill.core.plan import Resume, ScheduledSlice, StepPlan, max_in_flight
from backfill.core.request import FinishReason, Request, RequestId

# A step of so many tokens is bound by computation: several small ones take no longer than a large one.
_EFFICIENT_TOKENS = 256


@dataclass(slots=True)
class _Step:
    """A step in flight.

    Attributes:
        layers_done: that its slices have passed before.
        left_at_s: when it is predicted to leave each stage.
        is_stopping: it was asked to stop its stoppable slices.
    """

    plan: StepPlan
    submitted_at_s: float
    layers_done: int
    left_at_s: list[float]
    is_stopping: bool = False

    @property
    def predicted_s(self) -> float:
        """What is left of a stopped step that has none but stoppable slices, takes no time."""
        if self.is_stopping and all(each.stoppable for each in self.plan.slices):
            return 0.0
        return self.plan.predicted_s


class StepsInFlight:
    """The steps in flight, the oldest first, and the stages that they pass one behind the other.

    What a request in flight holds stays as it is until its step commits: it is not preempted, and ends only
    then. It is in one step, or in several with successive chunks of its prompt: a chunk that cannot be
    stopped may be followed before it has committed, if the request would run once more should it fail. What
    later chunks compute is then lost. Else a step depends on nothing of the steps before it that has not
    committed, so each can be stopped, or fail, without the others.

    A step is predicted to spend in each stage the share of its time that the stage has of its layers, and to
    enter it when the step in front has left it. What is predicted is moved by what the ends of steps show.

    Attributes:
        max_steps: that may be in flight, without some that resume (``max_in_flight``).
        slices: the last one in flight of each request.
        open: requests in flight whose next chunk may be planned. Their slices count as computed.
        lost: requests in flight of which an earlier chunk has failed.
        ending: requests in flight that end when their last step commits, and why.
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
        self.open: set[RequestId] = set()
        self.lost: set[RequestId] = set()
        self.ending: dict[RequestId, FinishReason] = {}
        self.blocked: set[RequestId] = set()
        self._steps: dict[int, _Step] = {}
        self._stages = tuple(starmap(range, pairwise(accumulate(stage_layers, initial=0)))) or (range(1),)
        self._time_scale = time_scale
        # When the last step that ended left each stage, and whether it passed all of them.
        self._left_at_s = [0.0] * len(self._stages)
        self._was_whole = True

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def max_more(self) -> int:
        """Steps that may be submitted before one is collected."""
        return max_in_flight(self.max_steps, (each.plan for each in self._steps.values())) - len(self._steps)

    @property
    def closed(self) -> set[RequestId]:
        """Requests in flight that are in no other plan until their step has committed."""
        return self.slices.keys() - self.open

    @property
    def all_slices(self) -> Iterator[ScheduledSlice]:
        """Of all steps, the oldest first."""
        return (scheduled for step in self._steps.values() for scheduled in step.plan.slices)

    def max_prefill_tokens(self, max_step_tokens: int) -> int:
        """Of prompts in one step, which has at most so many tokens.

        The later stages have nothing to do while the first step of a batch of prompts passes the first stage,
        and the first one nothing behind the last step. With several steps of fewer tokens that is short.
        """
        if self.max_steps == 1:
            return max_step_tokens
        return min(max_step_tokens, max(_EFFICIENT_TOKENS, max_step_tokens // (2 * self.max_steps)))

    @property
    def num_suspendable_tokens(self) -> int:
        """Of slices that outcomes to come may suspend."""
        return sum(
            scheduled.num_tokens
            for step in self._steps.values()
            if step.plan.safepoints is not None and step.plan.safepoints.suspends
            for scheduled in step.plan.slices
            if scheduled.stoppable
        )

    def add(
        self, plan: StepPlan, now_s: float, by_id: Mapping[RequestId, Request], layers_done: int = 0
    ) -> None:
        """The plan is about to be submitted. Chunks that may be followed count as computed from now on.

        Args:
            layers_done: that slices which it resumes have passed.
        """
        assert self.max_more > 0, f"{len(self._steps)} steps are in flight"
        step = self._steps[plan.step] = _Step(plan, now_s, layers_done, [])
        self._pass_stages(step, self._in_front(plan.step))
        slices = {scheduled.request_id: scheduled for scheduled in plan.slices}
        assert self.closed.isdisjoint(slices), "a request is in two steps"
        self.slices |= slices
        self.blocked -= slices.keys()
        self.open -= slices.keys()
        if self.max_steps > 1:
            self._open(plan, by_id)

    def _open(self, plan: StepPlan, by_id: Mapping[RequestId, Request]) -> None:
        for scheduled in plan.slices:
            if scheduled.samples or (scheduled.stoppable and plan.safepoints is not None):
                continue
            request = by_id[scheduled.request_id]
            if not (request.output_token_ids or request.was_retried):
                self.open.add(scheduled.request_id)
                request.num_computed_tokens = scheduled.start + scheduled.num_tokens

    def stop(self, number: int) -> None:
        """The step is asked to stop. May be called from another thread."""
        step = self._steps.get(number)
        if step is not None:
            step.is_stopping = True

    def remove(self, plan: StepPlan, now_s: float | None, *, was_stopped: bool = False) -> None:
        """The oldest step is not in flight any more.

        Args:
            now_s: when it has ended; None if it failed.
            was_stopped: it does not show how long steps take, as one that failed does not.
        """
        step = self._steps.pop(plan.step, None)
        if step is None:
            return  # it did nothing
        assert all(each > plan.step for each in self._steps), f"step {plan.step} is not the oldest"
        for scheduled in plan.slices:
            if self.slices[scheduled.request_id] is scheduled:
                del self.slices[scheduled.request_id]
                self.open.discard(scheduled.request_id)
        self._was_whole = now_s is not None and not was_stopped
        late_s = 0.0 if now_s is None else now_s - step.left_at_s[-1]
        if was_stopped and now_s is not None:
            in_front = [min(each, now_s) for each in step.left_at_s]
        else:
            in_front = [each + late_s for each in step.left_at_s]
        self._left_at_s = in_front
        for behind in self._steps.values():
            in_front = self._pass_stages(behind, in_front)

    def end(self, request_id: RequestId, reason: FinishReason) -> None:
        """The request, which is in flight, is to end."""
        self.ending[request_id] = reason
        self.open.discard(request_id)

    def lose(self, request_id: RequestId) -> None:
        """A chunk of the request has failed, and later ones are in flight."""
        self.lost.add(request_id)
        self.open.discard(request_id)

    def forget(self, request_id: RequestId) -> None:
        """The request has ended, or was preempted."""
        self.blocked.discard(request_id)
        self.lost.discard(request_id)

    def begins_at_s(self, now_s: float) -> float:
        """When a step that is submitted now is predicted to enter the first stage."""
        if not self._steps:
            return now_s
        return max(now_s, self._in_front(None)[0] + self._late_s(now_s))

    def waits_s(self, plan: StepPlan) -> float:
        """Seconds for which a step in flight waits behind those before it, as predicted."""
        step = self._steps[plan.step]
        seconds = step.left_at_s[-1] - step.submitted_at_s
        return max(0.0, seconds - self._time_scale() * plan.predicted_s)

    def timed_since_s(self, plan: StepPlan) -> float:
        """From when the oldest step, this one, is timed.

        From its submission, or from the end of the step before it if that is later: where the stages are
        full, that is the time of one stage.
        """
        submitted_at_s = self._steps[plan.step].submitted_at_s
        return submitted_at_s if self.max_steps == 1 else max(submitted_at_s, self._left_at_s[-1])

    def interval_s(self, plan: StepPlan) -> tuple[float, float] | None:
        """From when the oldest step is timed, and the time that its plan predicts from then on.

        None where that is not predicted.
        """
        step = self._steps.get(plan.step)
        if step is None or step.predicted_s <= 0.0:
            return None
        since_s = self.timed_since_s(plan)
        if self.max_steps == 1:
            return since_s, plan.predicted_s
        if not self._was_whole and since_s > step.submitted_at_s:
            return None
        return since_s, (step.left_at_s[-1] - since_s) / self._time_scale()

    def views(self, by_id: Mapping[RequestId, Request], now_s: float) -> list[Request]:
        """Copies of the requests in flight, each as it will be when its step ends, as predicted.

        Of those that go on after their step, and are in no other plan until then.
        """
        views, late_s = [], self._late_s(now_s)
        gone_on = self.open | self.lost | self.ending.keys()
        for step in self._steps.values():
            for scheduled in step.plan.slices:
                request_id = scheduled.request_id
                if request_id not in gone_on and self.slices[request_id] is scheduled:
                    request = by_id[request_id]
                    views.append(_after(request, scheduled, step.left_at_s[-1] + late_s))
        return views

    def _in_front(self, number: int | None) -> list[float]:
        """When the step in front of this one, or else the last one, leaves each stage."""
        numbers = [each for each in self._steps if each != number]
        return self._steps[numbers[-1]].left_at_s if numbers else self._left_at_s

    def _late_s(self, now_s: float) -> float:
        """Seconds by which the oldest step is late by now."""
        oldest = next(iter(self._steps.values()), None)
        return 0.0 if oldest is None else max(0.0, now_s - oldest.left_at_s[-1])

    def _pass_stages(self, step: _Step, in_front: list[float]) -> list[float]:
        """Predict when the step leaves each stage, behind the one that is in front."""
        left_at_s, at_s = [], step.submitted_at_s
        seconds = self._time_scale() * step.predicted_s
        for free_at_s, share in zip(in_front, self._shares(step), strict=True):
            at_s = max(at_s, free_at_s) + share * seconds
            left_at_s.append(at_s)
        step.left_at_s = left_at_s
        return left_at_s

    def _shares(self, step: _Step) -> list[float]:
        """The part of the step's layers that each stage has."""
        work, stages = step.plan.work, self._stages
        first, num_layers = 0, stages[-1].stop
        if isinstance(work, Resume) and len(stages) > 1:
            first, num_layers = step.layers_done, work.num_layers
        last = first + num_layers
        return [max(0, min(last, each.stop) - max(first, each.start)) / num_layers for each in stages]


def _after(request: Request, scheduled: ScheduledSlice, ends_at_s: float) -> Request:
    """A copy of the request as it will be when the slice's step ends."""
    after, end = copy(request), scheduled.start + scheduled.num_tokens
    after.num_computed_tokens = end
    after.num_ever_computed_tokens = max(request.num_ever_computed_tokens, end)
    if scheduled.samples:
        after.num_tokens += 1  # its token is not known yet
        after.last_token_at_s = ends_at_s
        if request.first_token_at_s is None:
            after.first_token_at_s = ends_at_s
    return after
