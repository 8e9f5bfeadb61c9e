from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.config import EngineConfig, PolicyName, SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.request import MAX_FORCED_TOKENS, Request, RequestStatus, ServiceClass
from backfill.core.slo import SLO
from backfill.scheduling.policies.baselines import (
    FcfsPolicy,
    OnlineOnlyPolicy,
    PriorityPolicy,
    RoundRobinPolicy,
)
from backfill.scheduling.policies.create import create_policy
from backfill.scheduling.policies.slo import UNSTOPPABLE_TTFT_SHARE
from backfill.scheduling.policy import Policy
from backfill.scheduling.prediction import StepPredictor
from tests.builders import linear_cost, make_request
from tests.scheduling.bench import (
    SLO_100_MS,
    Bench,
    bros_policy,
    conserve_policy,
    offline,
    policy_workloads,
    sizes,
    slo_policy,
)
from tests.shared import examples


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


def test_priority_does_not_preempt_running_offline_requests() -> None:
    bench = Bench(PriorityPolicy(), num_blocks=20)
    bench.step(offline(64, 8, request_id="job"))
    assert list(sizes(bench.step(make_request(16, 4, request_id="chat")))) == ["job"]


def test_round_robin_alternates_and_fills_in_when_one_class_has_nothing() -> None:
    bench = Bench(RoundRobinPolicy())
    assert not sizes(bench.step()), "which is no turn"
    bench.add(make_request(4, 20, request_id="chat"), offline(4, 3, request_id="job"))
    served = [list(sizes(bench.step())) for _ in range(8)]
    assert served[:6] == [["chat"], ["job"]] * 3
    assert served[6:] == [["chat"], ["chat"]]


@pytest.mark.parametrize("safepoints", [True, False])
def test_without_safepoints_steps_of_offline_work_alone_are_short(safepoints: bool) -> None:
    config = SchedulerConfig(policy="slo", safepoints=safepoints)
    slo = SLO(2.0, 0.1)
    bench = Bench(
        lambda predictor: create_policy(config, predictor, default_slo=slo, can_stop=True), step_s=0.1
    )
    limit_s = 2.0 * UNSTOPPABLE_TTFT_SHARE
    assert (bench.step(offline(900)).predicted_s > limit_s) == safepoints


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_the_server_knows_which_policies_relegate(name: PolicyName) -> None:
    config, predictor = SchedulerConfig(policy=name), StepPredictor(linear_cost(step_s=0.1))
    policy = create_policy(config, predictor, default_slo=SLO_100_MS, can_stop=True)
    assert config.relegates == policy.relegates


@pytest.mark.parametrize("name", ["slo", "conserve", "bros"])
def test_policies_with_objectives_need_a_profile(name: PolicyName) -> None:
    with pytest.raises(ConfigError, match=f"`policy` {name} needs a cost profile.*backfill profile"):
        create_policy(SchedulerConfig(policy=name), None, default_slo=SLO_100_MS, can_stop=True)


@pytest.mark.parametrize("name", ["slo", "conserve", "bros"])
def test_policies_with_objectives_checkpoint_by_default(name: PolicyName) -> None:
    config = EngineConfig(scheduler=SchedulerConfig(policy=name)).with_checkpointing()
    assert config.scheduler.checkpointing == ("lazy" if name == "bros" else "adaptive")


def test_a_papers_policy_sets_the_defaults_of_its_system_and_a_user_may_still_choose() -> None:
    shared = {name: SchedulerConfig(policy=name) for name in ("slo", "conserve", "bros", "priority")}  # type: ignore[arg-type]
    assert [name for name, each in shared.items() if each.shares_blocks] == ["slo", "bros"]
    assert [name for name, each in shared.items() if not each.suspends] == ["conserve"]
    assert SchedulerConfig(policy="conserve", preemption="suspend").suspends
    assert not SchedulerConfig(policy="bros", kv_layout="unidirectional").shares_blocks
    chosen = EngineConfig(scheduler=SchedulerConfig(policy="bros", checkpointing="eager"))
    assert chosen.with_checkpointing() == chosen


MAKERS: dict[str, Callable[[StepPredictor], Policy]] = {
    "slo": slo_policy,
    "conserve": conserve_policy,
    "bros": bros_policy,
    "fcfs": lambda _: FcfsPolicy(),
    "priority": lambda _: PriorityPolicy(),
    "round-robin": lambda _: RoundRobinPolicy(),
}


@pytest.mark.parametrize(
    ("policy", "preempted"),
    [(None, "little"), (bros_policy, "little"), (conserve_policy, "late")],
    ids=["slo", "bros", "conserve"],
)
def test_whom_an_online_request_preempts(
    policy: Callable[[StepPredictor], Policy] | None, preempted: str
) -> None:
    """The request that loses least, or the latest."""
    bench = Bench(policy, num_blocks=20)
    jobs = {
        "little": offline(24, 8, request_id="little", arrived_at_s=-1.0),
        "late": offline(36, 8, request_id="late"),
    }
    bench.step(*jobs.values())
    assert sizes(bench.step(make_request(24, 4, request_id="chat")))["chat"] == 24
    assert [name for name, job in jobs.items() if job.status is RequestStatus.PREEMPTED] == [preempted]


@settings(max_examples=examples(28), deadline=None)
@given(
    workload=policy_workloads(),
    name=st.sampled_from(sorted(MAKERS)),
    max_num_seqs=st.integers(1, 6),
    max_forced=st.sampled_from((0, 0, 3, MAX_FORCED_TOKENS)),
)
def test_under_every_policy_all_requests_end_and_no_block_is_lost(
    workload: Sequence[tuple[int, Request]], name: str, max_num_seqs: int, max_forced: int
) -> None:
    bench = Bench(MAKERS[name], num_blocks=12, max_num_seqs=max_num_seqs)
    bench.executor.max_forced = max_forced
    num_steps = 0
    while num_steps <= 12 or bench.scheduler.has_unfinished:
        plan = bench.step(*(request for arrives_at, request in workload if arrives_at == num_steps))
        assert len(plan.slices) <= max_num_seqs
        assert plan.slices or not bench.scheduler.has_unfinished, "a step made no progress"
        num_steps += 1
        assert num_steps < 4000
    assert bench.scheduler.kv.counts.referenced == 0
    for _, request in workload:
        assert request.status is RequestStatus.FINISHED
        assert request.output_token_ids == alone(request), "not the tokens that it has alone, one in a step"


def alone(request: Request) -> list[int]:
    bench = Bench(FcfsPolicy())
    copied = make_request(
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        request_id=request.request_id,
    )
    bench.add(copied)
    while bench.scheduler.has_unfinished:
        bench.step()
    return copied.output_token_ids


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_forced_tokens_are_computed_with_the_token_before_them(name: str) -> None:
    bench = Bench(MAKERS[name])
    bench.executor.max_forced = MAX_FORCED_TOKENS
    chat, job = make_request(8, 60, request_id="chat"), offline(8, 60, request_id="job")
    bench.add(chat, job)
    num_steps = 0
    while bench.scheduler.has_unfinished:
        plan = bench.step()
        num_steps += bool(plan.slices)
        for scheduled in plan.slices:
            assert scheduled.samples and (scheduled.num_tokens <= 1 + MAX_FORCED_TOKENS)
    assert num_steps < (60 if name == "round-robin" else 30)
    assert chat.output_token_ids == alone(chat) and job.output_token_ids == alone(job)


def served_beside_chats(bench: Bench, jobs: Sequence[Request], end_s: float) -> Sequence[Request]:
    """Run the jobs beside chats that take about a fifth of the time. Returns: the chats."""
    chats: list[Request] = []
    bench.add(*jobs)
    while bench.clock.now_s() < end_s:
        while len(chats) * 0.2 <= bench.clock.now_s():
            chats.append(make_request(20, 20, request_id=f"chat{len(chats)}", arrived_at_s=len(chats) * 0.2))
            bench.add(chats[-1])
        if not bench.step().slices:
            bench.clock.advance(0.01)
    while bench.scheduler.has_unfinished:
        bench.step()
    return chats


@pytest.mark.parametrize("name", ["slo", "conserve", "bros"])
def test_no_request_waits_without_bound_while_the_load_is_under_the_capacity(name: str) -> None:
    bench, ended_at_s = Bench(MAKERS[name], num_blocks=600), {}
    jobs = [offline(num_tokens, 20, request_id=f"job{num_tokens}") for num_tokens in (4, 40, 400, 900)]
    chats = served_beside_chats(bench, jobs, 4.0)
    for request in (*jobs, *chats):
        assert request.last_token_at_s is not None
        ended_at_s[request.request_id] = request.last_token_at_s
    assert max(ended_at_s[job.request_id] for job in jobs) < 3.2, "all offline work takes 1.4 s alone"
    for chat in chats:
        assert ended_at_s[chat.request_id] <= chat.arrived_at_s + 1.0 + 19 * 0.1


@settings(max_examples=examples(20), deadline=None)
@given(workload=policy_workloads(), name=st.sampled_from(("slo", "conserve", "bros")))
def test_plans_follow_from_snapshots_and_earlier_steps_alone(
    workload: Sequence[tuple[int, Request]], name: str
) -> None:
    benches = [Bench(MAKERS[name], num_blocks=12, max_num_seqs=4) for _ in range(2)]
    loads = [copy.deepcopy(workload) for _ in benches]
    for num_steps in range(60):
        for bench, load in zip(benches, loads, strict=True):
            bench.add(*(request for arrives_at, request in load if arrives_at == num_steps))
        asked = benches[1].scheduler
        view = asked._planner._snapshot(benches[1].clock.now_s())
        for _ in range(3):  # questions change nothing
            asked.policy.step_limit_s(view, {})
            asked.policy.resume_s(view)
            for request in asked.requests.by_id.values():
                asked.policy.preemption_key(request, 3.0)
        first, second = (bench.step() for bench in benches)
        assert first == second
