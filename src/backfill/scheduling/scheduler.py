"""Continuous batching with chunked prefill: plans one step, then commits its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.core.plan import Resume, SampledToken, StepOutcome, StepPlan
from backfill.core.request import FinishReason, PriorityLevel, Request, RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.kvcache.manager import KVCacheManager
from backfill.offloading.residency import ResidencyPolicy
from backfill.scheduling.committed import CommittedToken, PromptScores
from backfill.scheduling.giving_way import GivingWay
from backfill.scheduling.in_flight import StepsInFlight
from backfill.scheduling.memory_division import MemoryDivision
from backfill.scheduling.planner import StepPlanner
from backfill.scheduling.policy import Policy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.preemption import Preemption
from backfill.scheduling.queues import LevelRule, UnfinishedRequests
from backfill.scheduling.suspension import Suspension


class Scheduler:
    """Takes requests in, plans their steps (``StepPlanner``), commits the outcomes, and ends requests.

    It never touches a tensor.

    Args:
        end_token_ids: tokens that end any output unless it ignores them.
        predictor: predicts steps for policies that bound their time; None for policies that do not.
        default_slo: of online requests that bring none.
        block_copy_s: seconds that a copy of one block between device and host takes; None if not known.
        copy_interference: seconds by which a step becomes longer for each second of copying beside it.
        num_layers: of the model; between two of them a step can stop.
        residency: divides device memory between weights and KV; None where that does not change.
        max_steps_in_flight: plans that may be made before the outcome of the first is committed, without some
            that resume (``max_in_flight``).
        stage_layers: layers of each stage of a pipeline; empty for one stage.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        policy: Policy,
        *,
        predictor: StepPredictor | None = None,
        default_slo: SLO | None = None,
        block_copy_s: float | None = None,
        copy_interference: float = 0.0,
        num_layers: int = 1,
        end_token_ids: Collection[int] = (),
        residency: ResidencyPolicy | None = None,
        max_steps_in_flight: int = 1,
        stage_layers: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.kv = kv
        self.policy = policy
        self.predictor = predictor
        self.requests = _no_requests(config, kv, policy, predictor)
        self.counters: Mapping[ServiceClass, ClassCounters] = kv.counters
        self._default_slo = default_slo
        self._end_token_ids = frozenset(end_token_ids)
        self.prompt_scores = PromptScores()
        self._suspension = Suspension(
            config,
            predictor if policy.stops_steps and num_layers > 1 else None,
            num_layers,
            self._count_discarded,
            policy.stops_online_steps,
        )
        self.in_flight = StepsInFlight(
            max_steps_in_flight,
            stage_layers,
            lambda: 1.0 if predictor is None else predictor.time_scale,
        )
        self._preemption = Preemption(
            policy, self.requests, kv, self._suspension, self.counters, self.in_flight
        )
        self._division = None if residency is None else self._divide(residency, block_copy_s)
        self._planner = StepPlanner(
            config,
            kv,
            policy,
            self.requests,
            self._suspension,
            self._preemption,
            predictor=predictor,
            block_copy_s=block_copy_s,
            copy_interference=copy_interference,
            division=self._division,
            in_flight=self.in_flight,
        )

    def _divide(self, residency: ResidencyPolicy, block_copy_s: float | None) -> MemoryDivision:
        assert self.predictor is not None, "residency is chosen by predicted steps"
        return MemoryDivision(
            residency,
            self.config,
            self.kv,
            self.requests,
            self._suspension,
            self._preemption,
            self.predictor,
            block_copy_s,
            self.in_flight,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests.by_id)

    @property
    def giving(self) -> GivingWay:
        return self._planner.giving

    @property
    def has_work(self) -> bool:
        """A step is due: for unfinished requests, for a release, or for copies in flight."""
        return bool(self.requests.by_id or self._planner.has_releases or self.kv.num_copies_in_flight)

    def count_by_class(self) -> dict[ServiceClass, tuple[int, int]]:
        """(running, waiting) requests of each class; restoring requests count as running."""
        running = Counter(request.service_class for request in self._preemption.block_holders)
        waiting = {level: len(queue) for level, queue in self.requests.waiting.items()}
        return {
            ServiceClass.ONLINE: (
                running[ServiceClass.ONLINE],
                waiting[PriorityLevel.ONLINE] + waiting[PriorityLevel.RELEGATED],
            ),
            ServiceClass.OFFLINE: (
                running[ServiceClass.OFFLINE],
                waiting[PriorityLevel.OFFLINE] + waiting[PriorityLevel.PROMOTED],
            ),
        }

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits the pool alone."""
        max_tokens = request.num_prompt_tokens + request.max_tokens
        assert self.kv.blocks_for(max_tokens) <= self.kv.num_blocks, (
            f"{request.request_id}: {max_tokens} tokens cannot fit {self.kv.num_blocks} blocks"
        )
        self.give_objectives(request)
        self.requests.add(request)

    def give_objectives(self, request: Request) -> None:
        """Give an online request without objectives the default ones."""
        if request.slo is None and request.service_class is ServiceClass.ONLINE:
            request.slo = self._default_slo

    def set_default_slo(self, slo: SLO) -> None:
        """Of requests that are given objectives from now on."""
        self._default_slo = slo
        self.policy.set_default_slo(slo)

    def finish(self, request_id: RequestId, reason: FinishReason) -> Request | None:
        """End a request from outside (abort, error). None if it has ended already or never existed.

        A request in flight ends when its last step commits, and has no token of it.
        """
        request = self.requests.by_id.get(request_id)
        if request_id in self.in_flight.slices:
            self.in_flight.end(request_id, reason)
        elif request is not None:
            self._end(request, reason)
        return request

    def plan_step(self, now_s: float) -> StepPlan:
        """Choose what the next step computes; a plan without slices means there is nothing to compute.

        Every plan is committed, or has failed, in the order of the plans, except that one that does nothing
        need not be. At most ``max_in_flight`` are not committed yet.
        """
        plan = self._planner.plan(now_s)
        if not plan.does_nothing:
            layers_done = self._suspension.layers_resumed if isinstance(plan.work, Resume) else 0
            self.in_flight.add(plan, now_s, self.requests.by_id, layers_done)
        return plan

    def commit(
        self, plan: StepPlan, outcome: StepOutcome, now_s: float, *, is_disturbed: bool = False
    ) -> list[CommittedToken]:
        """Enter the outcome of ``plan`` into the requests. Requests of stopped slices stay as they were.

        Args: is_disturbed: a hypervisor took a part of the time since the last commit.
        """
        if plan.slices:
            self.giving.end(plan, self.requests.by_id, now_s - self.in_flight.timed_since_s(plan))
        self.in_flight.remove(plan, now_s, was_stopped=bool(outcome.stopped))
        self.kv.complete((*outcome.completed_copies, *outcome.completed_slot_copies))
        self._suspension.commit(plan, outcome)
        if self._division is not None:
            self._division.observe(outcome.weight_transfers)
        lost = self.in_flight.lost.copy()
        self._commit_computed(plan, lost.union(outcome.stopped))
        self._end_aborted(plan)
        for request_id in lost - self.in_flight.slices.keys():
            if request_id in self.requests.by_id:  # it was not aborted
                self._run_once_more(self.requests.by_id[request_id])
        if outcome.prompt_logprobs:
            self.prompt_scores.add(outcome.prompt_logprobs, self.requests.by_id, lost)
        return self._commit_sampled(outcome, lost, now_s, is_disturbed)

    def fail(self, plan: StepPlan) -> list[Request]:
        """The executor raised in ``plan``: nothing it computed counts.

        Requests of the step without output tokens are preempted to run once more; the others end with ERROR.
        The executor may or may not have admitted requests before it raised. So those that run once more are
        released and admitted again, which gives the executor their prompts alone: a request with output
        tokens cannot run again. What earlier steps computed of them stays in the cache.

        Steps that are in flight behind it are committed as ever. If one has a later chunk of a request, that
        one runs once more when it has committed.

        Returns: the requests that ended.
        """
        self.in_flight.remove(plan, None)
        self._suspension.fail(plan)
        self._end_aborted(plan)
        ended, by_id = [], self.requests.by_id
        for scheduled in plan.slices:
            request = by_id.get(scheduled.request_id)
            if request is None:
                continue
            if request.request_id in self.in_flight.slices:
                self.in_flight.lose(request.request_id)
            elif request.output_token_ids or request.was_retried:
                self._end(request, FinishReason.ERROR)
                ended.append(request)
            else:
                self._run_once_more(request)
        return ended

    def _run_once_more(self, request: Request) -> None:
        request.was_retried = True
        self._planner.release(request.request_id)
        self._preemption.preempt_without_kv(request)

    def _commit_computed(self, plan: StepPlan, stopped: Collection[RequestId]) -> None:
        """Count the tokens that the plan's slices computed, except those of stopped slices."""
        block_size = self.kv.block_size
        by_id, counters_of, commit = self.requests.by_id, self.counters, self.kv.commit
        online, num_online, num_offline = ServiceClass.ONLINE, 0, 0
        for request_id, start, num_tokens, _, _, _ in plan.slices:
            if request_id in stopped:
                continue
            request = by_id[request_id]
            if request.service_class is online:
                num_online += num_tokens
            else:
                num_offline += num_tokens
            end = start + num_tokens
            request.num_computed_tokens = max(end, request.num_computed_tokens)  # a later chunk is in flight
            if end // block_size > start // block_size:
                commit(request, end)
            known = request.num_ever_computed_tokens
            if start < known:
                counters_of[request.service_class].num_recomputed_tokens += min(known, end) - start
            if end > known:
                request.num_ever_computed_tokens = end
        counters_of[online].num_computed_tokens += num_online
        counters_of[ServiceClass.OFFLINE].num_computed_tokens += num_offline

    def _commit_sampled(
        self, outcome: StepOutcome, lost: Collection[RequestId], now_s: float, is_disturbed: bool
    ) -> list[CommittedToken]:
        """Give each request its token, and end those that are done.

        Args: lost: requests of which an earlier chunk has failed.

        The predictor learns how many online requests that are in time have kept their gap.
        """
        by_id, predictor = self.requests.by_id, self.predictor
        online = PriorityLevel.ONLINE
        num_gaps = num_kept = 0
        committed = []
        for sampled in outcome.sampled:
            request_id = sampled.request_id
            request = by_id.get(request_id)
            if request is None or request_id in lost:
                continue  # it was aborted while its step ran, or an earlier chunk has failed
            last_at_s, request.last_token_at_s = request.last_token_at_s, now_s
            if last_at_s is None:
                request.first_token_at_s = now_s
            elif request.priority_level is online and predictor is not None and request.slo is not None:
                num_gaps += 1
                num_kept += predictor.keeps(now_s - last_at_s, request.slo.tpot_s)
            committed.append(self._append(request, sampled))
        for request_id, token_ids in outcome.forced:
            request = by_id.get(request_id)
            if request is None or request_id in lost:
                continue  # as above, or the sampled token has ended it
            for token_id in token_ids:
                committed.append(self._append(request, SampledToken(request_id, token_id)))
                if request.finish_reason is not None:
                    break
        if predictor is not None:
            predictor.observe_gaps(num_kept, num_gaps, is_disturbed=is_disturbed)
        return committed

    def _append(self, request: Request, sampled: SampledToken) -> CommittedToken:
        """Give the request a token, and end it if that is the last one."""
        token_id = sampled.token_id
        request.append(token_id)
        number, stop_token_id = len(request.output_token_ids), None
        prompt_logprobs = self.prompt_scores.take(request.request_id) if number == 1 else None
        if (
            number >= request.max_tokens
            or token_id in self._end_token_ids
            or token_id in (request.sampling.stop_token_ids or ())
        ):
            reason, stop_token_id = self._finish_reason(request, token_id)
            if reason is not None:
                self._end(request, reason)
        # As the class itself would make it, in half the time.
        fields = (request, sampled, number, stop_token_id, request.finish_reason, prompt_logprobs)
        return tuple.__new__(CommittedToken, fields)

    def _count_discarded(self, request_id: RequestId, num_tokens: float) -> None:
        self.counters[self.requests.by_id[request_id].service_class].num_discarded_tokens += num_tokens

    def _end_aborted(self, plan: StepPlan) -> None:
        """End the requests of the plan that were aborted while it was in flight."""
        if self.in_flight.ending:
            for scheduled in plan.slices:
                if scheduled.request_id in self.in_flight.slices:
                    continue  # with a later chunk
                reason = self.in_flight.ending.pop(scheduled.request_id, None)
                if reason is not None:
                    self._end(self.requests.by_id[scheduled.request_id], reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request_id = request.request_id
        self.in_flight.forget(request_id)
        self._suspension.discard(request_id)
        self.prompt_scores.take(request_id)
        self.kv.free(request)
        self.requests.remove(request)
        self._planner.release(request_id)
        request.finish(reason)

    def _finish_reason(self, request: Request, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Why the request's output ends with this token, and the requested stop token that ended it."""
        sampling = request.sampling
        if len(request.output_token_ids) >= sampling.min_tokens:
            if token_id in (sampling.stop_token_ids or ()):
                return FinishReason.STOP, token_id
            if not sampling.ignore_eos and token_id in self._end_token_ids:
                return FinishReason.STOP, None
        if len(request.output_token_ids) >= request.max_tokens:
            return FinishReason.LENGTH, None
        return None, None


def _no_requests(
    config: SchedulerConfig, kv: KVCacheManager, policy: Policy, predictor: StepPredictor | None
) -> UnfinishedRequests:
    """Queues without requests, ordered and changed by what the policy asks for."""
    rule = LevelRule(
        config.promote_before if policy.promotes else 0.0,
        policy.relegates,
        predictor,
        config.max_chunk_tokens,
    )
    return UnfinishedRequests(
        rule, lambda request: kv.match(request).num_tokens, orders_by_deadline=policy.orders_by_deadline
    )
