"""A scheduler with a KV cache in one or two tiers, whose executor knows the content of every slot."""

from __future__ import annotations

import random
from collections.abc import Sequence

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.core.plan import StepOutcome, StepPlan
from backfill.core.request import Request, ServiceClass
from backfill.costs.model import CostModel
from backfill.execution.executor import Executor
from tests.builders import TwoTierExecutor, linear_cost, make_info, make_request
from tests.integrity import check_scheduler
from tests.scheduling.bench import scheduler_of

BLOCK_SIZE = 16


class CachingBench:
    """Each step takes its predicted time of a virtual clock, and fails if it reads another token's KV.

    Args:
        completes: share of the copies in flight that complete in a step.
        num_layers: of the model; None where steps cannot be stopped.
        stops: share of the steps with safepoints that are stopped at one.
        checks_every: steps from one check of integrity to the next.
        fields: of the ``SchedulerConfig``.
    """

    def __init__(
        self,
        num_blocks: int = 1024,
        num_host_blocks: int = 0,
        *,
        cost: CostModel | None = None,
        completes: float = 1.0,
        seed: int = 0,
        num_layers: int | None = None,
        stops: float = 0.0,
        checks_every: int = 1,
        **fields: object,
    ) -> None:
        self.config = SchedulerConfig(**{"max_num_batched_tokens": 8192, **fields})  # type: ignore[arg-type]
        self.clock = VirtualClock()
        self._checks_every = checks_every
        info = make_info(
            num_blocks,
            BLOCK_SIZE,
            num_host_blocks=num_host_blocks,
            num_layers=num_layers or 1,
        )
        self.executor = TwoTierExecutor(info, random.Random(seed), completes=completes, stops=stops)
        self.scheduler = scheduler_of(self.config, info, cost or linear_cost(token_s=1e-5, step_s=1e-3))

    def expect_no_reuse(self) -> None:
        """Protect nothing, as after many online requests that found nothing."""
        self.scheduler.kv.protection._reused_share = 0.0

    def add(self, *requests: Request) -> None:
        for request in requests:
            request.arrived_at_s = request.arrived_at_s or self.clock.now_s()
            self.executor.namespaces[request.request_id] = self._namespace(request)
            self.scheduler.add(request)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan_step(self.clock.now_s())
        self.clock.advance(plan.predicted_s or 1e-3)
        self.scheduler.commit(plan, self.executor.run(plan), self.clock.now_s())
        if plan.step % self._checks_every == 0:
            check_scheduler(self.scheduler)
        return plan

    def finish(self, *requests: Request) -> None:
        """Add the requests, and run all requests to their end."""
        self.add(*requests)
        while self.scheduler.has_work:
            self.step()

    def counters(self, service_class: ServiceClass = ServiceClass.ONLINE) -> ClassCounters:
        return self.scheduler.counters[service_class]

    def _namespace(self, request: Request) -> str:
        if not self.config.prefix_caching:
            return f"request {request.request_id}"
        owner = "" if self.config.prefix_cache_scope == "global" else request.owner
        return f"{owner} {request.cache_salt}"


class BrokenPlan(BaseException):
    """An executor found an error in a plan. No Exception, so that the engine does not continue."""


class Unforgiving(Executor):
    """Turns all failures of an executor but the scripted ones into BrokenPlan."""

    def __init__(self, executor: TwoTierExecutor) -> None:
        self.info = executor.info
        self.plan: StepPlan | None = None
        self._executor = executor

    def run(self, plan: StepPlan) -> StepOutcome:
        self.plan = plan
        try:
            return self._executor.run(plan)
        except (AssertionError, LookupError) as error:
            raise BrokenPlan from error

    def request_stop(self, step: int) -> None:
        raise AssertionError("nothing arrives while a step runs")


def tokens(seed: object, count: int) -> list[int]:
    """Token ids that depend on the seed; no two seeds give the same block."""
    rng = random.Random(f"tokens {seed}")
    return [rng.randrange(3, 199) for _ in range(count)]


def request_of(prompt: Sequence[int], max_tokens: int = 1, **fields: object) -> Request:
    return make_request(prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]
