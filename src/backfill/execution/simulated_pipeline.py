"""A simulated pipeline: its stages compute steps one behind the other on the virtual clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, starmap

from backfill.core.clock import VirtualClock
from backfill.core.plan import (
    Compute,
    Resume,
    Safepoints,
    StepOutcome,
    StepPlan,
    WaitForCopies,
    max_in_flight,
)
from backfill.costs.behaviour import DeviceBehaviour
from backfill.execution.executor import ExecutorInfo, PipelinedExecutor, stopped_outcome
from backfill.execution.simulated_executor import SimulatedExecutor


@dataclass(slots=True, eq=False)
class _Step:
    """A step in flight.

    Attributes:
        ready_at_s: when it may enter the first stage.
        noise: observed over typical time.
        first, last: its stoppable slices pass the layers ``[first, last)``.
        layer_s: of all its slices.
        online_layer_s: of those that go on behind ``last``; 0 without any.
        entered_at_s, left_at_s: when it enters and leaves each stage.
        is_stopped: ``last`` is where it was asked to stop.
    """

    plan: StepPlan
    ready_at_s: float
    noise: float = 1.0
    first: int = 0
    last: int = 0
    layer_s: float = 0.0
    online_layer_s: float = 0.0
    entered_at_s: list[float] = field(default_factory=list)
    left_at_s: list[float] = field(default_factory=list)
    is_stopped: bool = False

    def seconds(self, layers: range) -> float:
        """In consecutive layers."""
        both = min(layers.stop, self.last) - max(layers.start, self.first)
        return self.layer_s * max(0, both) + self.online_layer_s * max(
            0, layers.stop - max(layers.start, self.last)
        )


class SimulatedPipeline(PipelinedExecutor, SimulatedExecutor):
    """See ``PipelinedExecutor`` and ``SimulatedExecutor``.

    A step spends in each stage the share of its time that the stage has of the layers, and enters a stage
    once it has left the one before and the step in front of it has left this one. What stages send each other
    takes no time. A step stops at the next safepoint of the stage that it is in or waits for, where stages
    have them (``Stage.safepoints``). Its other slices go on in the time of a step of their own.

    Copies begin when the first stage is free for their step. Events are delivered during steps with
    safepoints, during those beside them, and in ``wait``.

    Args:
        info: nothing is offloaded.
        seed: of the device's noise.
    """

    info: ExecutorInfo

    def __init__(
        self, info: ExecutorInfo, device: DeviceBehaviour, clock: VirtualClock, *, seed: int = 0
    ) -> None:
        stage_layers = info.layers_of_stages
        assert sum(stage_layers) == info.num_layers, "the stages do not have the model's layers"
        assert info.offload_interval is None, "stages have all their weights"
        SimulatedExecutor.__init__(self, info, device, clock, seed=seed)
        self._stages = tuple(starmap(range, pairwise(accumulate(stage_layers, initial=0))))
        self._steps: deque[_Step] = deque()
        self._left_at_s = [0.0] * len(stage_layers)  # by the last step that was collected

    def submit(self, plan: StepPlan) -> None:
        most = max_in_flight(self.info.max_steps_in_flight, (each.plan for each in self._steps))
        assert len(self._steps) < most, f"{len(self._steps)} steps are in flight"
        self._change_requests(plan)
        in_front = self._steps[-1].left_at_s if self._steps else self._left_at_s
        begins_at_s = max(self._clock.now_s(), in_front[0])
        step = _Step(plan, self._begin_copies(plan.copies, begins_at_s))
        match plan.work:
            case WaitForCopies():
                assert not self._steps, "a step in flight would wait too"
                step.ready_at_s = max(step.ready_at_s, self._copies[0][0])
            case Resume(num_layers=num_layers):
                step.first = self._taken_up(plan)
                step.last = step.first + num_layers
            case Compute(slices=()):
                pass
            case Compute():
                step.last = self.info.num_layers
        if step.last:
            step.noise = self._noise.draw()
            step.layer_s = step.noise * self._seconds(plan.slices) / self.info.num_layers
        self._steps.append(step)
        self._pass_stages()

    def wait(self) -> bool:
        events = self.events
        if events is None or events.next_at_s() >= self._steps[0].left_at_s[-1]:
            return True
        self._wait(events.next_at_s() - self._clock.now_s())
        events.deliver()
        return False

    def collect(self) -> StepOutcome:
        step, events = self._steps[0], self.events
        while events is not None and events.next_at_s() < step.left_at_s[-1]:
            if all(each.plan.safepoints is None for each in self._steps):
                break
            self._wait(events.next_at_s() - self._clock.now_s())
            events.deliver()
        self._wait(step.left_at_s[-1] - self._clock.now_s())
        self._steps.popleft()
        self._left_at_s = step.left_at_s
        return self._outcome_of(step)

    def request_stop(self, step: int) -> None:
        for each in self._steps:
            if each.plan.step == step and each.plan.safepoints is not None and not each.is_stopped:
                self._stop(each, each.plan.safepoints)

    def _stop(self, step: _Step, points: Safepoints) -> None:
        """At the next safepoint that comes before ``last``, if one does."""
        now_s, num_layers = self._clock.now_s(), self.info.num_layers
        for stage, entered_at_s in zip(self._stages, step.entered_at_s, strict=True):
            first = max(stage.start, step.first)
            for layer in (*range(first, stage.stop, points.layers_apart)[1:], stage.stop):
                if layer >= min(step.last, num_layers):
                    return
                if layer > first and entered_at_s + (layer - first) * step.layer_s >= now_s:
                    online = tuple(each for each in step.plan.slices if not each.stoppable)
                    if online:
                        step.online_layer_s = step.noise * self._seconds(online) / num_layers
                    step.last, step.is_stopped = layer, True
                    self._pass_stages()
                    return

    def _pass_stages(self) -> None:
        """When each step enters and leaves each stage."""
        in_front = self._left_at_s
        for step in self._steps:
            entered_at_s, left_at_s, at_s = [], [], step.ready_at_s
            for free_at_s, layers in zip(in_front, self._stages, strict=True):
                entered_at_s.append(max(at_s, free_at_s))
                at_s = entered_at_s[-1] + step.seconds(layers)
                left_at_s.append(at_s)
            step.entered_at_s = entered_at_s
            in_front = step.left_at_s = left_at_s

    def _outcome_of(self, step: _Step) -> StepOutcome:
        plan, last = step.plan, step.last
        if last in (0, self.info.num_layers):
            return self._outcome(self._sample(plan.slices))
        online = tuple(scheduled for scheduled in plan.slices if not scheduled.stoppable)
        outcome = self._outcome(self._sample(online))
        outcome = stopped_outcome(outcome, plan, last, self._reached_at_s(step, last))
        self._suspended_at |= dict.fromkeys(outcome.suspended, last)
        return outcome

    def _reached_at_s(self, step: _Step, layer: int) -> float:
        """When it has passed the layers before this one, in the stage of the last of them."""
        (stage,) = (index for index, layers in enumerate(self._stages) if layer - 1 in layers)
        passed = range(self._stages[stage].start, layer)
        return step.entered_at_s[stage] + step.seconds(passed)
