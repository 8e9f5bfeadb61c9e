"""Drains: the KV pool gives memory back to the weights while requests run."""

from __future__ import annotations

import pytest

from backfill.core.request import Request, ServiceClass
from backfill.offloading.residency import Residency, ResidencyPolicy, Situation
from backfill.scheduling import memory_division
from tests.builders import make_request
from tests.scheduling.test_two_tier_schedules import Run, Setting

ONLINE, OFFLINE = ServiceClass.ONLINE, ServiceClass.OFFLINE


class GivenResidency(ResidencyPolicy):
    """Keeps to its target, which a test sets."""

    def choose(self, situation: Situation) -> Residency:
        return self.target


def grown(setting: Setting, *shapes: tuple[int, int]) -> tuple[Run, GivenResidency, list[Request]]:
    """A pool of 24 blocks, which has had 12, and offline requests that run in it."""
    info = setting.executor(0).info
    policy = GivenResidency(info.residencies, info.num_layers)
    run = Run(setting, 0, policy)
    policy.target = policy.choices[0]
    requests = [make_request(*shape, service_class=OFFLINE) for shape in shapes]
    for request in requests:
        run.scheduler.add(request)
    while any(each.num_computed_tokens < each.num_prompt_tokens for each in requests):
        run.step()
    assert run.scheduler.kv.num_blocks == 24
    return run, policy, requests


def test_a_request_goes_on_while_its_blocks_are_moved_where_others_have_ended() -> None:
    run, policy, (ended, stays) = grown(Setting(min_interval=1, num_host_blocks=0), (36, 2), (36, 12))
    while ended.finish_reason is None:
        run.step()
    policy.target = policy.choices[-1]
    plan = run.step()
    assert len(plan.moves) == run.executor.num_moves > 5
    assert plan.memory is None, "the memory is given away in the same step"
    assert (plan := run.step()).memory is not None
    assert plan.memory.num_blocks == 12
    while stays.finish_reason is None:
        run.step()
    counters = run.scheduler.counters[OFFLINE]
    assert counters.num_preemptions == counters.num_recomputed_tokens == 0


@pytest.mark.parametrize("num_host_blocks", [0, 24])
def test_requests_that_do_not_fit_the_smaller_pool_are_preempted(num_host_blocks: int) -> None:
    setting = Setting(policy="slo", min_interval=1, num_host_blocks=num_host_blocks, completes=1.0)
    run, policy, requests = grown(setting, (36, 12), (36, 12))
    policy.target = policy.choices[-1]
    num_before = len(run.plans)
    while run.step().memory is None:
        assert len(run.plans) < num_before + 25
    assert run.scheduler.kv.num_blocks == 12
    counters = run.scheduler.counters[OFFLINE]
    assert counters.num_preemptions >= 1
    while run.scheduler.has_unfinished:
        run.step()
    assert all(len(each.output_token_ids) == 12 for each in requests)
    if num_host_blocks:
        assert counters.num_recomputed_tokens < 36, "its KV was not copied before it was dropped"


def test_a_drain_that_is_called_off_leaves_everything_in_place() -> None:
    run, policy, _ = grown(Setting(policy="slo", min_interval=1, num_host_blocks=0), (37, 9), (37, 9))
    policy.target = policy.choices[-1]
    run.step()
    assert run.scheduler.kv.resizing.num_draining > 0
    policy.target = policy.choices[0]
    run.step()
    assert (run.scheduler.kv.num_blocks, run.scheduler.kv.resizing.num_draining) == (24, 0)
    assert run.executor.num_moves == 0
    assert all(plan.memory is None for plan in run.plans[-2:])
    assert run.scheduler.counters[OFFLINE].num_preemptions == 0


def test_each_drain_waits_for_room_before_it_preempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that begins in the plan after another has ended."""
    monkeypatch.setattr(memory_division, "_MAX_SHORT_PLANS", 2)
    setting = Setting(policy="slo", min_interval=1, num_host_blocks=0)
    run, policy, _ = grown(setting, *[(20, 20)] * 3)
    kv, counters = run.scheduler.kv, run.scheduler.counters[OFFLINE]
    policy.target = policy.choices[1]
    while run.step() and kv.resizing.num_draining:
        pass
    assert (kv.num_blocks, counters.num_preemptions) == (16, 1)
    policy.target = policy.choices[-1]
    num_before = len(run.plans)
    while counters.num_preemptions == 1:
        run.step()
    assert len(run.plans) - num_before > 2


def test_offline_requests_make_room_for_cache_that_is_kept_for_online_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_division, "_MAX_SHORT_PLANS", -1)
    run, policy, _ = grown(Setting(policy="slo", min_interval=1, num_host_blocks=0), (45, 3))
    online = make_request(22, 1)
    run.scheduler.add(online)
    run.step()
    kv, counters = run.scheduler.kv, run.scheduler.counters[OFFLINE]
    assert online.finish_reason is not None and kv.counts.protected == 5
    policy.target = policy.choices[-1]
    assert len(run.step().moves) == 5, "what is kept was evicted, or nobody made room for it"
    assert counters.num_preemptions == 1
