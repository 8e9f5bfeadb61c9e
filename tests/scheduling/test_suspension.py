from __future__ import annotations

import math

from backfill.core.config import SchedulerConfig
from backfill.core.plan import Compute, Resume, SampledToken, StepOutcome, StepPlan, WaitForCopies
from backfill.core.request import FinishReason, PriorityLevel
from backfill.core.slo import SLO
from backfill.kvcache.create import create_kv_cache
from backfill.scheduling.fill import serve
from backfill.scheduling.policies.slo import SloPolicy, SloPolicyConfig
from backfill.scheduling.policy import BatchBuilder, Policy, R, RequestView, Snapshot
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler
from tests.builders import linear_cost, make_request
from tests.scheduling.bench import offline

NUM_LAYERS = 10


class PausingPolicy(Policy):
    """Serves all requests, or none while it is paused."""

    stops_steps = True
    is_paused = False

    def build(self, view: Snapshot[R], batch: BatchBuilder[R]) -> None:
        if not self.is_paused:
            serve(view, batch, frozenset(PriorityLevel))

    def resume_s(self, view: Snapshot[RequestView]) -> float:
        return 0.0 if self.is_paused else math.inf


def paused_scheduler() -> tuple[Scheduler, PausingPolicy, StepPlan]:
    """A scheduler, paused, and its last plan: one slice, suspended after 6 layers, and copies in flight."""
    policy = PausingPolicy()
    config = SchedulerConfig(checkpointing="eager")
    scheduler = Scheduler(
        config,
        create_kv_cache(config, 8, 4, 8),
        policy,
        predictor=StepPredictor(linear_cost()),
        num_layers=NUM_LAYERS,
    )
    request = offline(prompt_tokens=8, max_tokens=4)
    scheduler.add(request)
    sampled = SampledToken(request.request_id, 7)
    scheduler.commit(scheduler.plan_step(0.0), StepOutcome((sampled,)), 0.0)
    plan = scheduler.plan_step(0.0)
    assert len(plan.copies.checkpoint) == 2
    scheduler.commit(plan, StepOutcome((), suspended=(request.request_id,), layers_done=6), 0.0)
    policy.is_paused = True
    return scheduler, policy, plan


def test_a_suspended_slice_is_kept_while_steps_compute_nothing_and_then_resumes() -> None:
    scheduler, policy, suspended = paused_scheduler()
    plan = scheduler.plan_step(0.0)
    assert plan.work == WaitForCopies()
    scheduler.commit(plan, StepOutcome((), completed_copies=suspended.copies.checkpoint), 0.0)
    plan = scheduler.plan_step(0.0)
    assert plan.work == Compute(slices=())
    scheduler.commit(plan, StepOutcome(()), 0.0)
    policy.is_paused = False
    work = scheduler.plan_step(0.0).work
    assert isinstance(work, Resume)
    assert (work.slices, work.num_layers) == (suspended.slices, NUM_LAYERS - 6)


def test_a_discarded_slice_is_dropped_with_the_next_step() -> None:
    scheduler, _, suspended = paused_scheduler()
    scheduler.finish(suspended.slices[0].request_id, FinishReason.ABORT)
    plan = scheduler.plan_step(0.0)
    assert plan.work == WaitForCopies()
    assert plan.dropped == (suspended.slices[0].request_id,)


def test_a_suspended_relegated_request_and_one_that_waits_for_its_blocks_both_end() -> None:
    slo, predictor = SLO(0.2, 0.1), StepPredictor(linear_cost())
    policy = SloPolicy(SloPolicyConfig(default_slo=slo), predictor, max_step_tokens=1000, can_stop=True)
    config = SchedulerConfig(max_num_batched_tokens=1000, max_prefill_chunk_tokens=1000)
    scheduler = Scheduler(
        config,
        create_kv_cache(config, 150, 4, 0),
        policy,
        predictor=predictor,
        default_slo=slo,
        num_layers=NUM_LAYERS,
    )
    scheduler.add(make_request(360, 8, request_id="first"))
    scheduler.add(make_request(400, 8, request_id="second"))
    now_s, plan = 0.0, scheduler.plan_step(0.0)
    assert [each.request_id for each in plan.slices] == ["first"]
    outcome = StepOutcome((), suspended=("first",), layers_done=5)
    scheduler.commit(plan, outcome, now_s)
    scheduler.add(make_request(4, 2, request_id="chat", arrived_at_s=now_s))
    for _ in range(100):
        plan = scheduler.plan_step(now_s)
        assert plan.slices or not scheduler.has_unfinished, "nothing runs, and nothing will"
        now_s += plan.predicted_s
        layers = plan.work.num_layers if isinstance(plan.work, Resume) else NUM_LAYERS
        is_whole = not isinstance(plan.work, Resume) or layers == NUM_LAYERS - 5
        sampled = [SampledToken(each.request_id, 7) for each in plan.slices if each.samples and is_whole]
        suspended = () if is_whole else tuple(each.request_id for each in plan.slices)
        scheduler.commit(
            plan, StepOutcome(tuple(sampled), suspended=suspended, layers_done=5 + layers), now_s
        )
    assert not scheduler.has_unfinished
