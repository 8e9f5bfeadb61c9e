from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.request import Request, RequestStatus, ServiceClass
from backfill.scheduling.baselines import FcfsPolicy, OnlineOnlyPolicy, PriorityPolicy, RoundRobinPolicy
from backfill.scheduling.create import create_policy
from backfill.scheduling.policy import Policy
from backfill.scheduling.slo_policy import SloPolicy
from tests.builders import linear_cost, make_request
from tests.scheduling.bench import Bench, offline, policy_workloads, sizes, slo_policy


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


@pytest.mark.parametrize("safepoints", [True, False])
def test_without_safepoints_steps_of_offline_work_alone_are_short(safepoints: bool) -> None:
    config = SchedulerConfig(policy="slo", safepoints=safepoints, ttft_slo=2.0)
    policy = create_policy(config, linear_cost(), can_stop=True)
    assert isinstance(policy, SloPolicy)
    limit_s = 2.0 * policy.config.unsafe_ttft_share
    bench = Bench(policy)
    bench.add(offline(900))
    assert (bench.step().predicted_s > limit_s) == safepoints


def test_the_slo_policy_needs_a_profile() -> None:
    with pytest.raises(ConfigError, match="backfill profile"):
        create_policy(SchedulerConfig(policy="slo"), None, can_stop=True)


@settings(max_examples=120, deadline=None)
@given(
    workload=policy_workloads(),
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
    assert bench.scheduler.kv.counts.referenced == 0
    for _, request in workload:
        assert request.status is RequestStatus.FINISHED
