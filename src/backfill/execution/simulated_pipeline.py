"""A simulated pipeline: its stages compute steps one behind the other on the virtual clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

from backfill.core.clock import VirtualClock
from backfill.core.plan import Compute, Resume, StepOutcome, StepPlan, WaitForCopies
from backfill.costs.behaviour import DeviceBehaviour
from backfill.execution.executor import ExecutorInfo, PipelinedExecutor, stopped_outcome
from backfill.execution.simulated_executor import SimulatedExecutor


@dataclass(slots=True, eq=False)
class _Step:
    """A step in flight.

    Attributes:
        ready_at_s: when it may enter the first stage.
        noise: observed over typical time.
        seconds: in each stage.
        left_at_s: when it leaves each stage.
        first, last: it computes in the stages ``[first, last)``.
        stops_behind: the stage behind which its preemptible slices stop; None: they pass all.
        is_stopped: that was asked for.
    """

    plan: StepPlan
    ready_at_s: float
    noise: float = 1.0
    seconds: list[float] = field(default_factory=list)
    left_at_s: list[float] = field(default_factory=list)
    first: int = 0
    last: int = 0
    stops_behind: int | None = None
    is_stopped: bool = False


class SimulatedPipeline(PipelinedExecutor, SimulatedExecutor):
    """See ``PipelinedExecutor``, ``StoppableExecutor`` and ``SimulatedExecutor``.

    A step spends in each stage the share of its time that the stage has of the layers, and enters a stage
    once it has left the one before and the step in front of it has left this one. What stages send each other
    takes no time. A stopped step's other slices go on behind the stage that it is in, in the time of a step
    of their own.

    Copies begin when the first stage is free for their step, and steps that are submitted while copies are in
    flight are slower for as long as these are. Events are delivered during steps with safepoints, during
    those beside them, and in ``wait``.

    Args:
        info: has ``stage_layers``, and nothing is offloaded.
        seed: of the device's noise.
    """

    info: ExecutorInfo

    def __init__(
        self, info: ExecutorInfo, device: DeviceBehaviour, clock: VirtualClock, *, seed: int = 0
    ) -> None:
        assert sum(info.stage_layers) == info.num_layers, "the stages do not have the model's layers"
        assert info.offload_interval is None, "stages have all their weights"
        SimulatedExecutor.__init__(self, info, device, clock, seed=seed)
        self._ends = tuple(accumulate(info.stage_layers))  # of the stages, in layers
        self._steps: deque[_Step] = deque()
        self._left_at_s = [0.0] * len(info.stage_layers)  # by the last step that was collected

    def run(self, plan: StepPlan) -> StepOutcome:
        return PipelinedExecutor.run(self, plan)

    def submit(self, plan: StepPlan) -> None:
        assert len(self._steps) < self.info.max_steps_in_flight, f"{len(self._steps)} steps are in flight"
        self._release(plan)
        for admitted in plan.admitted:
            self._num_tokens[admitted.request_id] = len(admitted.prompt_token_ids)
        in_front = self._steps[-1].left_at_s if self._steps else self._left_at_s
        begins_at_s = max(self._clock.now_s(), in_front[0])
        step = _Step(plan, self._begin_copies(plan.copies, begins_at_s))
        step.seconds = [0.0] * len(self._ends)
        match plan.work:
            case WaitForCopies():
                assert not self._steps, "a step in flight would wait too"
                step.ready_at_s = max(step.ready_at_s, self._copies[0][0])
            case Resume(num_layers=num_layers):
                layers_done = self._taken_up(plan)
                step.first = self._ends.index(layers_done) + 1
                step.last = self._ends.index(layers_done + num_layers) + 1
            case Compute(slices=()):
                pass
            case Compute():
                step.last = len(self._ends)
        if step.last:
            self._plan_stages(step)
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
        """The slices stop behind the stage that they are in, or wait for: a stage decides when it ends."""
        for each in self._steps:
            if each.plan.step == step and each.plan.safepoints is not None and not each.is_stopped:
                self._stop(each)

    def _plan_stages(self, step: _Step) -> None:
        plan, begins_at_s = step.plan, step.ready_at_s
        step.noise = self._noise.draw()
        seconds = step.noise * self._seconds(plan.slices)
        if plan.safepoints is not None:
            seconds += self._device.safepoint_s * len(self._ends)
        seconds = self._computed_at_s(begins_at_s, seconds) - begins_at_s
        for stage in range(step.first, step.last):
            step.seconds[stage] = seconds * self._share(stage)
        if step.last < len(self._ends):
            step.stops_behind = step.last - 1

    def _share(self, stage: int) -> float:
        return self.info.stage_layers[stage] / self.info.num_layers

    def _stop(self, step: _Step) -> None:
        now_s, stage = self._clock.now_s(), step.first
        while stage < step.last - 1 and step.left_at_s[stage] <= now_s:
            stage += 1
        if stage >= step.last - 1:
            return
        step.stops_behind, step.is_stopped = stage, True
        online = tuple(scheduled for scheduled in step.plan.slices if not scheduled.preemptible)
        seconds = step.noise * self._seconds(online) if online else 0.0
        for behind in range(stage + 1, len(self._ends)):
            step.seconds[behind] = seconds * self._share(behind)
        self._pass_stages()

    def _pass_stages(self) -> None:
        """When each step leaves each stage."""
        in_front = self._left_at_s
        for step in self._steps:
            left_at_s, at_s = [], step.ready_at_s
            for free_at_s, seconds in zip(in_front, step.seconds, strict=True):
                at_s = max(at_s, free_at_s) + seconds
                left_at_s.append(at_s)
            in_front = step.left_at_s = left_at_s

    def _outcome_of(self, step: _Step) -> StepOutcome:
        plan, behind = step.plan, step.stops_behind
        if behind is None:
            return self._outcome(self._sample(plan.slices))
        online = tuple(scheduled for scheduled in plan.slices if not scheduled.preemptible)
        outcome = self._outcome(self._sample(online))
        outcome = stopped_outcome(outcome, plan, self._ends[behind], step.left_at_s[behind])
        self._suspended_at |= dict.fromkeys(outcome.suspended, self._ends[behind])
        return outcome
