from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.config import CheckpointingName, SchedulerConfig
from backfill.core.request import PriorityLevel, Request, ServiceClass
from backfill.kvcache.checkpointer import urgency
from backfill.kvcache.checkpointing import AdaptiveCheckpoints, CheckpointPolicy, PoolView
from backfill.kvcache.content import BlockKey
from backfill.kvcache.create import create_checkpoint_policy
from backfill.kvcache.table import BlockTable
from tests.builders import make_request

NAMES = get_args(CheckpointingName)


def policy_of(name: CheckpointingName) -> CheckpointPolicy:
    return create_checkpoint_policy(SchedulerConfig(checkpointing=name))


@st.composite
def views(draw: st.DrawFn) -> PoolView:
    num_blocks = draw(st.integers(1, 2000))
    num_free = draw(st.integers(0, num_blocks))
    return PoolView(num_blocks, num_free, draw(st.integers(0, num_blocks - num_free)))


@given(name=st.sampled_from(NAMES), view=views())
def test_no_policy_wants_fewer_copies_than_none(name: CheckpointingName, view: PoolView) -> None:
    assert 0 <= policy_of(name).max_blocks(view) <= view.num_blocks


@given(view=views())
def test_only_eager_and_adaptive_checkpoint_before_a_preemption(view: PoolView) -> None:
    for name in ("none", "swap"):
        assert policy_of(name).max_blocks(view) == 0
    assert policy_of("eager").max_blocks(view) >= view.num_blocks - view.num_free
    saving = {name for name in NAMES if policy_of(name).checkpoints_at_preemption}
    assert saving == {"adaptive", "eager", "swap"}


@given(num_blocks=st.integers(1, 500), num_checkpointed=st.integers(0, 500))
def test_adaptive_copies_no_less_as_use_grows(num_blocks: int, num_checkpointed: int) -> None:
    wanted = [
        policy_of("adaptive").max_blocks(PoolView(num_blocks, num_free, num_checkpointed))
        for num_free in range(num_blocks, -1, -1)
    ]
    assert wanted == sorted(wanted)


@given(view=views(), begins_at=st.floats(0.0, 0.8), width=st.floats(0.05, 0.2))
def test_adaptive_wants_everything_copied_from_complete_at(
    view: PoolView, begins_at: float, width: float
) -> None:
    policy, used = AdaptiveCheckpoints(begins_at, begins_at + width), view.num_blocks - view.num_free
    wanted = policy.max_blocks(view)
    if used / view.num_blocks > begins_at + width + 1e-9:
        assert wanted == used - view.num_checkpointed
    elif used:
        assert wanted <= used - view.num_checkpointed


@given(num_used=st.integers(505, 1000), num_filled=st.integers(1, 100))
def test_adaptive_copies_as_fast_as_blocks_are_filled_while_use_stays(num_used: int, num_filled: int) -> None:
    policy, share = policy_of("adaptive"), min(1.0, (num_used / 1000 - 0.5) / 0.4)
    num_checkpointed = policy.max_blocks(PoolView(1000, 1000 - num_used, 0))
    assert num_checkpointed == pytest.approx(share * num_used, abs=1)
    assert policy.max_blocks(PoolView(1000, 1000 - num_used, num_checkpointed)) == 0, "it holds the share"
    # As many blocks are freed as are filled; the share of them that has a copy is that of all.
    num_left = math.floor(share * num_filled)
    copied = policy.max_blocks(PoolView(1000, 1000 - num_used, num_checkpointed - num_left))
    assert copied == num_left


def test_adaptive_copies_no_block_that_costs_more_than_it_is_likely_to_save() -> None:
    """The last block of a share s is taken with probability exp(-s / 0.2), and costs a quarter of its use."""
    policy = policy_of("adaptive")
    full = PoolView(1000, 0, 0, taken_share=0.2, copy_cost=0.25)
    share = policy.max_blocks(full) / 1000
    assert math.exp(-share / 0.2) == pytest.approx(0.25, rel=0.02)
    assert policy.max_blocks(replace(full, num_checkpointed=round(1000 * share))) == 0
    assert policy.max_blocks(replace(full, copy_cost=0.0)) == 1000, "copies are free"
    assert policy.max_blocks(replace(full, taken_share=0.0)) == 0, "nothing is ever taken"
    assert policy.max_blocks(replace(full, copy_cost=1.0)) == 0, "a copy costs all that it saves"
    assert policy.max_blocks(replace(full, num_free=600)) == 0, "the pool is not short"


@given(
    views(),
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_the_dearer_copies_are_the_fewer_are_made(
    view: PoolView, taken_share: float, cheap: float, dear: float
) -> None:
    policy, (low, high) = policy_of("adaptive"), sorted((cheap, dear))
    fewer = policy.max_blocks(replace(view, taken_share=taken_share, copy_cost=high))
    more = policy.max_blocks(replace(view, taken_share=taken_share, copy_cost=low))
    assert 0 <= fewer <= more <= policy.max_blocks(view)


def with_level(rank: PriorityLevel, **fields: float) -> Request:
    request = make_request(
        service_class=ServiceClass.ONLINE if rank is PriorityLevel.ONLINE else ServiceClass.OFFLINE
    )
    request.priority_level = rank
    request.order_key = (int(fields.get("priority", 0)), fields.get("arrived_at_s", 0.0), 0)
    return request


def test_the_least_urgent_request_is_checkpointed_first() -> None:
    expected = [
        with_level(PriorityLevel.OFFLINE, priority=1),
        with_level(PriorityLevel.OFFLINE, arrived_at_s=2.0),
        with_level(PriorityLevel.OFFLINE, arrived_at_s=1.0),
        with_level(PriorityLevel.PROMOTED, arrived_at_s=2.0),
        with_level(PriorityLevel.ONLINE, arrived_at_s=3.0),
        with_level(PriorityLevel.ONLINE),
    ]
    mixed = expected[::-1]
    mixed.sort(key=lambda each: urgency((each, BlockTable(BlockKey(b"")))), reverse=True)
    assert mixed == expected


def test_the_shares_of_adaptive_are_options() -> None:
    config = SchedulerConfig(checkpointing="adaptive", checkpoint_from=0.25, checkpoint_all_from=0.75)
    policy = create_checkpoint_policy(config)
    wanted = [policy.max_blocks(PoolView(100, 100 - num_used, 0)) for num_used in (25, 50, 75)]
    assert wanted == [0, 25, 75]
