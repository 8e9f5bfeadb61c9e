from __future__ import annotations

import math

from backfill.core.config import SchedulerConfig
from backfill.core.plan import (
    Compute,
    Resume,
    Safepoints,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WaitForCopies,
)
from backfill.core.request import FinishReason, PriorityLevel, Request, RequestId
from backfill.core.slo import SLO
from backfill.kvcache.create import create_kv_cache
from backfill.scheduling.policies.slo import SloPolicy
from backfill.scheduling.policy import BatchBuilder, Policy, R, RequestView, Snapshot, serve
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler
from backfill.scheduling.suspension import Suspension
from tests.builders import linear_cost, make_request
from tests.integrity import check_scheduler
from tests.scheduling.bench import offline

NUM_LAYERS = 10


class PausingPolicy(Policy):
    """Serves all requests, or none while it is paused."""

    stops_steps = True
    is_paused = False

    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        if not self.is_paused:
            serve(view, builder, frozenset(PriorityLevel))

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


def test_a_suspended_slice_resumes_where_nothing_else_could_run() -> None:
    scheduler, _, suspended = paused_scheduler()
    work = scheduler.plan_step(0.0).work
    assert isinstance(work, Resume)
    assert (work.slices, work.num_layers) == (suspended.slices, NUM_LAYERS - 6)


def test_a_discarded_slice_is_dropped_with_the_next_step() -> None:
    scheduler, _, suspended = paused_scheduler()
    scheduler.finish(suspended.slices[0].request_id, FinishReason.ABORT)
    plan = scheduler.plan_step(0.0)
    assert plan.work == WaitForCopies()
    assert plan.dropped == (suspended.slices[0].request_id,)


def stopped_slices(suspension: Suspension, *num_tokens: int) -> list[ScheduledSlice]:
    """Slices of one step, suspended after 5 layers."""
    slices = [ScheduledSlice(RequestId(f"job{each}"), 0, each, (), False, True) for each in num_tokens]
    plan = StepPlan(0, Compute(tuple(slices), 1.0, Safepoints(1, suspends=True)))
    names = tuple(each.request_id for each in slices)
    suspension.commit(plan, StepOutcome((), suspended=names, layers_done=5))
    return slices


def test_as_many_suspended_slices_resume_as_fit() -> None:
    """A layer takes 0.1 ms a token."""
    discarded: list[str] = []
    suspension = Suspension(
        SchedulerConfig(),
        StepPredictor(linear_cost()),
        NUM_LAYERS,
        on_discarded=lambda name, _: discarded.append(name),
    )
    _, small, smaller = stopped_slices(suspension, 100, 30, 20)
    assert suspension.resume(0.0) is None
    resumed = suspension.resume(0.006)
    assert resumed is not None and (resumed.slices, resumed.num_layers) == ((small, smaller), 1)
    plan = StepPlan(1, resumed)
    suspension.commit(plan, StepOutcome((), suspended=("job30", "job20"), layers_done=6))
    resumed = suspension.resume(0.05)
    assert resumed is not None and (resumed.slices, resumed.num_layers) == ((small, smaller), 4)
    suspension.commit(StepPlan(2, resumed), StepOutcome(()))
    assert suspension.requests == {"job100"}
    while suspension.may_resume:
        assert suspension.resume(0.006) is None
    assert discarded == ["job100"], "not one of its layers fits"
    assert suspension.take_dropped() == ("job100",)


def test_slices_of_a_failed_step_are_dropped_though_no_outcome_says_that_they_were_suspended() -> None:
    suspension = Suspension(SchedulerConfig(), StepPredictor(linear_cost()), NUM_LAYERS, lambda *_: None)
    (scheduled,) = stopped_slices(suspension, 30)
    resumed = suspension.resume(1.0)
    assert resumed is not None
    suspension.fail(StepPlan(1, resumed))
    assert suspension.requests == {scheduled.request_id}
    assert suspension.take_dropped() == (scheduled.request_id,)


def test_other_offline_work_does_not_wait_for_what_is_suspended() -> None:
    scheduler, policy, suspended = paused_scheduler()
    policy.is_paused, policy.resume_s = False, lambda view: 0.0  # type: ignore[method-assign]
    scheduler.add(offline(prompt_tokens=4, max_tokens=4, request_id="other"))
    plan = scheduler.plan_step(0.0)
    assert [each.request_id for each in plan.slices] == ["other"]
    assert plan.safepoints is not None, "this step can be stopped too"
    assert suspended.slices[0].request_id not in plan.dropped


def slo_scheduler(slo: SLO) -> Scheduler:
    """With a pool of 600 tokens. A step takes 1 ms a token."""
    predictor = StepPredictor(linear_cost())
    policy = SloPolicy(predictor, default_slo=slo, max_step_tokens=1000, can_stop=True)
    config = SchedulerConfig(max_num_batched_tokens=1000, max_prefill_chunk_tokens=1000)
    return Scheduler(
        config,
        create_kv_cache(config, 150, 4, 0),
        policy,
        predictor=predictor,
        default_slo=slo,
        num_layers=NUM_LAYERS,
    )


def test_a_suspended_request_that_its_owners_turn_brings_back_holds_nobody_up() -> None:
    """It is online again, so the other owner's prompt, for which it was stopped, cannot preempt it."""
    scheduler = slo_scheduler(SLO(0.2, 0.1))
    late = make_request(360, 8, request_id="late", owner="a")
    scheduler.add(late)
    plan = scheduler.plan_step(0.0)
    assert late.priority_level is PriorityLevel.RELEGATED
    scheduler.add(make_request(300, 8, request_id="chat", owner="b", slo=SLO(5.0, 0.1)))
    scheduler.commit(plan, StepOutcome((), suspended=("late",), layers_done=5), 0.0)
    now_s = 0.0
    while scheduler.requests.by_id:
        plan = scheduler.plan_step(now_s)
        assert plan.slices
        now_s += plan.predicted_s
        sampled = [SampledToken(each.request_id, 7) for each in plan.slices if each.samples]
        scheduler.commit(plan, StepOutcome(tuple(sampled)), now_s)


def test_a_suspended_relegated_request_and_one_that_waits_for_its_blocks_both_end() -> None:
    scheduler = slo_scheduler(SLO(0.2, 0.1))
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


def test_a_suspended_decode_goes_on_though_an_online_prompt_is_there_at_all_times() -> None:
    scheduler = slo_scheduler(SLO(1.0, 0.1))
    scheduler.add(offline(4, 50, request_id="job"))
    for outcome in (
        StepOutcome((SampledToken(RequestId("job"), 7),)),
        StepOutcome((), suspended=(RequestId("job"),), layers_done=5),
    ):
        scheduler.commit(scheduler.plan_step(0.0), outcome, 0.0)
    now_s, ended_at_s, longest_s, dropped = 0.0, 0.0, 0.0, []
    for number in range(20):
        scheduler.add(make_request(30, 1, request_id=f"chat{number}", arrived_at_s=now_s))
        plan = scheduler.plan_step(now_s)
        assert f"chat{number}" in {each.request_id for each in plan.slices}, "the device does not wait"
        dropped += plan.dropped
        now_s += plan.predicted_s
        sampled = tuple(SampledToken(each.request_id, 7) for each in plan.slices)
        scheduler.commit(plan, StepOutcome(sampled), now_s)
        check_scheduler(scheduler)
        if "job" in {each.request_id for each in plan.slices}:
            longest_s, ended_at_s = max(longest_s, now_s - ended_at_s), now_s
    assert dropped == ["job"], "what was suspended of it"
    assert max(longest_s, now_s - ended_at_s) < 4.5 * 0.03, "four steps at most"


def test_a_suspended_relegated_prompt_goes_on_though_an_online_prompt_is_there_at_all_times() -> None:
    scheduler = slo_scheduler(SLO(0.2, 0.1))
    late, now_s = make_request(360, 8, request_id="late"), 0.0
    scheduler.add(late)
    plan, outcome = scheduler.plan_step(0.0), StepOutcome((), suspended=("late",), layers_done=5)
    for number in range(50):
        scheduler.add(make_request(20, 1, request_id=f"chat{number}", arrived_at_s=now_s, slo=SLO(0.5, 0.1)))
        scheduler.commit(plan, outcome, now_s)
        plan = scheduler.plan_step(now_s)
        now_s += plan.predicted_s
        outcome = StepOutcome(tuple(SampledToken(each.request_id, 7) for each in plan.slices if each.samples))
    assert late.first_token_at_s is not None


def test_a_group_is_discarded_after_refusals_of_its_own() -> None:
    """Those of the group before it, which was discarded, do not count."""
    discarded: list[str] = []
    suspension = Suspension(
        SchedulerConfig(),
        StepPredictor(linear_cost()),
        NUM_LAYERS,
        on_discarded=lambda name, _: discarded.append(name),
    )
    for num_tokens in (100, 90):
        stopped_slices(suspension, num_tokens)
        for _ in range(15):
            assert suspension.resume(0.0001) is None
        assert f"job{num_tokens}" not in discarded
        assert suspension.resume(0.0001) is None
        assert f"job{num_tokens}" in discarded


def test_no_step_is_suspended_beyond_the_memory_for_two() -> None:
    suspension = Suspension(
        SchedulerConfig(max_num_batched_tokens=64),
        StepPredictor(linear_cost()),
        NUM_LAYERS,
        on_discarded=lambda *_: None,
    )
    slices = [ScheduledSlice(RequestId("next"), 0, 8, (), True, stoppable=True)]
    stopped_slices(suspension, 64)
    assert suspension.safepoints(slices, 1.0) is not None
    stopped_slices(suspension, 65)
    assert suspension.safepoints(slices, 1.0) is None


def suspended_decodes(policy: PausingPolicy) -> tuple[Scheduler, list[Request], tuple[RequestId, ...]]:
    """A pipeline of two stages, and four requests: the decodes of two of them are suspended.

    Three other steps have gone before them.
    """
    config = SchedulerConfig(prefix_caching=False)
    scheduler = Scheduler(
        config,
        create_kv_cache(config, 64, 4, 0),
        policy,
        predictor=StepPredictor(linear_cost(token_s=0.001)),
        num_layers=NUM_LAYERS,
        max_steps_in_flight=2,
        stage_layers=(5, 5),
    )
    requests = [offline(8, 8, request_id=name) for name in "abcd"]
    for each in requests:
        scheduler.add(each)
    for plan in (scheduler.plan_step(0.0), scheduler.plan_step(0.0)):
        commit_all(scheduler, plan)
    stopped = scheduler.plan_step(0.0)
    names = tuple(each.request_id for each in stopped.slices)
    scheduler.commit(stopped, StepOutcome((), suspended=names, layers_done=NUM_LAYERS - 1), 0.0)
    policy.resume_s = lambda view: 0.0  # type: ignore[method-assign]
    for _ in range(3):
        scheduler.add(make_request(4, 1))
        commit_all(scheduler, scheduler.plan_step(0.0))
    return scheduler, requests, names


def commit_all(scheduler: Scheduler, plan: StepPlan) -> None:
    """All slices to their ends."""
    tokens = tuple(SampledToken(each.request_id, 7) for each in plan.slices if each.samples)
    scheduler.commit(plan, StepOutcome(tokens), 0.0)
    check_scheduler(scheduler)


def test_what_a_pipeline_resumes_is_not_computed_beside_it() -> None:
    """Decodes that other steps have gone before are free for one, but not while a part of them resumes."""
    policy = PausingPolicy()
    scheduler, requests, names = suspended_decodes(policy)
    policy.resume_s = lambda view: 0.00015  # type: ignore[method-assign]  # for one of the two
    resumed = scheduler.plan_step(0.0)
    policy.resume_s = lambda view: 0.0  # type: ignore[method-assign]
    beside = scheduler.plan_step(0.0)
    assert isinstance(resumed.work, Resume) and isinstance(beside.work, Compute)
    assert not set(names) & {each.request_id for each in beside.slices}
    commit_all(scheduler, resumed)
    commit_all(scheduler, beside)
    policy.resume_s = lambda view: math.inf  # type: ignore[method-assign]
    commit_all(scheduler, scheduler.plan_step(0.0))
    for each in requests:
        if each.request_id in names:
            assert each.num_tokens - each.num_prompt_tokens == len(each.output_token_ids) == 2
            assert each.num_computed_tokens == each.num_tokens - 1


def test_slices_resume_in_several_steps_in_flight_and_one_of_them_fails() -> None:
    policy = PausingPolicy()
    scheduler, _, names = suspended_decodes(policy)
    policy.resume_s = lambda view: 0.00015  # type: ignore[method-assign]  # for one of the two
    first, second = scheduler.plan_step(0.0), scheduler.plan_step(0.0)
    for plan, name in zip((first, second), names, strict=True):
        assert isinstance(plan.work, Resume) and plan.work.num_layers == 1
        assert [each.request_id for each in plan.slices] == [name]
    third = scheduler.plan_step(0.0)
    assert isinstance(third.work, Compute) and third.slices, "a resumed step takes the place of no other"
    assert scheduler.in_flight.max_more == 0
    ended = scheduler.fail(first)
    assert [each.request_id for each in ended] == [names[0]], "it has output tokens"
    commit_all(scheduler, second)
    commit_all(scheduler, third)
    plan = scheduler.plan_step(0.0)
    assert set(plan.dropped) == {names[0]} and isinstance(plan.work, Compute)
    assert names[0] not in {each.request_id for each in plan.slices}


def test_a_pipeline_arms_every_step_as_far_as_there_is_memory_for_what_it_may_suspend() -> None:
    policy, config = PausingPolicy(), SchedulerConfig(max_num_batched_tokens=300, prefix_caching=False)
    scheduler = Scheduler(
        config,
        create_kv_cache(config, 500, 4, 0),
        policy,
        predictor=StepPredictor(linear_cost()),
        num_layers=NUM_LAYERS,
        max_steps_in_flight=4,
        stage_layers=(3, 3, 2, 2),
    )
    for name in "abcd":
        scheduler.add(offline(256, 8, request_id=name))
    plans = [scheduler.plan_step(0.0) for _ in range(4)]
    assert [plan.num_tokens for plan in plans] == [256] * 4
    assert [plan.safepoints is not None for plan in plans] == [True, True, True, False]
