from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import StepPlan
from backfill.core.request import PriorityLevel, Request, RequestStatus, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.scheduling.builder import StepBuilder
from backfill.scheduling.policies.bros import INITIAL_BATCH_SIZE, BrosPolicy, Residuals
from backfill.scheduling.prediction import StepPredictor
from experiments.bros.engine import LateBros
from tests.builders import ScriptedExecutor, linear_cost, make_info, make_request
from tests.integrity import check_scheduler
from tests.scheduling.bench import Bench, bros_policy, offline, policy_workloads, scheduler_of, sizes
from tests.shared import examples

# A step takes 1 ms a token and a little more; objectives are 1 s and 0.1 s.


class Observed(Bench):
    """With steps observed as an engine does."""

    def step(self, *requests: Request) -> StepPlan:
        plan = super().step(*requests)
        self.predictor.observe(plan.predicted_s, plan.predicted_s)
        return plan


def of_batch_size(most: int) -> Callable[[StepPredictor], BrosPolicy]:
    return lambda predictor: BrosPolicy(predictor, max_num_seqs=most, max_chunk_tokens=1000)


def batch_size(bench: Observed) -> int:
    policy = bench.scheduler.policy
    assert isinstance(policy, BrosPolicy)
    return policy.batch_size


def test_the_next_deadline_decides_across_prompts_and_decodes() -> None:
    bench = Observed(of_batch_size(1))
    bench.step(make_request(4, 500, request_id="decode"))  # its next token is due at 0.104
    bench.add(
        make_request(4, 1, request_id="prompt", arrived_at_s=-0.5),
        make_request(4, 1, request_id="late prompt", arrived_at_s=-0.95),
    )
    served = [list(sizes(bench.step())) for _ in range(2)]
    assert served == [["late prompt"], ["decode"]]
    while "prompt" not in sizes(bench.step()):
        assert bench.clock.now_s() < 0.5
    assert 0.4 < bench.clock.now_s() <= 0.5, "not before it was more urgent than the decode"


def test_requests_pulled_from_both_queues_alternate_by_urgency() -> None:
    bench = Observed(bros_policy)
    running = [make_request(1, 500, request_id=f"decode{i}", slo=SLO(1.0, 0.1 + 0.2 * i)) for i in range(3)]
    bench.step(*running)
    now_s = bench.clock.now_s()
    slos = [SLO(0.2 + 0.2 * i, 1.0) for i in range(2)]
    bench.add(*(make_request(2, 2, request_id=f"p{i}", arrived_at_s=now_s, slo=slos[i]) for i in range(2)))
    assert list(sizes(bench.step())) == ["decode0", "p0", "decode1", "p1", "decode2"]


def test_a_step_ends_where_it_would_pass_the_least_residual_time() -> None:
    bench = Observed(bros_policy)
    bench.step(*(make_request(1, 500, request_id=f"chat{i}") for i in range(30)))
    bench.add(offline(4, request_id="job"))
    bench.clock.advance(0.0795)  # of the 0.1 s that the next tokens may take
    plan = bench.step()
    assert len(plan.slices) == 20
    assert "job" not in sizes(plan), "the algorithm returned early"
    assert batch_size(bench) == INITIAL_BATCH_SIZE


def test_decodes_that_do_not_fit_and_can_wait_end_the_online_part_alone() -> None:
    bench = Observed(bros_policy)
    tight, loose = SLO(1.0, 0.05), SLO(1.0, 0.5)
    bench.add(*(make_request(1, 500, request_id=f"tight{i}", slo=tight) for i in range(20)))
    bench.step(*(make_request(1, 500, request_id=f"loose{i}", slo=loose) for i in range(12)))
    bench.clock.advance(0.0245)  # of the 0.05 s
    assert len(bench.step().slices) == 25
    assert batch_size(bench) == INITIAL_BATCH_SIZE + 2


def test_the_batch_size_grows_by_one_a_step_up_to_the_limit() -> None:
    bench = Observed(bros_policy)
    bench.add(offline(4, 100, request_id="job"))
    seen = []
    for _ in range(40):
        bench.step()
        seen.append(batch_size(bench))
    assert seen == [min(64, INITIAL_BATCH_SIZE + 1 + step) for step in range(40)]


def test_a_prompt_that_does_not_fit_and_can_wait_is_passed_over_and_computed_whole_in_time() -> None:
    bench = Observed(bros_policy)
    bench.step(make_request(4, 1500, request_id="chat"), offline(4, 1500, request_id="job"))
    prompt = make_request(400, 2, request_id="prompt", arrived_at_s=bench.clock.now_s())
    assert sizes(bench.step(prompt)) == {"chat": 1, "job": 1}
    while "prompt" not in (plan := sizes(bench.step())):
        assert bench.clock.now_s() < 2.0
    assert plan["prompt"] == 400
    assert prompt.last_token_at_s is not None
    assert prompt.last_token_at_s <= prompt.arrived_at_s + 1.0
    assert batch_size(bench) == INITIAL_BATCH_SIZE, "it took longer than the decode could wait"


def test_requests_that_are_late_in_any_case_do_not_bound_the_step() -> None:
    bench = Observed(bros_policy)
    bench.step(make_request(4, 50, request_id="late"))
    bench.clock.advance(0.5)
    plan = bench.step(make_request(40, 2, request_id="prompt", arrived_at_s=bench.clock.now_s()), offline(8))
    assert len(plan.slices) == 3
    assert next(iter(sizes(plan))) == "late"
    assert batch_size(bench) > INITIAL_BATCH_SIZE


def test_a_late_prompt_that_does_not_fit_keeps_nobody_else_out() -> None:
    bench = Observed(bros_policy)
    bench.step(make_request(4, 50, request_id="chat"))
    bench.add(*(make_request(n, 2, request_id=f"late{n}", arrived_at_s=-9.0 + n / 100) for n in (10, 400)))
    assert sizes(bench.step(offline(4, request_id="job"))) == {"late10": 10, "chat": 1, "job": 4}
    assert batch_size(bench) > INITIAL_BATCH_SIZE


def test_offline_requests_join_by_what_must_be_computed_again() -> None:
    bench = Observed(bros_policy, num_blocks=20)
    bench.step(offline(40, 8, request_id="victim"))
    assert sizes(bench.step(make_request(60, 2, request_id="chat"))) == {"chat": 60}
    bench.step(offline(8, 4, request_id="new", arrived_at_s=1.0))
    assert list(sizes(bench.step())) == ["new", "victim"]


def test_a_waiting_online_request_preempts_offline_ones_unless_the_policy_is_late() -> None:
    for kind in (BrosPolicy, LateBros):
        bench = Observed(
            lambda predictor, kind=kind: kind(  # type: ignore[misc]
                predictor, max_num_seqs=64, max_chunk_tokens=1000
            ),
            num_blocks=12,
        )
        job, chat = offline(40, 8, request_id="job"), make_request(12, 9, request_id="chat")
        bench.step(job)
        bench.step(chat)
        assert (job.status, chat.status) == (
            (RequestStatus.PREEMPTED, RequestStatus.RUNNING)
            if kind is BrosPolicy
            else (RequestStatus.RUNNING, RequestStatus.WAITING)
        )


def test_tokens_of_less_than_a_block_cost_no_swap() -> None:
    bench = Observed(bros_policy, num_blocks=5, bidirectional=True)
    job, chat = offline(12, 8, request_id="job"), make_request(4, 9)
    bench.step(job)
    bench.add(chat)
    while job.status is RequestStatus.RUNNING:
        bench.step()
    scheduler = bench.scheduler
    builder = StepBuilder(
        scheduler.config, scheduler.kv, scheduler.requests, scheduler._preemption, None, bench.clock.now_s()
    )
    assert job.num_ever_computed_tokens == 14
    assert scheduler.kv.match(job).num_tokens == 12, "its tail is not of use while the other end is"
    assert builder.num_absent_blocks(job) == 0


def test_an_offline_request_replaces_the_least_urgent_online_one_that_can_wait() -> None:
    bench = Observed(of_batch_size(2))
    relaxed = make_request(4, 50, request_id="relaxed", slo=SLO(1.0, 0.5))
    bench.step(make_request(4, 2000, request_id="urgent"), relaxed)
    assert sizes(bench.step(offline(4, 3000, request_id="job"))) == {"urgent": 1, "job": 4}
    first_at_s = relaxed.last_token_at_s
    assert first_at_s is not None
    while "relaxed" not in sizes(bench.step()):
        assert bench.clock.now_s() < 2.0
    assert relaxed.last_token_at_s is not None
    assert 0.4 < relaxed.last_token_at_s - first_at_s <= 0.5


def test_an_online_request_that_cannot_wait_is_not_replaced() -> None:
    bench = Observed(of_batch_size(2))
    bench.step(*(make_request(4, 50, request_id=f"chat{i}") for i in range(2)))
    bench.add(offline(4, request_id="job"))
    bench.clock.advance(0.095)  # 5 ms are left: enough for one step
    assert sizes(bench.step()) == {"chat0": 1, "chat1": 1}


def test_an_offline_prompt_that_fits_no_step_beside_online_decodes_is_cut() -> None:
    bench = Observed(bros_policy)
    bench.step(make_request(4, 50, request_id="chat"))
    assert sizes(bench.step(offline(400, request_id="long"))) == {"chat": 1, "long": 98}


def test_later_steps_count_as_the_moving_average_of_those_observed() -> None:
    predictor = StepPredictor(linear_cost())
    prompt = make_request(30, 2, slo=SLO(1.0, 0.1))
    for step_s, average_s in ((0.08, 0.08), (0.16, 0.09)):
        predictor.observe(0.08, step_s)
        assert predictor.average_step_s == pytest.approx(average_s)
    residuals = Residuals(predictor, 0.2, predictor.average_step_s, max_chunk_tokens=10)
    assert residuals.residual_s(prompt) == pytest.approx(1.0 - 0.2 - 2 * 0.09)


def test_a_step_takes_as_long_as_what_it_restores() -> None:
    """T = max(T_compute, T_swap): restoring 8 blocks takes longer than the decode beside it can wait."""
    config = SchedulerConfig(policy="bros", checkpointing="lazy", max_num_batched_tokens=1000)
    info = make_info(num_blocks=64, block_size=4, num_host_blocks=64)

    def restored_beside_a_decode(block_copy_s: float) -> bool:
        scheduler, clock = (
            scheduler_of(config, info, linear_cost(), block_copy_s=block_copy_s),
            VirtualClock(),
        )
        executor = ScriptedExecutor(info)

        def step() -> None:
            plan = scheduler.plan_step(clock.now_s())
            clock.advance(plan.predicted_s)
            copies = plan.copies
            outcome = replace(executor.run(plan), completed_copies=copies.restore)
            scheduler.commit(plan, outcome, clock.now_s())
            check_scheduler(scheduler)

        job = offline(32, 9, request_id="job")
        scheduler.add(job)
        step()
        large = make_request(252, 2, request_id="large")
        scheduler.add(large)
        while large.finish_reason is None:
            step()
        assert job.status is RequestStatus.PREEMPTED
        scheduler.add(make_request(4, 50, request_id="chat", arrived_at_s=clock.now_s(), slo=SLO(0.1, 0.1)))
        step()
        step()
        return job.status is not RequestStatus.PREEMPTED

    assert restored_beside_a_decode(0.001)
    assert not restored_beside_a_decode(0.02), "8 blocks take 0.16 s of the 0.1 s"


@settings(max_examples=examples(60), deadline=None)
@given(workload=policy_workloads())
def test_only_the_most_urgent_request_may_take_a_step_past_a_deadline(
    workload: Sequence[tuple[int, Request]],
) -> None:
    bench = Observed(bros_policy, num_blocks=48)
    for num_steps in range(60):
        bench.add(*(request for arrives_at, request in workload if arrives_at == num_steps))
        now_s = bench.clock.now_s()
        bound_s = math.inf
        for each in bench.scheduler.requests.running.values():
            pending = each.num_pending_tokens
            alone = StepLoad.of([(each.num_computed_tokens, pending, True)])
            residual_s = each.next_token_by_s - now_s
            is_online = each.priority_level is PriorityLevel.ONLINE
            if is_online and residual_s >= bench.cost.step_time_s(alone):
                bound_s = min(bound_s, residual_s)
        plan = bench.step()
        assert len(plan.slices) < 2 or plan.predicted_s <= bound_s + 1e-9
        if len(plan.slices) == 1 and plan.predicted_s > bound_s:
            (owed,) = (r for _, r in workload if r.request_id == plan.slices[0].request_id)
            assert owed.service_class is ServiceClass.ONLINE
