"""One replica of a simulated fleet: an engine and its device on the fleet's clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import SampledToken, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import PriorityLevel, Request, RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.hardware import HardwareProfile
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.engine.messages import TokenOutput
from backfill.execution.executor import ExecutorInfo
from backfill.execution.simulated_pipeline import SimulatedPipeline
from backfill.protocol.replica_state import ReplicaState
from backfill.simulation.device import executor_info
from backfill.simulation.fleet_traffic import NUM_NAMING, answer_token
from backfill.simulation.replay import FILLER

_STEP_WEIGHT = 0.1  # of a new step in the mean that is reported


class FleetClock(VirtualClock):
    """The one clock of all replicas."""

    def move_to(self, at_s: float) -> None:
        """Exactly to an instant that is not before now."""
        self._now_s = max(self._now_s, at_s)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What each replica is. It has no KV pool in host memory.

    Attributes:
        profile: what its engine predicts with.
        slo: of every online request.
    """

    config: SchedulerConfig
    hardware: HardwareProfile
    behaviour: DeviceBehaviour
    profile: CostProfile
    slo: SLO


class ReplicaDevice(SimulatedPipeline):
    """A simulated device whose steps begin and end apart, so that many devices share one clock.

    Between ``submit`` and ``collect`` the clock is moved by others, and ``request_stop`` may be called at any
    instant of it. Sampled tokens are those of ``answer_token``, so that a later prompt can hold them.
    """

    def __init__(self, info: ExecutorInfo, device: DeviceBehaviour, clock: FleetClock, *, seed: int) -> None:
        super().__init__(info, device, clock, seed=seed)
        # Prompt tokens of the requests whose next output token says which request it is of.
        self._naming: dict[RequestId, int] = {}

    @property
    def ends_at_s(self) -> float:
        """When the step that has begun ends, as far as is known."""
        return self._steps[0].left_at_s[-1] if self._steps else math.inf

    def collect(self) -> StepOutcome:
        assert self._clock.now_s() >= self.ends_at_s, "the step has not ended"
        return super().collect()

    def _change_requests(self, plan: StepPlan) -> None:
        super()._change_requests(plan)
        for request_id in plan.released:  # first: a plan may admit again what it releases
            self._naming.pop(request_id, None)
        for admitted in plan.admitted:
            self._naming[admitted.request_id] = len(admitted.prompt_token_ids)

    def _sample(self, slices: tuple[ScheduledSlice, ...]) -> tuple[SampledToken, ...]:
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


class SimulatedReplica:
    """One engine and its device.

    Attributes:
        wakes_at_s: when it next has something to do by itself; inf while it is idle.
        offline_done: offline requests that ended.
    """

    def __init__(self, number: int, spec: ReplicaSpec, clock: FleetClock, seed: int) -> None:
        info = executor_info(spec.hardware, 0)
        self.number = number
        self.name = f"{number:03}"
        self.executor = ReplicaDevice(info, spec.behaviour, clock, seed=seed)
        self.engine = Engine(spec.config, self.executor, clock, spec.profile)
        self.wakes_at_s = math.inf
        self.offline_done = self.num_steps = 0
        self._clock = clock
        self._host_s = spec.behaviour.host_s
        self._slo = spec.slo
        self._max_num_seqs = spec.config.max_num_seqs
        tokens = spec.config.max_num_batched_tokens
        self._prefill_tokens_per_s = tokens / spec.profile.cost.prefill_time_s(tokens, tokens)
        self._began_at_s: float | None = None  # the step that runs
        self._step_s = 0.0

    @property
    def is_running(self) -> bool:
        """A step has begun and not ended."""
        return self._began_at_s is not None

    @property
    def is_idle(self) -> bool:
        return self.wakes_at_s == math.inf

    def begin(self) -> None:
        """Start the next step, or rest until a request comes."""
        if not self.engine.has_work:
            self.wakes_at_s = math.inf
            return
        refusals = self.engine.submit_steps()
        assert not refusals, f"{refusals}"
        self._began_at_s = self._clock.now_s()
        self.wakes_at_s = self.executor.ends_at_s

    def arrive(self, request: Request) -> None:
        """An online request comes, perhaps within a step, which it may stop."""
        self.engine.arrive(request)
        if self.is_running:
            self.wakes_at_s = self.executor.ends_at_s
        elif self.is_idle:
            self.wakes_at_s = self._clock.now_s()

    def end(self) -> list[TokenOutput]:
        """The step has ended. Its outputs are to be delivered after the host's time, when it wakes again."""
        began_at_s, self._began_at_s = self._began_at_s, None
        assert began_at_s is not None, "no step runs"
        outputs = self.engine.collect_step()
        now_s = self._clock.now_s()
        self._step_s += _STEP_WEIGHT * (now_s - began_at_s - self._step_s)
        self.wakes_at_s = now_s + self._host_s
        self.num_steps += 1
        return outputs

    def report(self) -> ReplicaState:
        """What it would say of itself now."""
        requests = self.engine.scheduler.requests
        online = [
            each
            for each in (*requests.running.values(), *requests.restoring.values())
            if each.service_class is ServiceClass.ONLINE
        ]
        for level in (PriorityLevel.ONLINE, PriorityLevel.RELEGATED):
            online += requests.waiting[level].requests
        return ReplicaState(
            instance=self.name,
            phase="ready",
            models=(),
            digest="",
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            max_num_seqs=self._max_num_seqs,
            kv_tokens=self.executor.info.num_blocks * self.executor.info.block_size,
            ttft_slo_s=self._slo.ttft_s,
            step_s=0.0 if self.is_idle else self._step_s,
            waiting_prompt_tokens=sum(
                each.num_pending_tokens for each in online if each.first_token_at_s is None
            ),
            num_online=len(online),
            online_tokens=sum(each.num_tokens for each in online),
        )
