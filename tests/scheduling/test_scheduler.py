from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.config import SchedulerConfig
from backfill.core.plan import StepPlan
from backfill.core.request import FinishReason, Request, RequestId, RequestStatus, ServiceClass
from backfill.costs.model import CostModel
from backfill.kvcache.manager import KVCacheManager
from backfill.scheduling.policies.baselines import PriorityPolicy
from backfill.scheduling.policy import Policy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler
from tests.builders import ScriptedExecutor, make_info, make_request
from tests.scheduling.bench import BLOCK_SIZE, sizes, workloads
from tests.shared import examples


def make_scheduler(
    *requests: Request,
    num_blocks: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_prefill_chunk_tokens: int = 32,
    policy: Policy | None = None,
    cost: CostModel | None = None,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk_tokens=max_prefill_chunk_tokens,
    )
    scheduler = Scheduler(
        config,
        KVCacheManager(num_blocks, BLOCK_SIZE),
        policy or PriorityPolicy(),
        predictor=None if cost is None else StepPredictor(cost),
        end_token_ids=(2,),
    )
    for request in requests:
        scheduler.add(request)
    return scheduler


def step(scheduler: Scheduler, executor: ScriptedExecutor) -> StepPlan:
    plan = scheduler.plan_step(now_s=0.0)
    scheduler.commit(plan, executor.run(plan), now_s=0.0)
    scheduler.check_integrity()
    return plan


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_at_its_end() -> None:
    scheduler = make_scheduler(
        make_request(10, max_tokens=1, request_id="a"), max_num_batched_tokens=4, max_num_seqs=4
    )
    executor = ScriptedExecutor(make_info())
    plans = [step(scheduler, executor) for _ in range(3)]
    assert [(p.slices[0].start, p.slices[0].num_tokens) for p in plans] == [(0, 4), (4, 4), (8, 2)]
    assert [p.slices[0].samples for p in plans] == [False, False, True]
    assert not scheduler.has_unfinished


def test_decodes_keep_their_tokens_beside_a_long_prefill() -> None:
    first = make_request(3, max_tokens=6, request_id="decoding")
    scheduler = make_scheduler(first, max_num_batched_tokens=8)
    executor = ScriptedExecutor(make_info())
    step(scheduler, executor)
    # More urgent than the one that decodes; still, the decode's token comes first.
    scheduler.add(make_request(20, priority=-1, request_id="long"))
    assert sizes(step(scheduler, executor)) == {"decoding": 1, "long": 7}
    assert sizes(step(scheduler, executor)) == {"decoding": 1, "long": 7}


def test_waiting_requests_join_in_order_of_class_priority_and_arrival() -> None:
    scheduler = make_scheduler(
        make_request(request_id="offline", service_class=ServiceClass.OFFLINE),
        make_request(request_id="late", arrived_at_s=2.0),
        make_request(request_id="early", arrived_at_s=1.0),
        make_request(request_id="urgent", priority=-1, arrived_at_s=3.0),
        max_num_seqs=3,
    )
    plan = step(scheduler, ScriptedExecutor(make_info()))
    assert list(sizes(plan)) == ["urgent", "early", "late"]


def test_the_least_urgent_is_preempted_when_blocks_run_out_and_recomputed_later() -> None:
    urgent = make_request(8, max_tokens=6, request_id="urgent", arrived_at_s=0.0)
    later = make_request(4, max_tokens=6, request_id="later", arrived_at_s=1.0)
    scheduler = make_scheduler(urgent, later, num_blocks=4)
    executor = ScriptedExecutor(make_info(num_blocks=4))
    step(scheduler, executor)
    assert len(scheduler.requests.running) == 2
    plan = step(scheduler, executor)  # both need a third and a second block, one is left
    assert sizes(plan) == {"urgent": 1}
    assert later.status is RequestStatus.PREEMPTED
    assert later.num_computed_tokens == 4, "nobody needed its block yet"
    assert scheduler.counters[ServiceClass.ONLINE].num_preemptions == 1
    while scheduler.has_unfinished:
        plan = step(scheduler, executor)
    assert scheduler.counters[ServiceClass.ONLINE].num_recomputed_tokens == 4
    assert executor.num_tokens["later"] == 10
    assert not [a for p in executor.plans[1:] for a in p.admitted], "the executor kept its tokens"


def test_blocks_are_reserved_for_later_chunks() -> None:
    requests = [make_request(28, max_tokens=4, request_id=f"r{i}") for i in range(4)]
    scheduler = make_scheduler(*requests, num_blocks=20, max_prefill_chunk_tokens=4)
    executor = ScriptedExecutor(make_info(num_blocks=20))
    while scheduler.has_unfinished:
        step(scheduler, executor)
    assert scheduler.counters[ServiceClass.ONLINE].num_preemptions == 0


def test_no_admission_in_a_step_that_preempts() -> None:
    scheduler = make_scheduler(
        make_request(8, max_tokens=6, arrived_at_s=0.0),
        make_request(4, max_tokens=6, arrived_at_s=1.0, request_id="later"),
        num_blocks=4,
    )
    executor = ScriptedExecutor(make_info(num_blocks=4))
    step(scheduler, executor)
    scheduler.add(make_request(2, max_tokens=1, arrived_at_s=2.0, request_id="new"))
    plan = step(scheduler, executor)
    assert "new" not in sizes(plan)
    assert "later" not in sizes(plan)


def test_end_tokens_stop_tokens_and_lengths_end_outputs() -> None:
    def ended(next_token: int, **sampling: object) -> tuple[FinishReason | None, int]:
        request = make_request(max_tokens=4, **sampling)  # type: ignore[arg-type]
        scheduler = make_scheduler(request)
        executor = ScriptedExecutor(make_info(), next_token=next_token)
        while scheduler.has_unfinished:
            step(scheduler, executor)
        return request.finish_reason, len(request.output_token_ids)

    assert ended(2) == (FinishReason.STOP, 1)
    assert ended(2, ignore_eos=True) == (FinishReason.LENGTH, 4)
    assert ended(2, min_tokens=3) == (FinishReason.STOP, 3)
    assert ended(9, stop_token_ids=(9,)) == (FinishReason.STOP, 1)
    assert ended(9, stop_token_ids=(9,), ignore_eos=True) == (FinishReason.STOP, 1)
    assert ended(7) == (FinishReason.LENGTH, 4)


def test_the_stop_token_is_reported_but_the_models_own_end_is_not() -> None:
    for token_id, sampling, expected in ((9, {"stop_token_ids": (9,)}, 9), (2, {}, None)):
        scheduler = make_scheduler(make_request(**sampling))  # type: ignore[arg-type]
        executor = ScriptedExecutor(make_info(), next_token=token_id)
        plan = scheduler.plan_step(0.0)
        (committed,) = scheduler.commit(plan, executor.run(plan), now_s=0.0)
        assert committed.stop_token_id == expected


def test_finishing_a_request_in_any_state_frees_it_once() -> None:
    running = make_request(request_id="running")
    waiting = make_request(request_id="waiting", arrived_at_s=1.0)
    scheduler = make_scheduler(running, waiting, max_num_seqs=1)
    executor = ScriptedExecutor(make_info())
    step(scheduler, executor)
    for request_id in ("running", "waiting"):
        assert scheduler.finish(RequestId(request_id), FinishReason.ABORT) is not None
        assert scheduler.finish(RequestId(request_id), FinishReason.ABORT) is None
        scheduler.check_integrity()
    assert scheduler.kv.counts.referenced == 0
    assert step(scheduler, executor).released == ("running",)


def test_it_knows_whether_an_online_request_is_unfinished() -> None:
    scheduler = make_scheduler(make_request(service_class=ServiceClass.OFFLINE))
    assert not scheduler.requests.num_online
    scheduler.add(make_request(request_id="waiting"))
    scheduler.add(make_request(request_id="running", max_tokens=1))
    assert scheduler.requests.num_online
    scheduler.finish(RequestId("waiting"), FinishReason.ABORT)
    assert scheduler.requests.num_online
    step(scheduler, ScriptedExecutor(make_info()))
    assert not scheduler.requests.num_online and scheduler.has_unfinished
    scheduler.check_integrity()


@settings(max_examples=examples(80), deadline=None)
@given(
    workload=workloads(24, 32, priority=st.integers(-1, 1)),  # each fits a pool of 8 blocks of 4 tokens
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 40),
    max_prefill_chunk_tokens=st.integers(1, 40),
    aborted=st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=3),
)
def test_any_workload_ends_with_every_token_computed_and_every_block_free(
    workload: Sequence[tuple[int, Request]],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_prefill_chunk_tokens: int,
    aborted: dict[int, int],
) -> None:
    scheduler = make_scheduler(
        num_blocks=8,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk_tokens=max_prefill_chunk_tokens,
    )
    executor = ScriptedExecutor(make_info(num_blocks=8))
    num_steps = 0
    while num_steps <= 20 or scheduler.has_unfinished:
        for arrives_at, request in workload:
            if arrives_at == num_steps:
                scheduler.add(request)
        for number, at_step in aborted.items():
            if at_step == num_steps:
                scheduler.finish(RequestId(f"r{number}"), FinishReason.ABORT)
        plan = step(scheduler, executor)
        assert plan.num_tokens <= max_num_batched_tokens
        assert len(plan.slices) <= max_num_seqs
        assert plan.slices or not scheduler.has_unfinished, "a step made no progress"
        num_steps += 1
        assert num_steps < 3000
    assert scheduler.kv.counts.referenced == 0
    for number, (_, request) in enumerate(workload):
        assert request.finish_reason in (
            {FinishReason.LENGTH, FinishReason.ABORT} if number in aborted else {FinishReason.LENGTH}
        )
