"""A simulated device whose steps begin and end apart, so that many devices share one clock."""

from __future__ import annotations

import math
from collections import deque

from backfill.core.clock import VirtualClock
from backfill.core.plan import SampledToken, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.costs.behaviour import DeviceBehaviour, NoiseSource
from backfill.execution.executor import ExecutorInfo, PipelinedExecutor
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.fleet_traffic import FILLER, NUM_NAMING, answer_token


class SplitExecutor(PipelinedExecutor, SimulatedExecutor):
    """Computes the outcome of a step when it is submitted, and again if the step is stopped.

    Between ``submit`` and ``collect`` the shared clock is moved by others, and ``request_stop`` may be called
    at any instant of it. Sampled tokens are those of ``answer_token``, so that a later prompt can hold them.

    Attributes:
        ends_at_s: when the step that has begun ends, as far as is known.
    """

    info: ExecutorInfo

    def __init__(
        self, info: ExecutorInfo, device: DeviceBehaviour, clock: VirtualClock, *, seed: int = 0
    ) -> None:
        SimulatedExecutor.__init__(self, info, device, clock, seed=seed)
        self.ends_at_s = math.inf
        self._shared = clock
        self._draws = self._noise
        self._plan: StepPlan | None = None
        self._outcome_of_step = StepOutcome(())
        # Prompt tokens of the requests whose next output token says which request it is of.
        self._naming: dict[RequestId, int] = {}

    def run(self, plan: StepPlan) -> StepOutcome:
        return PipelinedExecutor.run(self, plan)

    def submit(self, plan: StepPlan) -> None:
        """Start a step now. The one before has ended."""
        for admitted in plan.admitted:
            self._naming[admitted.request_id] = len(admitted.prompt_token_ids)
        self._plan = plan
        self._began_at_s = self._shared.now_s()
        self._noise = _OneRatio(self._draws.draw()) if plan.slices else self._draws
        if plan.safepoints is not None:
            self._before = tuple(self._copies), self._copying_until_s, self._suspended_at
        self._attempt(plan)

    def request_stop(self, step: int) -> None:
        plan = self._plan
        if plan is None or plan.step != step or plan.safepoints is None:
            return
        copies, self._copying_until_s, self._suspended_at = self._before
        self._copies = deque(copies)
        self.events = _Stop(self, step, self._shared.now_s())
        self._attempt(plan)
        self.events = None

    def collect(self) -> StepOutcome:
        """What the step did; the shared clock is at ``ends_at_s``."""
        assert self._plan is not None and self._shared.now_s() >= self.ends_at_s, "the step has not ended"
        for request_id in self._plan.released:
            self._naming.pop(request_id, None)
        self._plan = None
        self.ends_at_s = math.inf
        return self._outcome_of_step

    def stop_now(self, step: int) -> None:
        SimulatedExecutor.request_stop(self, step)

    def _attempt(self, plan: StepPlan) -> None:
        self._clock = VirtualClock(self._began_at_s)
        self._outcome_of_step = SimulatedExecutor.run(self, plan)
        self.ends_at_s = self._clock.now_s()

    def _sample(self, slices: tuple[ScheduledSlice, ...]) -> tuple[SampledToken, ...]:
        """The same if the step is attempted again."""
        sampled, naming, new_tuple = [], self._naming, tuple.__new__
        for request_id, start, num_tokens, _, samples, _ in slices:
            if not samples:
                continue
            token_id, num_prompt_tokens = FILLER, naming.get(request_id)
            if num_prompt_tokens is not None:
                position = start + num_tokens - num_prompt_tokens
                token_id = answer_token(int(request_id), position)
                if position >= NUM_NAMING:
                    del naming[request_id]
            # As the class itself would make it, in half the time.
            sampled.append(new_tuple(SampledToken, (request_id, token_id, None)))
        return tuple(sampled)


class _OneRatio(NoiseSource):
    """The same ratio whenever it is drawn: a step that is attempted again is as fast as before."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def draw(self) -> float:
        return self._ratio


class _Stop:
    """The event at which a running step is asked to stop."""

    def __init__(self, executor: SplitExecutor, step: int, at_s: float) -> None:
        self._executor, self._step, self._at_s = executor, step, at_s

    def next_at_s(self) -> float:
        return self._at_s

    def deliver(self) -> None:
        self._at_s = math.inf
        self._executor.stop_now(self._step)
