"""An executor without a device: charges a virtual clock what a step would take."""

from __future__ import annotations

import math
from typing import Protocol

from backfill.core.clock import VirtualClock
from backfill.core.plan import SampledToken, StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.execution.executor import ExecutorInfo

_SAMPLED_TOKEN = 5  # any id that ends no output; lengths come from each request's max_tokens


class StepEvents(Protocol):
    """What happens while a step runs."""

    def next_at_s(self) -> float:
        """Instant of the next event, inf if there is none."""
        ...

    def deliver(self) -> None:
        """Let all events happen that are due at the clock's present time."""
        ...


class NoEvents:
    def next_at_s(self) -> float:
        return math.inf

    def deliver(self) -> None:
        pass


class SimulatedExecutor:
    """Runs a plan by advancing the clock by its predicted time.

    Events that fall into the step are delivered at their instants; one of them may call ``request_stop``,
    and a preemptible step then ends at its next safepoint, spaced evenly over the step.

    Args:
        num_safepoints: of a preemptible step; 0, with ``info.stop_s`` None, where none can be stopped.
    """

    def __init__(
        self, info: ExecutorInfo, cost: CostModel, clock: VirtualClock, *, num_safepoints: int = 0
    ) -> None:
        assert (info.stop_s is None) == (num_safepoints == 0)
        self.info = info
        self.events: StepEvents = NoEvents()
        self.busy_s = 0.0
        self._cost = cost
        self._clock = clock
        self._num_safepoints = num_safepoints
        self._stop_requested = False
        self._num_tokens: dict[RequestId, int] = {}

    def run(self, plan: StepPlan) -> StepOutcome:
        for request_id in plan.released:
            self._num_tokens.pop(request_id, None)
        for admitted in plan.admitted:
            self._num_tokens[admitted.request_id] = len(admitted.prompt_token_ids)
        if not plan.slices:
            return StepOutcome(())
        started_at_s = self._clock.now_s()
        step_s = self._cost.step_time_s(StepLoad.of_plan(plan))
        ends_at_s = self._advance(plan, started_at_s, started_at_s + step_s)
        self.busy_s += ends_at_s - started_at_s
        if ends_at_s < started_at_s + step_s:
            return StepOutcome((), aborted=True)
        sampled = []
        for piece in plan.slices:
            if piece.samples:
                self._num_tokens[piece.request_id] += 1
                sampled.append(SampledToken(piece.request_id, _SAMPLED_TOKEN))
        return StepOutcome(tuple(sampled))

    def request_stop(self) -> None:
        self._stop_requested = True

    def _advance(self, plan: StepPlan, started_at_s: float, ends_at_s: float) -> float:
        """Move the clock through the step and its events; returns where it ended."""
        self._stop_requested = False
        while plan.preemptible and self._num_safepoints and self.events.next_at_s() < ends_at_s:
            self._clock.advance(max(0.0, self.events.next_at_s() - self._clock.now_s()))
            self.events.deliver()
            if self._stop_requested:
                interval_s = (ends_at_s - started_at_s) / (self._num_safepoints + 1)
                passed = math.floor((self._clock.now_s() - started_at_s) / interval_s)
                ends_at_s = min(ends_at_s, started_at_s + (passed + 1) * interval_s)
                break
        self._clock.advance(max(0.0, ends_at_s - self._clock.now_s()))
        return ends_at_s
