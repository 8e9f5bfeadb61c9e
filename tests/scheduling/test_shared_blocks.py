"""Requests that share blocks, and what only one of the two KV layouts does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.block import BlockRef, is_reversed
from backfill.core.clock import VirtualClock
from backfill.core.config import CheckpointingName, PolicyName, SchedulerConfig
from backfill.core.plan import Compute, Resume, StepPlan
from backfill.core.request import PriorityLevel, Request, RequestStatus, ServiceClass
from backfill.engine.engine import Engine
from backfill.kvcache.content import BlockState
from backfill.scheduling.policies.baselines import PriorityPolicy
from tests.builders import TwoTierExecutor, linear_cost, make_info, make_profile, make_request
from tests.integrity import check_scheduler
from tests.scheduling.bench import Bench, offline
from tests.scheduling.caching import BLOCK_SIZE, CachingBench, request_of, tokens
from tests.scheduling.test_two_tier_schedules import Arrival, Run, Setting, all_settings, crowd
from tests.shared import examples

OFFLINE = ServiceClass.OFFLINE
PREFIX = tokens("prefix", 20 * BLOCK_SIZE)


def make_bench(num_blocks: int, num_host_blocks: int = 0, **options: object) -> CachingBench:
    return CachingBench(num_blocks, num_host_blocks, policy="slo", ttft_slo=1.0, tpot_slo=0.05, **options)  # type: ignore[arg-type]


def run_steps(bench: CachingBench, count: int) -> None:
    for _ in range(count):
        bench.step()


def steps_until_running(bench: CachingBench, request: Request, most: int = 20) -> int:
    for count in range(1, most + 1):
        bench.step()
        if request.status is RequestStatus.RUNNING:
            return count
    raise AssertionError(f"the request is {request.status} after {most} steps")


# What is kept free for running requests.


@pytest.mark.parametrize(("num_prompt_tokens", "num_blocks"), [(6, 10), (30, 22)])
def test_no_block_is_kept_for_a_pair_where_that_saves_as_much_as_a_preemption_wastes(
    num_prompt_tokens: int, num_blocks: int
) -> None:
    """A pair holds 2 blocks each, or 8, of which half would be idle; its next two are saved."""
    bench = Bench(PriorityPolicy(), num_blocks=num_blocks, bidirectional=True)
    bench.step(make_request(num_prompt_tokens, 9), offline(num_prompt_tokens, 9))
    waiting = offline(24, 9)
    bench.step(waiting)  # it needs the 6 blocks that are left
    assert (waiting.status is RequestStatus.RUNNING) is (num_prompt_tokens == 6)


def test_blocks_are_kept_for_long_offline_requests_which_pair_with_nobody() -> None:
    """Though requests hold 7 blocks in the mean: three short online ones beside two of 14."""
    bench = Bench(PriorityPolicy(), num_blocks=40, bidirectional=True)
    bench.step(*(make_request(6, 9) for _ in range(3)), offline(54, 9), offline(54, 9))
    waiting = offline(23, 9)
    bench.step(waiting)  # it needs the 6 blocks that are left
    assert waiting.status is RequestStatus.WAITING


def test_where_memory_is_full_one_long_request_gives_way_and_not_each_that_shares() -> None:
    """20 answers that grow beside 20 batch lines of 30 blocks: the blocks of one suffice for a while."""
    bench = make_bench(640, 2560, checks_every=16)
    lines = [
        request_of(tokens(f"line {number}", 430 + number), 400, service_class=OFFLINE) for number in range(20)
    ]
    chats = [request_of(tokens(f"chat {number}", 20 + number), 300) for number in range(20)]
    bench.add(*lines, *chats)
    while not all(each.output_token_ids for each in lines + chats):
        bench.step()
    run_steps(bench, 150)
    assert 0 < bench.scheduler.counters[OFFLINE].num_preemptions < 20


# What preemption frees.


@pytest.mark.parametrize("stops", [0, 1])
def test_an_online_request_preempts_offline_ones_for_the_blocks_that_they_share(stops: int) -> None:
    bench = make_bench(40, num_layers=4, stops=stops)
    lines = [request_of([*PREFIX, *tokens(each, 8)], 100, service_class=OFFLINE) for each in "ab"]
    bench.add(*lines)
    suspension = bench.scheduler._suspension
    while not all(each.output_token_ids for each in lines) or len(suspension.requests) != 2 * stops:
        bench.step()
    assert sum(bench.scheduler.kv.counts.held(each.request_id) for each in lines) > 40, "they share"
    online = request_of(tokens("c", 30 * BLOCK_SIZE), 4)
    bench.add(online)
    assert steps_until_running(bench, online) == 1
    assert [each.status for each in lines] == [RequestStatus.PREEMPTED] * 2
    bench.finish()


def test_no_victim_is_preempted_for_blocks_that_the_waiting_request_would_reference_again() -> None:
    bench = make_bench(100)
    holder = request_of(tokens("holder", 600), 1000, owner="other")
    bench.add(holder)
    run_steps(bench, 1)
    shared = tokens("shared", 30 * BLOCK_SIZE)
    victim = request_of([*shared, *tokens("victim", 300)], 500, service_class=OFFLINE)
    bench.add(victim)
    run_steps(bench, 3)
    waiting = request_of([*shared, *tokens("waiting", 41 * BLOCK_SIZE)], 4)
    bench.add(waiting)
    before = len(victim.output_token_ids)
    run_steps(bench, 60)
    assert waiting.status is RequestStatus.WAITING, "it does not fit beside the online request"
    assert victim.num_preemptions == 0
    assert len(victim.output_token_ids) >= before + 59


def test_no_victim_is_preempted_for_a_prefix_that_stays_protected_without_it() -> None:
    """The promoted request runs after its victim. Nobody else arrives, so the engine must not stop before."""
    config = SchedulerConfig(policy="slo", ttft_slo=1.0, tpot_slo=0.05, max_num_batched_tokens=8192)
    clock = VirtualClock()
    executor = TwoTierExecutor(make_info(100, BLOCK_SIZE), random.Random(0))
    engine = Engine(config, executor, clock, make_profile(linear_cost(token_s=1e-5, step_s=1e-3)))

    def run_engine(most_steps: int) -> None:
        for _ in range(most_steps):
            if engine.has_work:
                engine.step()
                check_scheduler(engine.scheduler)
            clock.advance(0.01)

    shared = tokens("system", 30 * BLOCK_SIZE)
    for number in range(12):
        engine.add(request_of([*shared, *tokens(number, 8)], 2, arrived_at_s=clock.now_s()))
        run_engine(4)
    assert engine.scheduler.kv._device.counts[BlockState.PROTECTED] >= 30
    now_s = clock.now_s()
    line = request_of(
        [*shared, *tokens("line", 10 * BLOCK_SIZE)], 500, service_class=OFFLINE, arrived_at_s=now_s
    )
    engine.add(line)
    run_engine(3)
    now_s = clock.now_s()
    urgent = request_of(
        tokens("urgent", 85 * BLOCK_SIZE),
        4,
        service_class=OFFLINE,
        arrived_at_s=now_s,
        complete_by_s=now_s + 1.0,
    )
    engine.add(urgent)
    run_engine(1000)
    assert urgent.priority_level is PriorityLevel.PROMOTED
    assert line.num_preemptions == 0
    assert [each.status for each in (line, urgent)] == [RequestStatus.FINISHED] * 2
    assert not engine.has_unfinished


def test_a_step_is_not_empty_because_the_request_that_preempted_is_being_restored() -> None:
    bench = make_bench(100, 300, checkpointing="eager")
    bench.expect_no_reuse()
    prompt = tokens("chat", 60 * BLOCK_SIZE + 1)
    bench.finish(request_of(prompt, 8))
    bench.finish(request_of(tokens("large", 99 * BLOCK_SIZE), 4))
    victim = request_of(tokens("victim", 60 * BLOCK_SIZE), 100, service_class=OFFLINE)
    bench.add(victim)
    run_steps(bench, 5)
    online = request_of(prompt, 8)
    small = request_of(tokens("small", 10 * BLOCK_SIZE), 8, service_class=OFFLINE, priority=-1)
    bench.add(online, small)
    plan = bench.step()
    assert (victim.status, online.status) == (RequestStatus.PREEMPTED, RequestStatus.RESTORING)
    assert [each.request_id for each in plan.slices] == [small.request_id]
    bench.finish()


# What online requests hold.


def test_offline_work_is_limited_by_the_distinct_blocks_of_online_requests() -> None:
    bench = make_bench(256, cost=linear_cost(token_s=1e-5, step_s=5e-3))
    shared = tokens("shared", 30 * BLOCK_SIZE)
    online = [request_of([*shared, *tokens(each, 8)], 200) for each in range(8)]
    bench.add(*online)
    run_steps(bench, 5)
    kv = bench.scheduler.kv
    num_named = sum(kv.counts.held(each.request_id) for each in online)
    assert 0.9 * 256 < num_named < 1.1 * 256, "counted once for each request, they would fill the pool"
    assert kv.counts.online == kv.counts.referenced == 30 + 8
    line = request_of(tokens("line", 600), 50, service_class=OFFLINE)
    bench.add(line)
    run_steps(bench, 10)
    assert all(each.status is RequestStatus.RUNNING for each in online)
    assert line.num_computed_tokens > 0


# Failed steps.


def test_a_request_that_runs_again_after_a_failed_step_counts_its_hits_once() -> None:
    bench = make_bench(64)
    bench.finish(request_of([*PREFIX, *tokens("first", 8)]))
    retried = request_of([*PREFIX, *tokens("second", 8)], 4)
    before = bench.counters().copy()
    bench.add(retried)
    plan = bench.scheduler.plan_step(bench.clock.now_s())
    bench.executor.fail_at_step = plan.step
    with pytest.raises(RuntimeError, match="scripted failure"):
        bench.executor.run(plan)
    assert bench.scheduler.fail(plan) == []
    bench.finish()
    assert retried.was_retried and retried.status is RequestStatus.FINISHED
    after = bench.counters()
    assert after.num_prefix_hit_tokens - before.num_prefix_hit_tokens == len(PREFIX)
    assert after.num_prefix_queried_tokens - before.num_prefix_queried_tokens == retried.num_prompt_tokens
    assert retried.num_cached_tokens == len(PREFIX)


SEEDS = st.integers(0, 2**32)


def run(setting: Setting, seed: int, service_class: ServiceClass | None = None) -> Run:
    """The schedule of a crowd of both classes, or of one."""
    arrivals = crowd(random.Random(seed))
    if service_class is not None:
        arrivals = [each for each in arrivals if each.request.service_class is service_class]
    schedule = Run(setting, seed)
    schedule.run(arrivals)
    return schedule


def forward(plan: StepPlan) -> StepPlan:
    """The plan with all references forward."""
    work = plan.work
    if not isinstance(work, Compute | Resume):
        return plan
    slices = tuple(
        each._replace(blocks=tuple(BlockRef(ref & ~1) for ref in each.blocks)) for each in work.slices
    )
    return replace(plan, work=replace(work, slices=slices))


@settings(max_examples=examples(16), deadline=None)
@given(setting=all_settings(), seed=SEEDS)
def test_unidirectional_blocks_are_forward_and_never_shared(setting: Setting, seed: int) -> None:
    schedule = run(replace(setting, kv_layout="unidirectional"), seed)
    sharing = schedule.scheduler.kv.sharing
    assert sharing.num_entered == sharing.num_overwritten == 0
    for plan in schedule.plans:
        assert not (plan.copies.slot_checkpoint or plan.copies.slot_restore)
        assert not any(is_reversed(ref) for each in plan.slices for ref in each.blocks)


@settings(max_examples=examples(16), deadline=None)
@given(setting=all_settings(), seed=SEEDS, service_class=st.sampled_from(ServiceClass))
def test_requests_of_one_class_have_the_same_plans_in_both_layouts(
    setting: Setting, seed: int, service_class: ServiceClass
) -> None:
    both = run(replace(setting, kv_layout="bidirectional"), seed, service_class)
    one = run(replace(setting, kv_layout="unidirectional"), seed, service_class)
    assert [forward(plan) for plan in both.plans] == one.plans
    reversed_refs = {is_reversed(ref) for plan in both.plans for each in plan.slices for ref in each.blocks}
    assert reversed_refs <= {service_class is ServiceClass.OFFLINE}


@pytest.mark.parametrize(
    ("policy", "checkpointing"), [("slo", "eager"), ("bros", "lazy"), ("priority", "eager")]
)
def test_crowded_schedules_share_blocks_and_save_what_is_overwritten(
    policy: PolicyName, checkpointing: CheckpointingName
) -> None:
    pools = {"num_blocks": 24, "num_host_blocks": 48, "max_num_seqs": 24, "max_num_batched_tokens": 64}
    options = {"policy": policy, "checkpointing": checkpointing}
    schedule = Run(Setting(kv_layout="bidirectional", completes=0.9, **options, **pools))
    offline = [
        Arrival(0, make_request(5 + number % 7, 20 + number % 5, service_class=ServiceClass.OFFLINE))
        for number in range(30)
    ]
    online = [Arrival(3 * number, make_request(3 + number % 7, 12 + number % 5)) for number in range(40)]
    schedule.run(offline + online)
    sharing = schedule.scheduler.kv.sharing
    assert sharing.num_entered > 2
    assert sharing.num_overwritten > 0
    num_copied = sum(copy.num for plan in schedule.plans for copy in plan.copies.slot_checkpoint)
    assert num_copied == schedule.scheduler.kv.checkpointer.num_copied_slots > 0
    assert checkpointing == "eager" or num_copied <= sharing.num_overwritten
