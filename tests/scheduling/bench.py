"""A scheduler on a virtual clock, and workloads for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import StepPlan
from backfill.core.request import PriorityLevel, Request, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.model import CostModel
from backfill.execution.executor import ExecutorInfo
from backfill.kvcache.create import create_kv_cache
from backfill.kvcache.manager import KVCacheManager
from backfill.offloading.residency import ResidencyPolicy
from backfill.scheduling.objectives import server_slo
from backfill.scheduling.policies.bros import BrosPolicy
from backfill.scheduling.policies.conserve import ConServePolicy
from backfill.scheduling.policies.create import create_policy
from backfill.scheduling.policies.slo import SloPolicy
from backfill.scheduling.policy import Policy, Snapshot
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler
from tests.builders import ScriptedExecutor, linear_cost, make_info, make_request
from tests.integrity import check_scheduler

BLOCK_SIZE = 4
SLO_100_MS = SLO(ttft_s=1.0, tpot_s=0.1)
MARGIN = 0.1  # at least, of a limit's time, until steps have been observed
LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 1000, "max_prefill_chunk_tokens": 1000}


class Bench:
    """A scheduler with a scripted executor; each step takes its predicted time of a virtual clock.

    Args:
        limits: of steps, as in ``SchedulerConfig``.
    """

    def __init__(
        self,
        policy: Policy | Callable[[StepPredictor], Policy] | None = None,
        *,
        slo: SLO = SLO_100_MS,
        num_blocks: int = 1000,
        can_stop: bool = True,
        step_efficiency: float = 1.0,
        step_s: float = 1e-6,
        bidirectional: bool = False,
        next_token: int | None = None,
        cost: CostModel | None = None,
        **limits: int,
    ) -> None:
        self._checks_every = 1 if num_blocks <= 100 else 4  # in a small pool requests are in each other's way
        self.cost = cost or linear_cost(step_s=step_s)
        self.predictor = StepPredictor(self.cost)
        self.clock = VirtualClock()
        self.executor = ScriptedExecutor(make_info(num_blocks=num_blocks, block_size=BLOCK_SIZE), next_token)
        if callable(policy):
            policy = policy(self.predictor)
        if policy is None:
            policy = slo_policy(
                self.predictor,
                default_slo=slo,
                can_stop=can_stop,
                step_efficiency=step_efficiency,
                offline_efficiency=step_efficiency,
            )
        self.scheduler = Scheduler(
            SchedulerConfig(**{**LIMITS, **limits}),
            KVCacheManager(num_blocks, BLOCK_SIZE, bidirectional=bidirectional),
            policy,
            predictor=self.predictor,
            default_slo=slo,
            end_token_ids=self.executor.info.end_token_ids,
        )

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self, *requests: Request) -> StepPlan:
        """A step, before which these requests arrive."""
        self.add(*requests)
        plan = self.scheduler.plan_step(self.clock.now_s())
        self.clock.advance(plan.predicted_s)
        self.scheduler.commit(plan, self.executor.run(plan), self.clock.now_s())
        if plan.step % self._checks_every == 0:
            check_scheduler(self.scheduler)
        return plan


def sizes(plan: StepPlan) -> dict[str, int]:
    return {scheduled.request_id: scheduled.num_tokens for scheduled in plan.slices}


def offline(prompt_tokens: int = 4, max_tokens: int = 500, **fields: object) -> Request:
    return make_request(prompt_tokens, max_tokens, service_class=ServiceClass.OFFLINE, **fields)  # type: ignore[arg-type]


slo_policy = partial(SloPolicy, default_slo=SLO_100_MS, max_step_tokens=1000, can_stop=True)
conserve_policy = partial(ConServePolicy, default_slo=SLO_100_MS)
bros_policy = partial(BrosPolicy, max_num_seqs=64, max_chunk_tokens=1000)


def view_of(
    now_s: float,
    *,
    running: Sequence[Request] = (),
    restoring: Sequence[Request] = (),
    waiting: Sequence[Request] = (),
) -> Snapshot[Request]:
    """A snapshot of online requests."""
    nobody: dict[PriorityLevel, Sequence[Request]] = dict.fromkeys(PriorityLevel, ())
    online = PriorityLevel.ONLINE
    return Snapshot(
        now_s, {**nobody, online: running}, restoring, {**nobody, online: waiting}, 100, online_blocks=2
    )


def scheduler_of(
    config: SchedulerConfig,
    info: ExecutorInfo,
    cost: CostModel,
    *,
    block_copy_s: float | None = None,
    residency: ResidencyPolicy | None = None,
) -> Scheduler:
    """A scheduler as an engine makes it for an executor."""
    predictor, slo = StepPredictor(cost), server_slo(config, cost)
    max_num_blocks = None if residency is None else info.max_num_blocks
    return Scheduler(
        config,
        create_kv_cache(config, info.num_blocks, info.block_size, info.num_host_blocks, max_num_blocks),
        create_policy(config, predictor, default_slo=slo, can_stop=info.num_layers > 1),
        predictor=predictor,
        default_slo=slo,
        block_copy_s=block_copy_s,
        num_layers=info.num_layers,
        residency=residency,
        max_steps_in_flight=info.max_steps_in_flight,
        stage_layers=info.stage_layers,
    )


@st.composite
def policy_workloads(draw: st.DrawFn) -> Sequence[tuple[int, Request]]:
    """(step at which it arrives, request) pairs, each of which fits a pool of 12 blocks of 4 tokens."""
    arrivals = []
    for i in range(draw(st.integers(1, 10))):
        prompt_tokens = draw(st.integers(1, 36))
        request = make_request(
            prompt_tokens,
            draw(st.integers(1, 48 - prompt_tokens)),
            request_id=f"r{i}",
            service_class=draw(st.sampled_from(ServiceClass)),
            arrived_at_s=float(draw(st.integers(0, 3))),
            slo=draw(st.sampled_from((None, SLO(0.05, 0.01), SLO(0.001, 0.001)))),
            complete_by_s=draw(st.sampled_from((None, 0.1, 3600.01))),
        )
        arrivals.append((draw(st.integers(0, 12)), request))
    return arrivals
