"""The engine: plan, run, commit."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from backfill.core.clock import Clock
from backfill.core.config import SchedulerConfig
from backfill.core.errors import RequestError
from backfill.core.plan import StepPlan
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass
from backfill.engine.messages import ClassStats, EngineStats, TokenOutput
from backfill.execution.executor import Executor
from backfill.kvcache.block_manager import BlockManager
from backfill.scheduling.scheduler import CommittedToken, Scheduler

logger = logging.getLogger(__name__)


class Engine:
    """One scheduler driving one executor. Single-threaded: calls may not overlap."""

    def __init__(self, config: SchedulerConfig, executor: Executor, clock: Clock) -> None:
        info = executor.info
        self.executor = executor
        self.scheduler = Scheduler(
            config, BlockManager(info.num_blocks, info.block_size), end_token_ids=info.end_token_ids
        )
        self.num_failed_steps_in_a_row = 0
        self._clock = clock
        self._last_step_s = 0.0
        self._last_step_tokens = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> TokenOutput | None:
        """Queue a request, or return its only output if it can never be served."""
        try:
            self.executor.info.check_request(request.prompt_token_ids, request.sampling)
        except RequestError as error:
            return TokenOutput(request.request_id, None, finish_reason=FinishReason.ERROR, message=str(error))
        self.scheduler.add(request)
        return None

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self.scheduler.finish(request_id, FinishReason.ABORT)

    def step(self) -> list[TokenOutput]:
        """Plan a step, run it, commit it. An executor's failure ends the step's requests, not the engine."""
        started_at_s = self._clock.now_s()
        plan = self.scheduler.plan_step(started_at_s)
        try:
            outcome = self.executor.run(plan)
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            self.num_failed_steps_in_a_row += 1
            return self._fail(plan, error)
        self.num_failed_steps_in_a_row = 0
        outputs = [_token_output(token) for token in self.scheduler.commit(plan, outcome)]
        self._last_step_tokens = plan.num_tokens
        self._last_step_s = self._clock.now_s() - started_at_s
        return outputs

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        counts = scheduler.count_by_class()

        def of_class(service_class: ServiceClass) -> ClassStats:
            counters = scheduler.counters[service_class]
            running, waiting = counts[service_class]
            return ClassStats(running, waiting, counters.num_preemptions, counters.num_recomputed_tokens)

        return EngineStats(
            online=of_class(ServiceClass.ONLINE),
            offline=of_class(ServiceClass.OFFLINE),
            kv_usage_frac=scheduler.blocks.usage_frac,
            num_free_blocks=scheduler.blocks.num_free_blocks,
            num_step_tokens=self._last_step_tokens,
            step_s=self._last_step_s,
        )

    def _fail(self, plan: StepPlan, error: Exception) -> list[TokenOutput]:
        message = f"The step failed: {type(error).__name__}."
        for piece in plan.slices:
            self.scheduler.finish(piece.request_id, FinishReason.ERROR)
        return [
            TokenOutput(piece.request_id, None, finish_reason=FinishReason.ERROR, message=message)
            for piece in plan.slices
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
    )
