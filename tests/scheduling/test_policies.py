from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.plan import StepPlan
from backfill.core.request import PriorityLevel, Request, RequestStatus, ServiceClass
from backfill.core.slo import SLO
from backfill.kvcache.block_manager import BlockManager
from backfill.scheduling.baselines import FcfsPolicy, OnlineOnlyPolicy, PriorityPolicy, RoundRobinPolicy
from backfill.scheduling.create import create_policy
from backfill.scheduling.policy import Policy, StepView
from backfill.scheduling.scheduler import Scheduler
from backfill.scheduling.slo_policy import SloPolicy, SloPolicyConfig
from tests.builders import ScriptedExecutor, linear_cost, make_info, make_request

BLOCK_SIZE = 4
SLO_100_MS = SLO(ttft_s=1.0, tpot_s=0.1)
MARGIN = SloPolicyConfig(default_slo=SLO_100_MS).margin
OFFLINE = ServiceClass.OFFLINE


class Bench:
    """A scheduler with a scripted executor on a virtual clock that steps take their predicted time of."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        slo: SLO = SLO_100_MS,
        num_blocks: int = 1000,
        max_num_seqs: int = 64,
        can_stop: bool = True,
        step_efficiency: float = 1.0,
        step_s: float = 1e-6,
    ) -> None:
        self.cost = linear_cost(step_s=step_s)
        self.clock = VirtualClock()
        self.executor = ScriptedExecutor(make_info(num_blocks=num_blocks, block_size=BLOCK_SIZE))
        if policy is None:
            policy = SloPolicy(
                SloPolicyConfig(default_slo=slo, step_efficiency=step_efficiency),
                self.cost,
                max_step_tokens=1000,
                can_stop=can_stop,
            )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=1000, max_prefill_chunk_tokens=1000
            ),
            BlockManager(num_blocks, BLOCK_SIZE),
            policy,
            cost=self.cost,
        )

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan_step(self.clock.now_s())
        self.clock.advance(plan.predicted_s)
        self.scheduler.commit(plan, self.executor.run(plan), self.clock.now_s())
        self.scheduler.check_integrity()
        return plan


def sizes(plan: StepPlan) -> dict[str, int]:
    return {scheduled.request_id: scheduled.num_tokens for scheduled in plan.slices}


def offline(prompt_tokens: int = 4, max_tokens: int = 500, **fields: object) -> Request:
    return make_request(prompt_tokens, max_tokens, service_class=OFFLINE, **fields)  # type: ignore[arg-type]


def test_offline_fills_what_the_tpot_objective_leaves_beside_an_online_decode() -> None:
    bench = Bench()
    bench.add(make_request(10, 50, request_id="chat"))
    assert sizes(bench.step()) == {"chat": 10}
    bench.add(offline(400, request_id="long"))
    plan = bench.step()
    assert plan.predicted_s <= 0.1 * (1 - MARGIN)
    assert sizes(plan) == {"chat": 1, "long": 88}  # 90 ms at 1 ms a token, less for the blocks online holds


def test_a_step_that_computes_an_online_prompt_has_no_offline_tokens() -> None:
    bench = Bench()
    bench.add(offline(8, request_id="job"))
    bench.step()
    bench.add(make_request(30, 5, request_id="chat"))
    assert sizes(bench.step()) == {"chat": 30}
    assert sizes(bench.step()) == {"chat": 1, "job": 1}


def test_offline_waits_while_an_online_request_is_late() -> None:
    bench = Bench()
    bench.add(make_request(10, 50, request_id="chat"))
    bench.step()
    bench.add(offline(8, request_id="job"))
    bench.clock.advance(0.2)
    assert sizes(bench.step()) == {"chat": 1}
    assert "job" in sizes(bench.step())


def test_offline_decodes_are_left_out_from_the_least_urgent_when_time_is_short() -> None:
    bench = Bench()
    bench.add(*(offline(4, request_id=f"job{i}", arrived_at_s=float(i)) for i in range(40)))
    bench.step()
    bench.add(make_request(4, 50, request_id="chat", slo=SLO(ttft_s=1.0, tpot_s=0.02)))
    bench.step()
    plan = bench.step()
    assert plan.predicted_s <= 0.02 * (1 - MARGIN)
    assert set(sizes(plan)) == {"chat", *(f"job{i}" for i in range(len(sizes(plan)) - 1))}
    assert bench.scheduler.num_running == 41, "the others keep their blocks"


def test_an_online_request_takes_the_blocks_of_the_offline_request_with_least_work_done() -> None:
    bench = Bench(num_blocks=20)
    much, little = offline(36, 8, request_id="much"), offline(24, 8, request_id="little")
    bench.add(much, little)
    bench.step()
    assert bench.scheduler.num_running == 2
    bench.add(make_request(24, 4, request_id="chat"))
    assert sizes(bench.step()) == {"chat": 24}
    assert little.status is RequestStatus.PREEMPTED
    assert much.status is RequestStatus.RUNNING


def test_nothing_is_preempted_for_an_online_request_that_would_not_fit_even_so() -> None:
    bench = Bench(num_blocks=20)
    bench.add(make_request(48, 8, request_id="running"))
    bench.step()
    job = offline(8, 4, request_id="job")
    bench.add(job)
    bench.step()
    bench.add(make_request(40, 4, request_id="waiting"))
    bench.step()
    assert job.status is RequestStatus.RUNNING


def test_online_requests_are_served_even_where_their_objective_cannot_be_met() -> None:
    bench = Bench()
    hopeless = SLO(ttft_s=0.001, tpot_s=0.001)
    bench.add(*(make_request(40, 5, request_id=f"chat{i}", slo=hopeless) for i in range(3)))
    bench.add(offline(8, request_id="job"))
    first = bench.step()
    assert "chat0" in sizes(first)
    for _ in range(30):
        plan = bench.step()
        decoding = [scheduled for scheduled in plan.slices if scheduled.num_tokens == 1]
        prefill = [scheduled for scheduled in plan.slices if scheduled.num_tokens > 1]
        assert decoding or prefill
        if not bench.scheduler.count_by_class()[ServiceClass.ONLINE][0]:
            break
    assert all(r not in bench.scheduler.requests.by_id for r in ("chat0", "chat1", "chat2"))


def test_without_online_requests_a_step_is_bounded_only_where_it_cannot_be_stopped() -> None:
    for can_stop, num_tokens in ((True, 900), (False, 249)):  # a quarter of the TTFT objective of 1 s
        bench = Bench(can_stop=can_stop)
        bench.add(offline(900, 2, request_id="job"))
        assert sizes(bench.step()) == {"job": num_tokens}


def test_offline_prompts_are_computed_in_steps_no_larger_than_pays() -> None:
    bench = Bench(step_efficiency=0.8, step_s=0.01)
    bench.add(make_request(4, 50, request_id="chat"))
    bench.step()
    bench.add(offline(400, request_id="job"))
    # 10 ms a step and 1 ms a token: 50 tokens cost 1.2 ms each, 1,000 cost 1.01.
    assert sizes(bench.step()) == {"chat": 1, "job": 49}


def test_a_tighter_objective_of_one_request_bounds_the_step() -> None:
    bench = Bench()
    bench.add(make_request(4, 50, request_id="chat", slo=SLO(ttft_s=1.0, tpot_s=0.05)))
    bench.step()
    bench.add(offline(400, request_id="job"))
    assert bench.step().predicted_s <= 0.05


def first_tokens(bench: Bench, chats: Sequence[Request]) -> list[float]:
    """Instants of the chats' first tokens, ascending, once all have one."""
    seen: dict[str, float] = {}
    bench.add(*chats)
    while len(seen) < len(chats):
        bench.step()
        for chat in chats:
            if chat.last_token_at_s is not None:
                seen.setdefault(chat.request_id, bench.clock.now_s())
    return sorted(seen.values())


def test_many_chats_at_once_get_their_first_tokens_as_soon_as_under_fcfs() -> None:
    def of_policy(policy: Policy | None) -> list[float]:
        chats = [make_request(40, 60, request_id=f"chat{i}", arrived_at_s=0.0) for i in range(60)]
        return first_tokens(Bench(policy, step_s=0.02), chats)

    ours, fcfs = of_policy(None), of_policy(FcfsPolicy())
    assert fcfs[-1] > 2 * SLO_100_MS.ttft_s
    for quantile in (0.5, 0.99):
        index = int(quantile * len(fcfs))
        assert ours[index] <= 1.1 * fcfs[index]


def test_newcomers_beside_many_decodes_are_not_left_a_few_tokens_a_step() -> None:
    bench = Bench(step_s=0.02)
    bench.add(*(make_request(4, 200, request_id=f"chat{i}") for i in range(60)))
    bench.step()
    late = make_request(400, 5, request_id="late", arrived_at_s=bench.clock.now_s())
    bench.add(late)
    # 60 decodes leave 10 tokens of a step, in which the prompt would take 3 s.
    assert sizes(bench.step())["late"] == 400


def test_prompts_that_will_be_in_time_leave_other_requests_their_gaps() -> None:
    bench = Bench()
    bench.add(*(make_request(4, 200, request_id=f"chat{i}") for i in range(10)))
    bench.step()
    now_s = bench.clock.now_s()
    bench.add(*(make_request(80, 5, request_id=f"late{i}", arrived_at_s=now_s) for i in range(8)))
    for _ in range(30):
        assert bench.step().predicted_s <= SLO_100_MS.tpot_s


def test_a_prompt_that_would_be_late_even_alone_leaves_other_requests_their_gaps() -> None:
    bench = Bench()
    bench.add(make_request(4, 200, request_id="chat"))
    bench.step()
    bench.add(make_request(2000, 5, request_id="late", arrived_at_s=bench.clock.now_s()))
    for _ in range(30):
        assert bench.step().predicted_s <= SLO_100_MS.tpot_s


def test_a_prompt_that_needs_most_of_its_objective_goes_before_gaps() -> None:
    bench = Bench()
    bench.add(*(make_request(4, 200, request_id=f"chat{i}") for i in range(30)))
    bench.step()
    bench.add(make_request(900, 1, request_id="long", arrived_at_s=bench.clock.now_s()))
    assert sizes(bench.step())["long"] == 900


def test_a_prompt_that_is_late_because_it_waited_goes_before_gaps() -> None:
    bench = Bench()
    bench.add(make_request(4, 200, request_id="chat"))
    bench.step()
    bench.add(make_request(400, 1, request_id="late", arrived_at_s=bench.clock.now_s() - 10.0))
    assert sizes(bench.step())["late"] == 400


def test_slow_steps_make_the_next_ones_smaller() -> None:
    bench = Bench()
    bench.add(make_request(4, 50, request_id="chat"), offline(3000, 2, request_id="job"))
    bench.step()
    before = sizes(bench.step())["job"]
    for _ in range(100):
        bench.scheduler.policy.observe(0.1, 0.15)
    assert sizes(bench.step())["job"] < before * 0.8


def test_an_offline_request_is_promoted_near_the_end_of_its_window() -> None:
    bench = Bench()
    starving = offline(8, 40, request_id="starving", complete_by_s=10_000.0)
    bench.add(make_request(4, 400, request_id="chat"), starving, offline(8, request_id="other"))
    bench.step()
    assert starving.priority_level is PriorityLevel.OFFLINE
    bench.clock.advance(10_000.0 - 3600.0)
    bench.add(make_request(60, 2, request_id="prompt"))
    plan = bench.step()
    assert starving.priority_level is PriorityLevel.PROMOTED
    assert "starving" in sizes(plan), "it is served beside an online prompt"
    assert "other" not in sizes(plan)


def test_free_blocks_are_kept_for_what_online_requests_lately_used() -> None:
    bench = Bench(num_blocks=100)
    bench.add(make_request(200, 2, request_id="chat"))
    bench.step()
    bench.step()
    bench.add(*(offline(40, 4, request_id=f"job{i}") for i in range(9)))
    bench.step()
    assert bench.scheduler.blocks.num_free_blocks >= 40
    bench.clock.advance(1000.0)
    bench.step()
    assert bench.scheduler.blocks.num_free_blocks < 40


def test_online_only_leaves_offline_requests_waiting() -> None:
    bench = Bench(OnlineOnlyPolicy())
    bench.add(offline(request_id="job"), make_request(4, 2, request_id="chat"))
    while bench.scheduler.count_by_class()[ServiceClass.ONLINE] != (0, 0):
        assert "job" not in sizes(bench.step())
    assert bench.step().slices == ()


def test_fcfs_serves_both_classes_in_order_of_arrival() -> None:
    bench = Bench(FcfsPolicy(), max_num_seqs=2)
    bench.add(
        make_request(4, request_id="late", arrived_at_s=2.0),
        offline(request_id="early", arrived_at_s=0.0),
        offline(request_id="middle", arrived_at_s=1.0),
    )
    assert list(sizes(bench.step())) == ["early", "middle"]


def test_priority_does_not_displace_running_offline_requests() -> None:
    bench = Bench(PriorityPolicy(), num_blocks=20)
    bench.add(offline(64, 8, request_id="job"))
    bench.step()
    bench.add(make_request(16, 4, request_id="chat"))
    assert list(sizes(bench.step())) == ["job"]


def test_round_robin_alternates_and_fills_in_when_one_class_has_nothing() -> None:
    bench = Bench(RoundRobinPolicy())
    bench.add(make_request(4, 20, request_id="chat"), offline(4, 3, request_id="job"))
    served = [list(sizes(bench.step())) for _ in range(8)]
    assert served[:6] == [["chat"], ["job"]] * 3
    assert served[6:] == [["chat"], ["chat"]]


def test_default_objectives_are_widened_on_a_slow_device() -> None:
    policy = create_policy(SchedulerConfig(policy="slo"), linear_cost(step_s=1.0), can_stop=True)
    assert isinstance(policy, SloPolicy)
    assert policy.config.default_slo.tpot_s == pytest.approx(4.0, rel=0.01)


def test_the_slo_policy_needs_a_profile() -> None:
    with pytest.raises(ConfigError, match="backfill profile"):
        create_policy(SchedulerConfig(policy="slo"), None, can_stop=True)


def slo_policy() -> Policy:
    return SloPolicy(
        SloPolicyConfig(default_slo=SLO_100_MS), linear_cost(), max_step_tokens=1000, can_stop=True
    )


@st.composite
def workloads(draw: st.DrawFn) -> Sequence[tuple[int, Request]]:
    """(step at which it arrives, request) pairs that each fit a pool of 12 blocks of 4 tokens."""
    arrivals = []
    for i in range(draw(st.integers(1, 10))):
        prompt_tokens = draw(st.integers(1, 36))
        arrivals.append(
            (
                draw(st.integers(0, 12)),
                make_request(
                    prompt_tokens,
                    draw(st.integers(1, 48 - prompt_tokens)),
                    request_id=f"r{i}",
                    service_class=draw(st.sampled_from(ServiceClass)),
                    arrived_at_s=float(draw(st.integers(0, 3))),
                    slo=draw(st.sampled_from((None, SLO(0.05, 0.01), SLO(0.001, 0.001)))),
                    complete_by_s=draw(st.sampled_from((None, 0.1, 3600.01))),
                ),
            )
        )
    return arrivals


@settings(max_examples=120, deadline=None)
@given(
    workload=workloads(),
    make_policy=st.sampled_from([slo_policy, FcfsPolicy, PriorityPolicy, RoundRobinPolicy]),
    max_num_seqs=st.integers(1, 6),
)
def test_under_every_policy_all_requests_end_and_no_block_is_lost(
    workload: Sequence[tuple[int, Request]], make_policy: Callable[[], Policy], max_num_seqs: int
) -> None:
    bench = Bench(make_policy(), num_blocks=12, max_num_seqs=max_num_seqs)
    num_steps = 0
    while num_steps <= 12 or bench.scheduler.has_unfinished:
        bench.add(*(request for arrives_at, request in workload if arrives_at == num_steps))
        plan = bench.step()
        assert len(plan.slices) <= max_num_seqs
        assert plan.slices or not bench.scheduler.has_unfinished, "a step made no progress"
        num_steps += 1
        assert num_steps < 4000
    assert bench.scheduler.blocks.num_free_blocks == 12
    for _, request in workload:
        assert request.status is RequestStatus.FINISHED


@settings(max_examples=60, deadline=None)
@given(workload=workloads())
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
        is_offline = {r.request_id for _, r in workload if r.service_class is OFFLINE}
        promoted = {r.request_id for _, r in workload if r.priority_level is PriorityLevel.PROMOTED}
        placed = {scheduled.request_id for scheduled in plan.slices}
        if placed & (is_offline - promoted) and tightest < math.inf and not placed & promoted:
            assert bench.clock.now_s() - before_s <= tightest


def test_requests_that_ended_do_not_stay_for_their_promotion() -> None:
    bench = Bench()
    for index in range(400):
        bench.add(offline(1, 1, request_id=f"job{index}", complete_by_s=1e6))
        bench.step()
    assert len(bench.scheduler.requests._promotions) < 100


def test_an_online_prompt_is_cut_to_the_slack_of_the_decodes_beside_it() -> None:
    bench = Bench()
    bench.add(make_request(4, 50, request_id="chat"))
    bench.step()
    bench.clock.advance(0.06)  # of the 100 ms that its next token may take
    bench.add(make_request(90, 2, request_id="prompt"))
    plan = bench.step()
    assert sizes(plan)["chat"] == 1
    assert plan.predicted_s <= 0.04


def test_without_online_requests_promoted_ones_take_the_blocks_of_other_offline_work() -> None:
    bench = Bench(num_blocks=20)
    bench.add(offline(60, 8, request_id="job"))
    bench.step()
    starving = offline(16, 4, request_id="starving", complete_by_s=1.0)
    bench.add(starving)
    bench.clock.advance(0.9)
    assert "starving" in sizes(bench.step())


def test_an_online_request_that_is_being_restored_bounds_the_steps() -> None:
    policy = SloPolicy(
        SloPolicyConfig(default_slo=SLO_100_MS), linear_cost(), max_step_tokens=1000, can_stop=True
    )
    chat = make_request(4, 8, arrived_at_s=0.0)
    chat.last_token_at_s = 5.0
    empty = {level: [] for level in PriorityLevel}
    view = StepView(
        now_s=5.01,
        running=empty,
        waiting=empty,
        num_blocks=100,
        online_blocks=2,
        suspended_s=1.0,
        restoring=[chat],
    )
    assert policy.resume_s(view) < SLO_100_MS.tpot_s
    assert all(budget.max_step_s < SLO_100_MS.tpot_s for budget in policy.next_budgets(view))
    alone = replace(view, restoring=())
    assert policy.resume_s(alone) == math.inf
    assert any(budget.max_step_s == math.inf for budget in policy.next_budgets(alone))
