"""The engine: plan, submit, collect, commit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from backfill.core.clock import Clock
from backfill.core.config import SchedulerConfig
from backfill.core.errors import ExecutorDead, RequestError
from backfill.core.plan import Compute, StepOutcome, StepPlan, WeightTransfers, max_in_flight
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.model import CostModel
from backfill.costs.profile import CostProfile
from backfill.engine.messages import ClassStats, EngineStats, StepKind, StepStats, TokenOutput
from backfill.engine.stopping import StepStopper, SubmittedStep
from backfill.execution.executor import Executor, ExecutorInfo
from backfill.kvcache.create import create_kv_cache
from backfill.offloading.residency import ResidencyPolicy, SharedLinkPolicy
from backfill.scheduling.committed import prompt_progress
from backfill.scheduling.objectives import ServerObjectives
from backfill.scheduling.policies.create import PolicyFactory, create_policy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler

if TYPE_CHECKING:  # these import numpy and torch, which the server does not need
    from backfill.bus.member import BusMember
    from backfill.costs.refine import ProfileRefiner
    from backfill.engine.record_check import RecordCheck
    from backfill.execution.grammar_masks import GrammarMasks

logger = logging.getLogger(__name__)

_NO_STEP = StepStats("none", 0, 0.0, 0.0)


class Engine:
    """One scheduler driving one executor. Calls must not overlap, except for ``arrive``.

    Args:
        profile: predicts steps; needed by policies that bound their time.
        refiner: refines the profile; None leaves it as it is.
        policy: makes a policy instead of that of the configuration.
        bus: decides the offloading interval with the other engines on a bus; None without one.
        record_check: compares steps with the performance record; None if no interval was chosen by one.
        grammars: compiles grammars beside the steps; None if the executor does not, or is elsewhere.
        is_disturbed: whether a hypervisor took so much since the last call that a step of so many seconds
            does not show how fast the machine is.
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
        record_check: RecordCheck | None = None,
        grammars: GrammarMasks | None = None,
        is_disturbed: Callable[[float], bool] = lambda _: False,
    ) -> None:
        info = executor.info
        cost = profile.cost if profile is not None else None
        self.executor = executor
        self.profile = profile
        self.grammars = grammars
        self._objectives = ServerObjectives(config, cost)
        self.predictor = None if cost is None else StepPredictor(cost)
        residencies = info.residencies if self.predictor is not None else ()
        max_num_blocks = info.max_num_blocks if residencies else None
        self.scheduler = Scheduler(
            config,
            create_kv_cache(config, info.num_blocks, info.block_size, info.num_host_blocks, max_num_blocks),
            create_policy(config, self.predictor, default_slo=self.default_slo, can_stop=info.num_layers > 1)
            if policy is None
            else policy(config, self.predictor),
            predictor=self.predictor,
            default_slo=self.default_slo,
            block_copy_s=None if profile is None else profile.block_copy_s(info.block_bytes),
            copy_interference=0.0 if profile is None else profile.copy_interference,
            num_layers=info.num_layers,
            end_token_ids=info.end_token_ids,
            residency=_residency(info, bus) if residencies else None,
            max_steps_in_flight=info.max_steps_in_flight,
            stage_layers=info.stage_layers,
        )
        self._stopper = StepStopper(self.scheduler, executor)
        self.num_failed_steps_in_a_row = 0
        self.num_stopped_steps = 0
        self._transfers = WeightTransfers(info.offload_interval)  # until now
        self.scheduling_s = 0.0
        self._clock = clock
        self._refiner = refiner
        self._bus = bus
        self._record_check = record_check
        self._is_disturbed = is_disturbed
        self._is_stalled = False
        self._serves_online = False  # an online request has come; run-batch never has any
        self._arrived: deque[Request] = deque()
        # The oldest first; replaced and not changed, because another thread reads it.
        self._in_flight: tuple[SubmittedStep, ...] = ()
        self._busy_since_s: float | None = None  # the last commit; None if nothing was left to do then
        self._last_step = _NO_STEP

    @property
    def default_slo(self) -> SLO:
        """Objectives of online requests that bring none."""
        return self._objectives.slo

    @property
    def has_work(self) -> bool:
        """A step now would do something. Requests that the policy does not serve do not count."""
        return bool(self._arrived or self._in_flight) or (self.scheduler.has_work and not self._is_stalled)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._arrived) or self.scheduler.has_unfinished

    def add(self, request: Request) -> TokenOutput | None:
        """Queue a request, or return its only output if it can never be served."""
        try:
            self.executor.info.check_request(request.prompt_token_ids, request.sampling)
        except RequestError as error:
            return TokenOutput.failed(request.request_id, str(error))
        self._is_stalled = False
        self._serves_online |= request.service_class is ServiceClass.ONLINE
        self.scheduler.add(request)
        return None

    def arrive(self, request: Request) -> None:
        """Take in a request while steps may be running, and stop one of them if the request gains enough.

        May be called from any thread. The request is queued when the next step is planned, which is now if
        another one may be in flight. It can only stop a step that it arrives in.
        """
        self.scheduler.give_objectives(request)
        self._arrived.append(request)
        try:
            self._maybe_stop()
        except Exception:  # then the request waits for the end of the step
            logger.exception("whether to stop a running step could not be decided")
        self.executor.wake()

    def _maybe_stop(self) -> None:
        self._stopper.maybe_stop(self._in_flight, tuple(self._arrived), self._clock.now_s())

    def admit_arrived(self) -> list[TokenOutput]:
        """Queue the requests that have arrived; returns the outputs of those that can never be served."""
        refusals = [self.add(self._arrived.popleft()) for _ in range(len(self._arrived))]
        return [refusal for refusal in refusals if refusal is not None]

    def check(self) -> None:
        """Raises: ExecutorDead if no step can run any more. Steps raise it, but an engine may be idle."""
        self.executor.check()

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        self._is_stalled = False
        for request_id in request_ids:
            self.scheduler.finish(request_id, FinishReason.ABORT)
        self._leave_bus_if_idle()

    def step(self) -> list[TokenOutput]:
        """Submit steps, as many as may be in flight, then collect and commit the oldest.

        While fewer are in flight, requests that arrive do not wait for its end: another step is submitted.

        If that one failed, it is lost (``Scheduler.fail``); those behind it are collected by later calls.

        Raises: ExecutorDead if no step can run any more.
        """
        outputs = self.submit_steps()
        while self._may_submit and not self.executor.wait():
            outputs += self.submit_steps()
        return outputs + self.collect_step()

    @property
    def _may_submit(self) -> bool:
        plans = (each.plan for each in self._in_flight)
        return len(self._in_flight) < max_in_flight(self.executor.info.max_steps_in_flight, plans)

    def submit_steps(self) -> list[TokenOutput]:
        """Submit steps, as many as may be in flight. Returns: outputs of requests that cannot be served."""
        outputs = self.admit_arrived()
        planning_at = time.perf_counter()
        while self._may_submit and self._submit_next():
            pass
        self.scheduling_s += time.perf_counter() - planning_at
        return outputs

    def collect_step(self) -> list[TokenOutput]:
        """Collect and commit the oldest step in flight."""
        submitted = self._in_flight[0]
        try:
            outcome = self.executor.collect()
        except ExecutorDead:
            raise
        except Exception as error:
            logger.exception("step %d failed", submitted.plan.step)
            self.num_failed_steps_in_a_row += 1
            self._busy_since_s = None
            return self._fail(submitted.plan, error)
        finally:
            self._in_flight = self._in_flight[1:]
            self._leave_bus_if_idle()  # where a step that failed was the last
        ended_at = time.perf_counter()
        outputs = self._commit(submitted, outcome)
        self.scheduling_s += time.perf_counter() - ended_at
        return outputs

    def _submit_next(self) -> bool:
        """Plan a step and submit it. Returns: whether another one may be worth planning."""
        planned_at_s = self._clock.now_s()
        plan = self.scheduler.plan_step(planned_at_s)
        is_alone = not self._in_flight
        if plan.does_nothing and not is_alone:
            return False
        self._is_stalled = plan.does_nothing
        self._stopper.prepare(plan)
        waits_s = 0.0 if is_alone else self.scheduler.in_flight.waits_s(plan)
        submitted = SubmittedStep(
            plan, self._kind_of(plan), planned_at_s, self._clock.now_s(), waits_s, is_alone, self._cost
        )
        on_bus = plan
        if self._bus is not None and plan.slices:
            slo, num_steps = self.default_slo, len(self._in_flight) + 1
            on_bus = self._bus.begin_step(plan, slo.tpot_s, num_steps, has_objective=self._serves_online)
        self.executor.submit(on_bus)
        self._in_flight = (*self._in_flight, submitted)
        if self._arrived:  # while the plan was made; they are not in it
            self._maybe_stop()
        return bool(plan.slices)

    @property
    def _cost(self) -> CostModel | None:
        return None if self.predictor is None else self.predictor.cost

    def _commit(self, submitted: SubmittedStep, outcome: StepOutcome) -> list[TokenOutput]:
        plan, started_at_s, now_s = submitted.plan, submitted.submitted_at_s, self._clock.now_s()
        if plan.slices:  # a step without slices does not show that the device works
            self.num_failed_steps_in_a_row = 0
        transfers = outcome.weight_transfers
        self._transfers = self._transfers.followed_by(transfers)
        if self._bus is not None:
            self._bus.count_copies(transfers.copied_bytes)
        # Of several steps in flight, each is timed from the end of the one before.
        since_s = self.scheduler.in_flight.timed_since_s(plan) if plan.slices else started_at_s
        step_s, took_s = now_s - started_at_s, now_s - max(since_s, started_at_s)
        interval = self.scheduler.in_flight.interval_s(plan)
        is_disturbed = self.predictor is not None and self._is_disturbed(took_s)
        committed = self.scheduler.commit(plan, outcome, now_s, is_disturbed=is_disturbed)
        outputs = [TokenOutput.of(token) for token in committed]
        for request_id, message in outcome.failed:
            self.scheduler.finish(request_id, FinishReason.ERROR)
            outputs.append(TokenOutput.failed(request_id, message))
        stop_latency_s = self._stopper.latency_s(submitted, outcome)
        self.num_stopped_steps += stop_latency_s is not None
        is_whole = isinstance(plan.work, Compute) and not outcome.stopped
        if plan.slices and is_whole and not plan.copies.stalls:
            if self.predictor is not None and interval is not None and submitted.cost is self._cost:
                began_s = submitted.planned_at_s if self._busy_since_s is None else self._busy_since_s
                self.predictor.observe(interval[1], took_s, now_s - began_s, is_disturbed=is_disturbed)
            is_alone = submitted.is_alone and not self._in_flight
            computed_s = max(0.0, took_s - (transfers.stall_s if is_alone else transfers.longest_stall_s))
            if self._bus is not None:
                self._bus.end_step(computed_s, transfers.interval)
            if is_alone and not outcome.prompt_logprobs:  # a plan does not say which rows have logits
                is_profiled = transfers.interval == self.executor.info.offload_interval
                if self._refiner is not None and is_profiled:
                    self._refiner.observe(plan, step_s, is_disturbed=is_disturbed)
                if self._record_check is not None:
                    self._record_check.observe(plan, computed_s, transfers.transfer_s)
        self._busy_since_s = now_s if self.has_work else None
        self._leave_bus_if_idle()
        self._last_step = StepStats(
            submitted.kind,
            plan.num_tokens,
            step_s,
            plan.predicted_s,
            bool(outcome.stopped),
            stop_latency_s,
            prompt_progress=prompt_progress(plan, self.scheduler.requests.by_id),
        )
        return outputs

    def refine_profile(self) -> CostProfile | None:
        """Refit the cost profile if that is due and no online request is there, or if it is overdue.

        Widened default objectives may return then.

        Returns: the profile in use from now on, perhaps with a new error alone; None if neither it nor
            the objectives have changed.
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
        profile = self.profile
        if profile is not None and profile.quality == "refined" and self._objectives.follow(profile.cost):
            self.scheduler.set_default_slo(self.default_slo)
            logger.info(
                "online requests from now on: first token within %.3g s, each next within %.3g s",
                self.default_slo.ttft_s,
                self.default_slo.tpot_s,
            )
            return profile
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
            num_checkpointed_blocks=blocks.checkpointed,
            host_kv_usage_frac=blocks.host_usage_frac,
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
            num_copied_slots=scheduler.kv.checkpointer.num_copied_slots,
            offload_interval=self._transfers.interval or 0,
            num_transferred_weight_bytes=self._transfers.num_bytes,
            weight_stall_s=self._transfers.stall_s,
            bus_wait_s=self._transfers.bus_wait_s,
            bus_share=0.0 if self._bus is None else self._bus.share,
            bus_load=0.0 if self._bus is None else self._bus.load,
            bus_least_step_s=0.0 if self._bus is None else self._bus.least_step_s(),
            device_blocks=blocks.device_by_use,
            host_blocks=blocks.host_by_use,
        )

    def _leave_bus_if_idle(self) -> None:
        if self._bus is not None and not self.has_work:
            self._bus.idle()

    def _kind_of(self, plan: StepPlan) -> StepKind:
        by_id = self.scheduler.requests.by_id
        classes = {by_id[scheduled.request_id].service_class for scheduled in plan.slices}
        if len(classes) > 1:
            return "mixed"
        return "online" if ServiceClass.ONLINE in classes else "offline" if classes else "none"

    def _fail(self, plan: StepPlan, error: Exception) -> list[TokenOutput]:
        message = f"The step failed: {type(error).__name__}."
        lost = tuple(scheduled.request_id for scheduled in plan.slices)
        ended = self.scheduler.fail(plan)
        progress = prompt_progress(plan, self.scheduler.requests.by_id)
        self._last_step = StepStats("none", 0, 0.0, 0.0, failed_request_ids=lost, prompt_progress=progress)
        return [TokenOutput.failed(request.request_id, message, len(lost)) for request in ended]


def _residency(info: ExecutorInfo, bus: BusMember | None) -> ResidencyPolicy:
    choices, layers = info.residencies, info.layers_of_stages
    return ResidencyPolicy(choices, layers) if bus is None else SharedLinkPolicy(choices, layers, bus)
