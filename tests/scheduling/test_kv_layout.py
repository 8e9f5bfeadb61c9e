"""What the two KV layouts have in common, and what only one of them does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.block import BlockRef, is_reversed
from backfill.core.config import PolicyName
from backfill.core.plan import Compute, Resume, StepPlan
from backfill.core.request import ServiceClass
from tests.builders import make_request
from tests.scheduling.test_two_tier_schedules import Arrival, Run, Setting, all_settings, crowd
from tests.shared import examples

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


@settings(max_examples=examples(30), deadline=None)
@given(setting=all_settings(), seed=SEEDS)
def test_unidirectional_blocks_are_forward_and_never_shared(setting: Setting, seed: int) -> None:
    schedule = run(replace(setting, kv_layout="unidirectional"), seed)
    sharing = schedule.scheduler.kv.sharing
    assert sharing.num_entered == sharing.num_overwritten == 0
    for plan in schedule.plans:
        assert not (plan.copies.slot_checkpoint or plan.copies.slot_restore)
        assert not any(is_reversed(ref) for each in plan.slices for ref in each.blocks)


@settings(max_examples=examples(30), deadline=None)
@given(setting=all_settings(), seed=SEEDS, service_class=st.sampled_from(ServiceClass))
def test_requests_of_one_class_have_the_same_plans_in_both_layouts(
    setting: Setting, seed: int, service_class: ServiceClass
) -> None:
    both = run(replace(setting, kv_layout="bidirectional"), seed, service_class)
    one = run(replace(setting, kv_layout="unidirectional"), seed, service_class)
    assert [forward(plan) for plan in both.plans] == one.plans
    reversed_refs = {is_reversed(ref) for plan in both.plans for each in plan.slices for ref in each.blocks}
    assert reversed_refs <= {service_class is ServiceClass.OFFLINE}


@pytest.mark.parametrize("policy", ["slo", "bros", "priority"])
def test_crowded_schedules_share_blocks_and_copy_only_what_is_overwritten(policy: PolicyName) -> None:
    pools = {"num_blocks": 24, "num_host_blocks": 48, "max_num_seqs": 24, "max_num_batched_tokens": 64}
    schedule = Run(Setting(kv_layout="bidirectional", policy=policy, completes=0.9, **pools))
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
    assert num_copied <= sharing.num_overwritten + 1, "more than a slot ahead"
    assert any(plan.copies.slot_checkpoint for plan in schedule.plans)
