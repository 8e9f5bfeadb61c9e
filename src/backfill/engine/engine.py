"""The engine: plan, run, commit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, cast

from backfill.core.clock import Clock
from backfill.core.config import SchedulerConfig
from backfill.core.errors import RequestError
from backfill.core.plan import Compute, Resume, Safepoints, StepOutcome, StepPlan
from backfill.core.request import FinishReason, PriorityLevel, Request, RequestId, ServiceClass
from backfill.costs.load import StepLoad
from backfill.costs.profile import CostProfile
from backfill.engine.messages import ClassStats, EngineStats, StepKind, StepStats, TokenOutput
from backfill.execution.executor import Executor, StoppableExecutor
from backfill.kvcache.create import create_kv_cache
from backfill.offloading.residency import ResidencyPolicy
from backfill.scheduling.arrival import ArrivedPrompt, RunningStep, online_load, should_stop
from backfill.scheduling.objectives import server_slo
from backfill.scheduling.policies.create import PolicyFactory, create_policy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import CommittedToken, Scheduler

if TYPE_CHECKING:  # these import numpy and torch, which the server does not need
    from backfill.costs.refine import ProfileRefiner
    from backfill.engine.bus import BusMember

logger = logging.getLogger(__name__)

_NO_STEP = StepStats("none", 0, 0.0, 0.0)


class BegunStep(NamedTuple):
    """A step that was planned and has not been committed."""

    plan: StepPlan
    kind: StepKind
    planned_at_s: float
    started_at_s: float


class Engine:
    """One scheduler driving one executor. Calls must not overlap, except for ``arrive``.

    Args:
        profile: predicts steps; needed by policies that bound their time.
        refiner: refines the profile; None leaves it as it is.
        policy: makes a policy instead of that of the configuration.
        bus: decides the offloading interval with the other engines on a bus; None without one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        executor: Executor,
        clock: Clock,
        profile: CostProfile | None = None,
        refiner: ProfileRefiner | None = None,
        *,
        policy: PolicyFactory | None = None,
        bus: BusMember | None = None,
    ) -> None:
        info = executor.info
        cost = profile.cost if profile is not None else None
        self.executor = executor
        self.profile = profile
        self.default_slo = server_slo(config, cost)
        self.predictor = None if cost is None else StepPredictor(cost)
        residencies = info.residencies if self.predictor is not None else ()
        max_num_blocks = info.max_num_blocks if residencies else None
        self.scheduler = Scheduler(
            config,
            create_kv_cache(config, info.num_blocks, info.block_size, info.num_host_blocks, max_num_blocks),
            create_policy(config, self.predictor, default_slo=self.default_slo, can_stop=info.can_stop)
            if policy is None
            else policy(config, self.predictor),
            predictor=self.predictor,
            default_slo=self.default_slo,
            block_copy_s=None if profile is None else profile.block_copy_s(info.block_bytes),
            copy_interference=0.0 if profile is None else profile.copy_interference,
            num_layers=info.num_layers if info.can_stop else None,
            end_token_ids=info.end_token_ids,
            residency=ResidencyPolicy(residencies, info.num_layers) if residencies else None,
        )
        self.num_failed_steps_in_a_row = 0
        self.num_stopped_steps = 0
        self._offload_interval = info.offload_interval or 0
        self._num_transferred_weight_bytes = 0
        self._weight_stall_s = 0.0
        self.scheduling_s = 0.0
        self._clock = clock
        self._refiner = refiner
        self._bus = bus
        self._is_stalled = False
        self._arrived: deque[Request] = deque()
        self._running_plan: StepPlan | None = None
        self._online_load = StepLoad()  # of the step after the running one, without those that arrive
        self._step_started_at_s = 0.0
        self._busy_since_s: float | None = None  # the last commit; None if nothing was left to do then
        self._stop_request: tuple[int, float] | None = None  # which step to stop, and when that was asked
        self._last_step = _NO_STEP

    @property
    def has_work(self) -> bool:
        """A step now would do something. Requests that the policy does not serve do not count."""
        return bool(self._arrived) or (self.scheduler.has_work and not self._is_stalled)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._arrived) or self.scheduler.has_unfinished

    def add(self, request: Request) -> TokenOutput | None:
        """Queue a request, or return its only output if it can never be served."""
        try:
            self.executor.info.check_request(request.prompt_token_ids, request.sampling)
        except RequestError as error:
            return TokenOutput(request.request_id, None, finish_reason=FinishReason.ERROR, message=str(error))
        self._is_stalled = False
        self.scheduler.add(request)
        return None

    def arrive(self, request: Request) -> None:
        """Take in a request while a step may be running, and stop that step if the request gains enough.

        May be called from any thread. The request is queued when the next step is planned. It can only stop
        the step that it arrives in.
        """
        self.scheduler.give_objectives(request)
        self._arrived.append(request)
        try:
            self._maybe_stop_step()
        except Exception:  # then the request waits for the end of the step
            logger.exception("whether to stop the running step could not be decided")

    def _maybe_stop_step(self) -> None:
        """Stop the running step if the requests that arrived during it gain enough (``should_stop``)."""
        plan, predictor = self._running_plan, self.predictor
        if plan is None or plan.safepoints is None or self._stop_requested_at_s(plan) is not None:
            return
        assert predictor is not None
        arrived = [
            ArrivedPrompt(each.num_pending_tokens, each.next_token_by_s)
            for each in tuple(self._arrived)
            if each.service_class is ServiceClass.ONLINE
        ]
        now_s = self._clock.now_s()
        step = self._running_step(plan, plan.safepoints, predictor)
        cost, scale = predictor.cost, predictor.time_scale
        if should_stop(step, arrived, self._online_load, now_s, cost, scale):
            self._stop_request = plan.step, now_s
            cast(StoppableExecutor, self.executor).request_stop(plan.step)

    def admit_arrived(self) -> list[TokenOutput]:
        """Queue the requests that have arrived; returns the outputs of those that can never be served."""
        refusals = [self.add(self._arrived.popleft()) for _ in range(len(self._arrived))]
        return [refusal for refusal in refusals if refusal is not None]

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        self._is_stalled = False
        for request_id in request_ids:
            self.scheduler.finish(request_id, FinishReason.ABORT)
        self._leave_bus_if_idle()

    def step(self) -> list[TokenOutput]:
        """Plan a step, run it, commit it. If the executor raises, the step is lost (``Scheduler.fail``)."""
        outputs = self.admit_arrived()
        begun = self.begin_step()
        plan = begun.plan
        try:
            if self._bus is not None and plan.slices:
                self._bus.begin_step(self.default_slo.tpot_s)
            outcome = self.executor.run(plan)
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            self.num_failed_steps_in_a_row += 1
            self._busy_since_s = None
            return outputs + self._fail(plan, error)
        finally:
            self._running_plan = None
        return outputs + self.end_step(begun, outcome)

    def begin_step(self) -> BegunStep:
        """Plan a step that the executor is about to run. Requests that arrive from now on may stop it."""
        planned_at_s = self._clock.now_s()
        planning_at = time.perf_counter()
        plan = self.scheduler.plan_step(planned_at_s)
        self._is_stalled = plan.does_nothing
        started_at_s = self._step_started_at_s = self._clock.now_s()
        if plan.safepoints is not None and not plan.safepoints.suspends:
            # Here, and not when a request arrives: that is in another thread.
            self._online_load = self._online_load_after(plan)
        kind = self._kind_of(plan)
        self._running_plan = plan
        if self._arrived:  # while the plan was made; they are not in it
            self._maybe_stop_step()
        self.scheduling_s += time.perf_counter() - planning_at
        return BegunStep(plan, kind, planned_at_s, started_at_s)

    def end_step(self, begun: BegunStep, outcome: StepOutcome) -> list[TokenOutput]:
        """Commit what the executor made of the step."""
        self._running_plan = None
        plan, started_at_s = begun.plan, begun.started_at_s
        if plan.slices:  # a step without slices does not show that the device works
            self.num_failed_steps_in_a_row = 0
        ended_at, now_s = time.perf_counter(), self._clock.now_s()
        transfers = outcome.weight_transfers
        self._offload_interval = transfers.interval or 0
        self._num_transferred_weight_bytes += transfers.num_bytes
        self._weight_stall_s += transfers.stall_s
        outputs = [_token_output(token) for token in self.scheduler.commit(plan, outcome, now_s)]
        stop_latency_s = self._stop_latency_s(plan, outcome)
        if stop_latency_s is not None:
            self.num_stopped_steps += 1
        is_whole = isinstance(plan.work, Compute) and not outcome.stopped
        if plan.slices and is_whole and not plan.copies.stalls:
            if self.predictor is not None:
                began_s = begun.planned_at_s if self._busy_since_s is None else self._busy_since_s
                self.predictor.observe(plan.predicted_s, now_s - started_at_s, now_s - began_s)
            is_profiled = transfers.interval == self.executor.info.offload_interval
            if self._refiner is not None and is_profiled:
                self._refiner.observe(plan, now_s - started_at_s)
            if self._bus is not None:
                self._bus.end_step(max(0.0, now_s - started_at_s - transfers.stall_s))
        self._busy_since_s = now_s if self.has_work else None
        self._leave_bus_if_idle()
        self._last_step = StepStats(
            begun.kind,
            plan.num_tokens,
            now_s - started_at_s,
            plan.predicted_s,
            bool(outcome.stopped),
            stop_latency_s,
        )
        self.scheduling_s += time.perf_counter() - ended_at
        return outputs

    def refine_profile(self) -> CostProfile | None:
        """Refit the cost profile if that is due and no online request is there, or if it is overdue.

        Returns: the profile in use from now on, perhaps with a new error alone; None if nothing changed.
        """
        refiner = self._refiner
        if refiner is None or not refiner.is_due:
            return None
        if (self._arrived or self.scheduler.requests.num_online) and not refiner.is_overdue:
            return None
        try:
            refined = refiner.refine()
        except Exception:  # the present profile stays in use
            logger.exception("the cost profile cannot be refined and stays as it is")
            self._refiner = None
            return None
        if refined is not None:
            self.profile = refined
            if self.predictor is not None and refined.cost != self.predictor.measured:
                self.predictor.set_cost_model(refined.cost)
        return refined

    def stats(self) -> EngineStats:
        """State and totals now, and the step since the last call."""
        scheduler = self.scheduler
        counts, blocks = scheduler.count_by_class(), scheduler.kv.counts
        classes = {each: ClassStats(*counts[each], scheduler.counters[each].copy()) for each in ServiceClass}
        step, self._last_step = self._last_step, _NO_STEP
        sharing = scheduler.kv.sharing
        return EngineStats(
            online=classes[ServiceClass.ONLINE],
            offline=classes[ServiceClass.OFFLINE],
            kv_usage_frac=min(1.0, blocks.referenced / scheduler.kv.num_blocks),
            num_checkpointed_blocks=scheduler.kv.num_checkpointed_blocks,
            host_kv_usage_frac=scheduler.kv.host_usage_frac,
            num_stopped_steps=self.num_stopped_steps,
            step=step,
            num_empty_blocks=blocks.empty,
            num_cached_blocks=blocks.cached,
            num_cached_copied_blocks=blocks.cached_with_copy,
            num_referenced_blocks=blocks.referenced,
            num_blocks=scheduler.kv.num_blocks,
            num_draining_blocks=scheduler.kv.resizing.num_draining,
            num_protected_blocks=blocks.protected,
            num_shared_blocks=sharing.num_shared,
            num_paired_blocks=sharing.num_paired,
            num_entered_blocks=sharing.num_entered,
            num_overwritten_slots=sharing.num_overwritten,
            num_copied_slots=sharing.num_copied,
            offload_interval=self._offload_interval,
            num_transferred_weight_bytes=self._num_transferred_weight_bytes,
            weight_stall_s=self._weight_stall_s,
            bus_wait_s=0.0 if self._bus is None else self._bus.wait_s,
            bus_share=0.0 if self._bus is None else self._bus.share,
            bus_load=0.0 if self._bus is None else self._bus.load,
        )

    def _leave_bus_if_idle(self) -> None:
        if self._bus is not None and not self.has_work:
            self._bus.idle()

    def _stop_requested_at_s(self, plan: StepPlan) -> float | None:
        request = self._stop_request
        return request[1] if request is not None and request[0] == plan.step else None

    def _stop_latency_s(self, plan: StepPlan, outcome: StepOutcome) -> float | None:
        """From the stop request to its safepoint; None where nothing was stopped, or not by a request."""
        requested_at_s, stopped_at_s = self._stop_requested_at_s(plan), outcome.stopped_at_s
        if requested_at_s is None or stopped_at_s is None or stopped_at_s < requested_at_s:
            return None
        return stopped_at_s - requested_at_s

    def _online_load_after(self, plan: StepPlan) -> StepLoad:
        requests = self.scheduler.requests
        held = (*requests.running.values(), *requests.restoring.values())
        online = [each for each in held if each.priority_level is PriorityLevel.ONLINE]
        return online_load(online, requests.waiting[PriorityLevel.ONLINE].requests, plan.slices)

    def _running_step(self, plan: StepPlan, points: Safepoints, predictor: StepPredictor) -> RunningStep:
        online = StepLoad.of_slices(each for each in plan.slices if not each.preemptible)
        num_layers = plan.work.num_layers if isinstance(plan.work, Resume) else self.executor.info.num_layers
        scale = predictor.time_scale
        return RunningStep(
            started_at_s=self._step_started_at_s,
            predicted_s=scale * plan.predicted_s,
            online_s=scale * predictor.cost.step_time_s(online),
            stop_s=scale * points.layers_apart * plan.predicted_s / num_layers,
            suspends=points.suspends,
        )

    def _kind_of(self, plan: StepPlan) -> StepKind:
        by_id = self.scheduler.requests.by_id
        classes = {by_id[scheduled.request_id].service_class for scheduled in plan.slices}
        if not classes:
            return "none"
        if len(classes) > 1:
            return "mixed"
        return "online" if ServiceClass.ONLINE in classes else "offline"

    def _fail(self, plan: StepPlan, error: Exception) -> list[TokenOutput]:
        message = f"The step failed: {type(error).__name__}."
        request_ids = tuple(scheduled.request_id for scheduled in plan.slices)
        self._last_step = StepStats("none", 0, 0.0, 0.0, failed_request_ids=request_ids)
        return [
            TokenOutput(
                request.request_id,
                None,
                finish_reason=FinishReason.ERROR,
                message=message,
                num_lost=len(plan.slices),
            )
            for request in self.scheduler.fail(plan)
        ]


def _token_output(committed: CommittedToken) -> TokenOutput:
    request, sampled = committed.request, committed.sampled
    is_first = len(request.output_token_ids) == 1
    if request.finish_reason is None and not is_first:
        return TokenOutput(request.request_id, sampled.token_id, sampled.logprobs)
    return TokenOutput(
        request.request_id,
        sampled.token_id,
        sampled.logprobs,
        finish_reason=request.finish_reason,
        stop_token_id=committed.stop_token_id,
        first_scheduled_at_s=request.first_scheduled_at_s,
        num_preemptions=request.num_preemptions,
        num_cached_tokens=request.num_cached_tokens,
    )
