from __future__ import annotations

import math

import pytest

from backfill.core.config import SchedulerConfig
from backfill.core.plan import ScheduledSlice
from backfill.core.request import Request, RequestId, RequestStatus
from backfill.core.slo import SLO
from backfill.kvcache.create import create_kv_cache
from backfill.scheduling.policies.conserve import MARGIN
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler
from tests.builders import linear_cost, make_request
from tests.scheduling.bench import SLO_100_MS, Bench, conserve_policy, offline, sizes, view_of

# A step takes 1 ms a token and a little more; objectives are 1 s and 0.1 s.


def test_beside_online_decodes_the_tpot_objective_is_the_budget() -> None:
    bench = Bench(conserve_policy)
    bench.step(make_request(10, 50, request_id="chat"))
    plan = bench.step(offline(400, request_id="long"))
    assert plan.predicted_s <= 0.1 * (1 - MARGIN)
    assert sizes(plan) == {"chat": 1, "long": 88}


def test_the_budget_is_the_objective_however_late_the_request_is() -> None:
    bench = Bench(conserve_policy)
    bench.step(make_request(10, 50, request_id="chat"), offline(4, request_id="job"))
    bench.clock.advance(0.09)
    assert sizes(bench.step(offline(400, request_id="long"))) == {"chat": 1, "job": 1, "long": 87}


def test_beside_online_prompts_alone_the_ttft_objective_is_the_budget() -> None:
    bench = Bench(conserve_policy)
    plan = bench.step(make_request(30, 5, request_id="chat"), offline(2000, request_id="job"))
    assert sizes(plan) == {"chat": 30, "job": 868}
    assert plan.predicted_s <= 1.0 * (1 - MARGIN)


def test_the_tightest_objective_of_those_that_decode_counts() -> None:
    bench = Bench(conserve_policy)
    bench.step(make_request(4, 50, request_id="tight", slo=SLO(1.0, 0.03)), make_request(4, 50))
    plan = bench.step(offline(400, request_id="job"))
    assert plan.predicted_s <= 0.03 * (1 - MARGIN)
    assert sizes(plan)["job"] == 24


def test_online_prompts_are_cut_to_the_budget_beside_decodes() -> None:
    bench = Bench(conserve_policy)
    bench.step(make_request(4, 50, request_id="chat"))
    bench.add(make_request(200, 5, request_id="prompt"))
    assert [sizes(bench.step())["prompt"] for _ in range(3)] == [88, 88, 24]


def test_without_online_requests_the_largest_batch_runs() -> None:
    bench = Bench(conserve_policy)
    bench.add(offline(900, 2, request_id="job"), offline(900, 2, request_id="other"))
    assert sizes(bench.step()) == {"job": 900, "other": 100}


def test_offline_requests_that_do_not_fit_the_budget_are_preempted_the_latest_first() -> None:
    bench = Bench(conserve_policy)
    jobs = [offline(4, request_id=f"job{i}", arrived_at_s=float(i)) for i in range(40)]
    bench.step(*jobs)
    bench.step(make_request(4, 50, request_id="chat", slo=SLO(ttft_s=1.0, tpot_s=0.02)))
    assert all(each.status is RequestStatus.RUNNING for each in jobs)
    plan = bench.step()
    assert plan.predicted_s <= 0.02 * (1 - MARGIN)
    assert set(sizes(plan)) == {"chat", *(f"job{i}" for i in range(16))}
    preempted = [each.status is RequestStatus.PREEMPTED for each in jobs]
    assert preempted == [False] * 16 + [True] * 24


def test_an_offline_prompt_is_preempted_where_nothing_of_the_budget_is_left() -> None:
    bench = Bench(conserve_policy)
    bench.add(*(make_request(1, 50, request_id=f"chat{i}") for i in range(60)))
    job = offline(2000, request_id="job")
    bench.step(job)
    assert job.status is RequestStatus.RUNNING
    bench.step(make_request(1, 50, slo=SLO(1.0, 0.05)))
    assert job.status is RequestStatus.RUNNING, "the new request does not decode yet"
    plan = bench.step()
    assert "job" not in sizes(plan)
    assert len(plan.slices) == 61, "online decodes run past the budget"
    assert job.status is RequestStatus.PREEMPTED


def decoding(slo: SLO) -> Request:
    """A chat with a token, sampled at 4.99."""
    chat = make_request(4, 8, slo=slo)
    chat.append(7)
    chat.num_computed_tokens, chat.last_token_at_s = 4, 4.99
    return chat


def test_suspended_slices_resume_in_what_the_objectives_leave() -> None:
    policy = conserve_policy(StepPredictor(linear_cost()))
    prompt = make_request(4, 8, slo=SLO_100_MS)
    assert policy.resume_s(view_of(5.0, running=[prompt])) == 0.0, "a prompt does not wait"
    resume_s = policy.resume_s(view_of(5.0, running=[decoding(SLO_100_MS)]))
    assert math.isclose(resume_s, 0.09 * (1 - MARGIN) - 0.001)
    assert policy.resume_s(view_of(5.0)) == math.inf


def test_copies_are_bounded_by_the_objective_of_the_step() -> None:
    policy, slo = conserve_policy(StepPredictor(linear_cost())), SLO(0.7, 0.2)
    prompt = make_request(4, 8, slo=slo)
    assert policy.step_limit_s(view_of(5.0), {}) == math.inf
    assert policy.step_limit_s(view_of(5.0, waiting=[prompt]), {}) == pytest.approx(0.9 * 0.7)
    beside = view_of(5.0, waiting=[prompt], running=[decoding(slo)])
    assert policy.step_limit_s(beside, {}) == pytest.approx(0.9 * 0.2)


def test_only_steps_of_offline_requests_alone_have_safepoints_and_they_discard() -> None:
    policy = conserve_policy(StepPredictor(linear_cost()))
    config = SchedulerConfig(policy="conserve")
    scheduler = Scheduler(
        config, create_kv_cache(config, 100, 4), policy, predictor=StepPredictor(linear_cost()), num_layers=8
    )
    scheduler.add(offline(20, 9, request_id="job"))
    points = scheduler.plan_step(0.0).safepoints
    assert points is not None and not points.suspends, "what is stopped is discarded"
    suspension = scheduler._suspension
    slices = [ScheduledSlice(RequestId("other"), 0, 4, (), True, stoppable=True)]
    assert suspension.safepoints(slices, 0.1) is not None
    slices.append(ScheduledSlice(RequestId("chat"), 0, 4, (), True))
    assert suspension.safepoints(slices, 0.1) is None
    suspension.stops_online_steps = True
    assert suspension.safepoints(slices, 0.1) is not None, "as under slo"
    assert suspension.safepoints(slices[1:], 0.1) is None, "nothing could stop"
