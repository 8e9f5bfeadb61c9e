from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from backfill.core.request import PriorityLevel, Request, RequestStatus, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.model import PiecewiseLinear
from backfill.scheduling.policies.baselines import FcfsPolicy
from backfill.scheduling.policy import Policy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.preemption import Preemptible, may_be_preempted
from tests.builders import linear_cost, make_request
from tests.scheduling.bench import (
    MARGIN,
    SLO_100_MS,
    Bench,
    offline,
    policy_workloads,
    sizes,
    slo_policy,
    view_of,
)
from tests.shared import examples


def test_offline_fills_what_the_tpot_objective_leaves_beside_an_online_decode() -> None:
    bench = Bench()
    assert sizes(bench.step(make_request(10, 50, request_id="chat"))) == {"chat": 10}
    plan = bench.step(offline(400, request_id="long"))
    assert plan.predicted_s <= 0.1 * (1 - MARGIN)
    assert sizes(plan) == {"chat": 1, "long": 88}  # 90 ms at 1 ms a token, less for the blocks online holds


def test_offline_decodes_lengthen_a_step_with_an_online_prompt_by_a_fifth_at_most() -> None:
    bench = Bench()
    bench.step(*(offline(8, request_id=f"job{i}") for i in range(10)))
    bench.add(offline(40, request_id="next"), make_request(30, 5, request_id="chat"))
    assert sizes(bench.step()) == {"chat": 30, **{f"job{i}": 1 for i in range(6)}}, "and no offline prompt"
    assert len(sizes(bench.step())) == 12


def test_offline_waits_while_an_online_request_is_late() -> None:
    bench = Bench()
    bench.step(make_request(10, 50, request_id="chat"))
    bench.add(offline(8, request_id="job"))
    bench.clock.advance(0.2)
    assert sizes(bench.step()) == {"chat": 1}
    assert "job" in sizes(bench.step())


def test_offline_decodes_are_left_out_from_the_least_urgent_when_time_is_short() -> None:
    bench = Bench()
    bench.step(*(offline(4, request_id=f"job{i}", arrived_at_s=float(i)) for i in range(40)))
    bench.step(make_request(4, 50, request_id="chat", slo=SLO(ttft_s=1.0, tpot_s=0.02)))
    plan = bench.step()
    assert plan.predicted_s <= 0.02 * (1 - MARGIN)
    assert set(sizes(plan)) == {"chat", *(f"job{i}" for i in range(len(sizes(plan)) - 1))}
    assert len(bench.scheduler.requests.running) == 41, "the others keep their blocks"


def test_without_online_requests_a_step_is_bounded_only_where_it_cannot_be_stopped() -> None:
    for can_stop, num_tokens in (
        (True, 900),
        (False, 222),
    ):  # a quarter of the TTFT objective of 1 s, less 11 %
        bench = Bench(can_stop=can_stop)
        assert sizes(bench.step(offline(900, 2, request_id="job"))) == {"job": num_tokens}


def test_offline_prompts_are_computed_in_steps_no_larger_than_pays() -> None:
    """10 ms a step and 1 ms a token: 50 tokens cost 1.2 ms each, 1,000 cost 1.01."""
    for chats in ([], [make_request(4, 50, request_id="chat")]):
        bench = Bench(step_efficiency=0.8, step_s=0.01)
        bench.step(*chats)
        assert bench.step(offline(400)).num_tokens == 50


def test_of_a_burst_as_many_chats_as_possible_meet_both_objectives() -> None:
    def served(policy: Policy | None) -> tuple[int, float, float]:
        """Chats in time, when half of them have their first token, and when all have ended."""
        bench = Bench(policy, step_s=0.02)
        chats = [make_request(40, 60, request_id=f"chat{i}") for i in range(60)]
        bench.add(*chats)
        while bench.scheduler.has_unfinished:
            bench.step()
        firsts_s = [each.first_token_at_s or math.inf for each in chats]
        lasts_s = [each.last_token_at_s or math.inf for each in chats]
        num_in_time = sum(
            first_s <= SLO_100_MS.ttft_s and (last_s - first_s) / 59 <= SLO_100_MS.tpot_s
            for first_s, last_s in zip(firsts_s, lasts_s, strict=True)
        )
        return num_in_time, sorted(firsts_s)[30], max(lasts_s)

    ours, fcfs = served(None), served(FcfsPolicy())
    assert fcfs[0] == 0
    assert ours[0] >= 15, "2.4 s of prompts, and a TTFT objective of 1 s"
    assert ours[1] <= 1.2 * fcfs[1]
    assert ours[2] <= 1.1 * fcfs[2], "the others lose no throughput"


def test_a_short_prompt_passes_a_long_one_that_has_begun() -> None:
    bench = Bench(slo=SLO(ttft_s=9.0, tpot_s=0.2), max_num_batched_tokens=100)
    assert sizes(bench.step(make_request(300, 1, request_id="long"))) == {"long": 100}
    bench.add(make_request(60, 1, request_id="short", arrived_at_s=0.1))
    assert sizes(bench.step()) == {"short": 60, "long": 40}


def test_short_prompts_without_end_pass_a_long_one_for_half_of_its_objective() -> None:
    """They leave it a tenth of each step."""
    slo = SLO(ttft_s=4.0, tpot_s=0.1)
    bench, long = Bench(slo=slo, max_num_batched_tokens=100), make_request(1000, 1, request_id="long")
    bench.step(long)
    while long.first_token_at_s is None:
        bench.step(make_request(90, 1, arrived_at_s=bench.clock.now_s()))
    assert 1.5 < long.first_token_at_s <= 2.0


def test_what_another_prompt_computes_meanwhile_makes_a_waiting_one_short() -> None:
    prompt, slo = list(range(60)), SLO(ttft_s=9.0, tpot_s=0.1)
    bench = Bench(slo=slo, max_num_batched_tokens=60)
    choices = [make_request(60, 1, request_id=f"choice{i}", prompt_token_ids=prompt) for i in range(2)]
    assert sizes(bench.step(*choices)) == {"choice0": 60}
    bench.add(*(make_request(50, 1, request_id=f"short{i}") for i in range(3)))
    assert sizes(bench.step()) == {"choice1": 4, "short0": 50, "short1": 6}


def test_each_step_asks_the_cache_again_about_some_that_wait() -> None:
    """Of the six that wait the last one became short. The others take five steps."""
    prompt, slo = list(range(60)), SLO(ttft_s=9.0, tpot_s=0.1)
    bench = Bench(slo=slo, max_num_batched_tokens=60)
    again = make_request(60, 1, prompt_token_ids=prompt, slo=SLO(ttft_s=19.0, tpot_s=0.1))
    bench.step(make_request(60, 1, prompt_token_ids=prompt), again)
    bench.add(*(make_request(59, 1) for _ in range(5)))
    assert again.num_pending_tokens == 60
    assert again.request_id in {**sizes(bench.step()), **sizes(bench.step())}


def test_what_the_cache_has_lost_meanwhile_is_pending_again() -> None:
    prompt, slo = list(range(60)), SLO(ttft_s=9.0, tpot_s=0.1)
    bench = Bench(slo=slo, num_blocks=20, max_num_batched_tokens=38)
    bench.step(make_request(60, 1, prompt_token_ids=prompt))
    bench.step()
    again = make_request(60, 1, prompt_token_ids=prompt, priority=1)
    bench.add(make_request(76, 4), again)
    assert again.num_pending_tokens == 4
    bench.step()
    bench.step()
    assert again.first_scheduled_at_s is None and again.num_pending_tokens > 4


def test_late_answers_without_room_take_the_blocks_of_those_they_preempt() -> None:
    def served(policy: Policy | None) -> tuple[float, int]:
        """Seconds for 20 late requests of which the pool holds 8, and preemptions."""
        bench = Bench(policy, num_blocks=200, step_s=0.02)
        late = [make_request(20, 80, request_id=f"late{i}", arrived_at_s=-10.0) for i in range(20)]
        bench.add(*late)
        while bench.scheduler.has_unfinished:
            bench.step()
        return bench.clock.now_s(), sum(each.num_preemptions for each in late)

    (ours_s, num_ours), (fcfs_s, num_fcfs) = served(None), served(FcfsPolicy())
    assert ours_s <= 1.05 * fcfs_s
    assert num_ours <= num_fcfs


@pytest.mark.parametrize("spread_s", [0.0, 0.3], ids=["at-once", "as-sockets-bring-it"])
def test_a_burst_that_is_nearly_all_late_is_served_as_fast_as_without_objectives(spread_s: float) -> None:
    # A step of the objective's length computes a third as many tokens a second as a large one.
    rows_s = PiecewiseLinear((1, 10, 100, 1000), (0.06, 0.08, 0.3, 2.0))

    def served(policy: type[FcfsPolicy] | None) -> tuple[float, float]:
        """When half of the chats have their first token, and when all have ended."""
        bench = Bench(policy and policy(), cost=replace(linear_cost(), rows_s=rows_s))
        chats = [
            make_request(40, 20, request_id=f"chat{i}", arrived_at_s=i / 60 * spread_s - spread_s)
            for i in range(60)
        ]
        bench.add(*chats)
        while bench.scheduler.has_unfinished:
            bench.step()
        firsts_s = sorted(each.first_token_at_s or math.inf for each in chats)
        return firsts_s[30], max(each.last_token_at_s or math.inf for each in chats)

    (first_s, last_s), (fcfs_first_s, fcfs_last_s) = served(None), served(FcfsPolicy)
    assert first_s <= 1.15 * fcfs_first_s
    assert last_s <= 1.05 * fcfs_last_s


def test_late_answers_alone_decode_together_as_far_as_an_arrival_can_wait() -> None:
    """A step of 60 takes longer than a gap may, and steps of prompts saturate far below."""
    for row_s, num_decodes in ((0.004, 60), (0.02, 19)):
        sampled_s = PiecewiseLinear((0, 10, 100), (0.0, 0.05, 0.1))
        bench = Bench(cost=replace(linear_cost(token_s=row_s), sampled_s=sampled_s))
        bench.add(*(make_request(4, 40, request_id=f"chat{i}", arrived_at_s=-9.0) for i in range(60)))
        while any(each.first_token_at_s is None for each in bench.scheduler.requests.by_id.values()):
            bench.step()
        plan = bench.step()
        assert len(sizes(plan)) == num_decodes, plan.predicted_s


def test_late_answers_do_not_keep_one_that_came_after_them_from_its_gaps() -> None:
    bench = Bench(cost=linear_cost(token_s=0.004), num_blocks=4000)
    bench.add(*(make_request(4, 400, request_id=f"late{i}", arrived_at_s=-9.0) for i in range(60)))
    for _ in range(10):
        bench.step()
    chat = make_request(4, 40, request_id="chat", arrived_at_s=bench.clock.now_s())
    bench.step(chat)
    bench.clock.advance(0.11)  # a gap that is just missed
    gaps_s = []
    while chat.finish_reason is None:
        before_s = chat.last_token_at_s or math.inf
        bench.step()
        gaps_s.append((chat.last_token_at_s or 0.0) - before_s)
    assert gaps_s[0] > 0.1 >= max(gaps_s[1:])


@pytest.mark.parametrize("best", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_offline_work_is_not_held_to_a_few_tokens_by_a_cost_model_of_a_busy_machine(best: int) -> None:
    """Larger steps than the best one look worse, so none would be planned that shows what they take."""
    knots = (1, 16, 32, 64, 128, 256, 512)
    rows_s = PiecewiseLinear(knots, tuple(0.003 * x * (1 if x <= best else 1.5) + 0.001 for x in knots))
    bench = Bench(cost=replace(linear_cost(), rows_s=rows_s), num_blocks=7000)
    bench.add(*(offline(40, 500) for _ in range(100)))
    for _ in range(200):
        bench.step()
    assert len(bench.scheduler.requests.running) > 40


def test_a_short_prompt_with_a_tight_objective_goes_before_an_earlier_long_one() -> None:
    bench = Bench(num_blocks=2000)
    long = make_request(900, 2, request_id="long", slo=SLO(60.0, 1.0))
    short = make_request(50, 2, request_id="short", slo=SLO(0.1, 1.0))
    plan = bench.step(long, short)
    assert list(sizes(plan)) == ["short", "long"]
    assert plan.predicted_s <= 0.1
    assert short.first_token_at_s is not None


@pytest.mark.parametrize(
    ("step_s", "least_s", "most_s"),
    [(1e-6, 0.08, 0.1), (0.015, 0.2, 0.22), (0.04, 0.4, 0.5)],
    ids=["as-beside-decodes", "what-pays", "half-of-ttft"],
)
def test_a_step_of_prompts_alone_leaves_time_for_who_arrives_in_it(
    step_s: float, least_s: float, most_s: float
) -> None:
    bench = Bench(num_blocks=2000, step_s=step_s)
    bench.add(make_request(900, 2, request_id="long", slo=SLO(60.0, 1.0)))
    assert least_s < bench.step().predicted_s <= most_s


def test_one_tight_gap_objective_does_not_stop_the_prompts_of_others() -> None:
    bench = Bench(step_s=0.01)
    bench.step(make_request(4, 50, request_id="greedy", slo=SLO(ttft_s=1.0, tpot_s=0.001)))
    bench.add(make_request(300, 2, request_id="chat"))
    num_steps = 0
    while sizes(bench.step()).get("chat", 0) != 1:
        num_steps += 1
        assert num_steps < 60
    assert bench.clock.now_s() <= SLO_100_MS.ttft_s


def test_what_decodes_have_banked_goes_to_prompts_that_would_be_late() -> None:
    def first_token_s(num_steps_before: int) -> float:
        bench = Bench()
        bench.add(*(make_request(4, 200, request_id=f"chat{i}") for i in range(30)))
        for _ in range(num_steps_before):
            bench.step()
        came_at_s = bench.clock.now_s()
        prompt = make_request(700, 1, request_id="prompt", arrived_at_s=came_at_s)
        bench.add(prompt)
        while prompt.first_token_at_s is None:
            bench.step()
        return prompt.first_token_at_s - came_at_s

    assert first_token_s(40) <= 1.0, "30 decodes took 31 ms a step, of the 100 ms that they may"
    assert first_token_s(1) > 1.0, "they have banked nothing, and keep their gaps"


def test_a_prompt_that_would_be_late_even_alone_leaves_other_requests_their_gaps() -> None:
    bench = Bench()
    bench.step(make_request(4, 200, request_id="chat"))
    late = make_request(2000, 5, request_id="late", arrived_at_s=bench.clock.now_s())
    bench.add(late)
    for _ in range(30):
        assert bench.step().predicted_s <= SLO_100_MS.tpot_s
    assert late.priority_level is PriorityLevel.RELEGATED
    assert late.first_token_at_s is not None, "it is served with what is left"


def test_a_relegated_request_goes_after_one_that_can_be_in_time_and_before_offline_work() -> None:
    bench = Bench()
    late = make_request(40, 3, request_id="late", arrived_at_s=-10.0)
    bench.add(offline(8, request_id="job"), late)
    bench.clock.advance(0.0)
    plan = bench.step()
    assert late.priority_level is PriorityLevel.RELEGATED
    assert list(sizes(plan)) == ["late"], "an offline prompt waits"
    bench.add(make_request(300, 3, request_id="chat", arrived_at_s=bench.clock.now_s()))
    assert next(iter(sizes(bench.step()))) == "chat"


def test_the_priority_that_clients_give_goes_before_the_number_of_prompts_in_time() -> None:
    bench = Bench()
    vip = make_request(600, 2, request_id="vip", priority=-10)
    others = [make_request(300, 2, request_id=f"other{i}", priority=10) for i in range(3)]
    bench.add(*others, vip)
    while vip.first_token_at_s is None:
        bench.step()
    assert vip.priority_level is PriorityLevel.ONLINE
    assert vip.first_token_at_s <= SLO_100_MS.ttft_s


def test_a_burst_on_an_idle_server_is_admitted_only_as_far_as_gaps_allow() -> None:
    slo = SLO(ttft_s=2.0, tpot_s=0.02)
    bench = Bench(slo=slo)
    bench.step(*(make_request(4, 30, request_id=f"chat{i}") for i in range(60)))
    for _ in range(20):
        bench.step()
        assert len(bench.scheduler.requests.running) * 0.001 <= slo.tpot_s, "of which each decodes a token"


def test_a_request_that_computes_lost_kv_again_goes_first_and_takes_no_time_from_prompts() -> None:
    bench = Bench(slo=SLO(ttft_s=1.0, tpot_s=0.5))
    old = make_request(100, 50, request_id="old")
    bench.add(old)
    for _ in range(5):
        bench.step()
    bench.scheduler._preemption.preempt_without_kv(old)
    old.cache_salt = "lost"  # what it computed is found no more
    bench.clock.advance(5.0)
    now_s = bench.clock.now_s()
    plan = bench.step(*(make_request(200, 2, request_id=f"new{i}", arrived_at_s=now_s) for i in range(3)))
    assert sizes(plan)["old"] == 105, "its known tokens, in one chunk"
    assert plan.num_tokens > 300, "its deadline has passed and bounds nothing"


def test_relegated_answers_stand_still_no_longer_than_a_first_token_may_take() -> None:
    bench = Bench(num_blocks=8000)
    bench.add(*(make_request(300, 20, request_id=f"late{i}", arrived_at_s=-10.0) for i in range(40)))
    while bench.scheduler.has_unfinished:
        bench.step()
        now_s = bench.clock.now_s()
        for request in bench.scheduler.requests.running.values():
            if request.last_token_at_s is not None:
                assert now_s - request.last_token_at_s <= SLO_100_MS.ttft_s + 1.0


def test_a_relegated_request_is_preempted_for_others_three_times_at_most() -> None:
    late = make_request(40, 3, request_id="late")
    late.priority_level = PriorityLevel.RELEGATED
    levels = Preemptible(frozenset(PriorityLevel))
    assert [may_be_preempted(late, levels) for late.num_preemptions in range(5)] == [True] * 3 + [False] * 2
    late.priority_level = PriorityLevel.OFFLINE
    assert may_be_preempted(late, levels)


def test_slow_steps_make_the_next_ones_smaller() -> None:
    bench = Bench()
    bench.step(make_request(4, 50, request_id="chat"), offline(3000, 2, request_id="job"))
    before = sizes(bench.step())["job"]
    for _ in range(100):
        bench.predictor.observe(0.1, 0.15)
    assert sizes(bench.step())["job"] < before * 0.8


def test_an_offline_request_is_promoted_near_the_end_of_its_window() -> None:
    bench = Bench()
    starving = offline(8, 400, request_id="starving", complete_by_s=10_000.0)
    bench.step(make_request(4, 400, request_id="chat"), offline(800, request_id="other"), starving)
    assert starving.priority_level is PriorityLevel.OFFLINE
    bench.clock.advance(10_000.0 - 3600.0)
    bench.step()
    assert starving.priority_level is PriorityLevel.PROMOTED
    plan = bench.step()
    assert list(sizes(plan))[:2] == ["chat", "starving"], "it goes before other offline work"


def test_promoted_work_keeps_the_objectives_of_online_requests() -> None:
    bench = Bench()
    bench.step(make_request(4, 400, request_id="chat"))
    jobs = [offline(400, 4, request_id=f"job{i}", complete_by_s=1.0) for i in range(4)]
    bench.add(*jobs)
    bench.clock.advance(0.06)
    assert bench.step().predicted_s <= 0.04, "the chat has waited for 60 ms of 100"
    bench.add(make_request(20, 2, request_id="prompt", arrived_at_s=bench.clock.now_s()))
    assert set(sizes(bench.step())) == {"chat", "prompt"}
    while any(job.status is not RequestStatus.FINISHED for job in jobs):
        assert bench.step().predicted_s <= SLO_100_MS.tpot_s


def test_as_many_blocks_as_online_requests_recently_used_are_kept_free() -> None:
    bench = Bench(num_blocks=100, slo=SLO(ttft_s=1.0, tpot_s=0.5))
    bench.step(make_request(200, 2, request_id="chat"))
    bench.step()
    bench.step(*(offline(40, 4, request_id=f"job{i}") for i in range(9)))
    assert bench.scheduler.kv.counts.referenced <= 60
    bench.clock.advance(1000.0)
    bench.step()
    assert bench.scheduler.kv.counts.referenced > 60


def test_what_is_protected_for_online_requests_need_not_be_kept_free_too() -> None:
    bench = Bench(num_blocks=100)
    prompt = list(range(3, 163))
    for index in range(12):
        bench.step(make_request(prompt_token_ids=prompt, max_tokens=2, request_id=f"chat{index}"))
        bench.step()
    assert bench.scheduler.kv.counts.protected >= 39
    bench.step(*(offline(40, 4, request_id=f"job{i}") for i in range(9)))
    assert bench.scheduler.kv.counts.referenced >= 44, "about half the pool is protected, the rest is not"


@settings(max_examples=examples(60), deadline=None)
@given(workload=policy_workloads())
def test_offline_slices_never_take_a_step_past_the_tightest_objective(
    workload: Sequence[tuple[int, Request]],
) -> None:
    bench = Bench(num_blocks=48)
    for num_steps in range(60):
        bench.add(*(request for arrives_at, request in workload if arrives_at == num_steps))
        running = bench.scheduler.requests.running.values()
        online = [r for r in running if r.priority_level is PriorityLevel.ONLINE]
        tightest = min(
            ((r.slo or SLO_100_MS).tpot_s for r in online if r.last_token_at_s is not None),
            default=math.inf,
        )
        before_s = bench.clock.now_s()
        plan = bench.step()
        is_offline = {r.request_id for _, r in workload if r.service_class is ServiceClass.OFFLINE}
        promoted = {r.request_id for _, r in workload if r.priority_level is PriorityLevel.PROMOTED}
        scheduled_ids = {scheduled.request_id for scheduled in plan.slices}
        if scheduled_ids & (is_offline - promoted) and tightest < math.inf and not scheduled_ids & promoted:
            assert bench.clock.now_s() - before_s <= tightest


def test_finished_requests_do_not_stay_in_the_heap_of_promotions() -> None:
    bench = Bench()
    for index in range(400):
        bench.step(offline(1, 1, request_id=f"job{index}", complete_by_s=1e6))
    assert len(bench.scheduler.requests._changes) < 100


def test_an_online_prompt_is_cut_to_the_slack_of_the_decodes_beside_it() -> None:
    bench = Bench()
    bench.step(make_request(4, 50, request_id="chat"))
    bench.clock.advance(0.06)  # of the 100 ms that its next token may take
    plan = bench.step(make_request(90, 2, request_id="prompt"))
    assert sizes(plan)["chat"] == 1
    assert plan.predicted_s <= 0.04


def test_without_online_requests_promoted_ones_preempt_other_offline_work() -> None:
    bench = Bench(num_blocks=20)
    bench.step(offline(60, 8, request_id="job"))
    starving = offline(16, 4, request_id="starving", complete_by_s=1.0)
    bench.add(starving)
    bench.clock.advance(0.9)
    assert "starving" in sizes(bench.step())


def test_requests_that_are_restored_or_wait_bound_steps_while_they_can_be_in_time() -> None:
    policy = slo_policy(StepPredictor(linear_cost()))
    chat, prompt = make_request(4, 8, slo=SLO_100_MS), make_request(300, 8, slo=SLO_100_MS, arrived_at_s=6.0)
    chat.last_token_at_s = 5.0
    restoring = view_of(5.01, restoring=[chat])
    assert policy.resume_s(restoring) < SLO_100_MS.tpot_s
    assert policy.resume_s(replace(restoring, restoring=())) == math.inf
    computed = {prompt.request_id: 300}
    assert 0.6 < policy.step_limit_s(view_of(6.2, waiting=[prompt]), computed) < 0.8
    # No step that begins now brings the token of a late request that is being restored.
    assert policy.step_limit_s(view_of(6.0, running=[prompt], restoring=[chat]), computed) > 0.8
    assert policy.resume_s(view_of(6.0, restoring=[chat])) == math.inf
    # Nor can one compute a prompt that is being restored; one that waits or runs it can.
    assert 0.6 < policy.resume_s(view_of(6.2, restoring=[prompt])) < 0.8
    assert policy.resume_s(view_of(6.2, running=[prompt], restoring=[chat])) == 0.0
