"""What an engine asks of a link that others use too, and what it makes of what it gets."""

from __future__ import annotations

import math
from dataclasses import replace

from backfill.offloading.residency import (
    LinkGrant,
    LinkWish,
    SharedLinkPolicy,
    StepNeed,
    residencies,
)
from tests.offloading.test_residency import NUM_LAYERS, offline, online

HOLD_S = 10.0
FREE_S = 1e-3


class Budget:
    free_transfer_s = FREE_S

    def __init__(self) -> None:
        self.wished: list[LinkWish] = []
        self.grant: LinkGrant | None = LinkGrant(2, FREE_S, False)

    def ask(self, wish: LinkWish) -> LinkGrant | None:
        self.wished.append(wish)
        return self.grant


def make() -> tuple[SharedLinkPolicy, Budget]:
    """Interval 8 has 100 blocks, and 2 has 340; see ``test_residency``."""
    budget = Budget()
    choices = residencies(NUM_LAYERS, 2, 8, num_blocks=100, layer_bytes=20, block_bytes=1)
    return SharedLinkPolicy(choices, (NUM_LAYERS,), budget), budget


def test_with_the_link_to_itself_an_engine_does_as_alone() -> None:
    policy, budget = make()
    assert policy.choose(offline()).interval == 2
    assert budget.wished == [LinkWish(2, 8, None)]


def test_nothing_changes_until_the_others_are_known() -> None:
    policy, budget = make()
    budget.grant = None
    assert policy.choose(offline()).interval == 8


def test_no_interval_smaller_than_the_grant_is_taken() -> None:
    policy, budget = make()
    budget.grant = LinkGrant(4, FREE_S, True)
    assert policy.choose(offline()).interval == 4


def test_the_transfers_that_the_grant_leaves_count() -> None:
    """The measured ones are of a moment in which the others did less."""
    policy, budget = make()
    budget.grant = LinkGrant(2, 8e-3, False)
    assert policy.choose(offline(transfer_s=FREE_S)).interval == 8
    slow, budget = make()
    assert slow.choose(offline(transfer_s=8e-3)).interval == 8, "the device is slower than the link"


def test_an_interval_that_others_need_is_given_up_at_once_and_comes_back_late() -> None:
    policy, budget = make()
    assert policy.choose(offline(now_s=100.0)).interval == 2
    budget.grant = LinkGrant(6, FREE_S, True)
    assert policy.choose(offline(now_s=100.1)).interval == 6
    budget.grant = LinkGrant(2, FREE_S, False)
    assert policy.choose(offline(now_s=100.0 + HOLD_S)).interval == 6
    assert policy.choose(offline(now_s=100.2 + HOLD_S)).interval == 2
    budget.grant = LinkGrant(40, FREE_S, True)
    assert policy.choose(offline(now_s=200.0)).interval == 8, "the largest that there is memory for"


def test_what_an_engine_did_not_wish_for_before_is_no_reason_to_wait() -> None:
    policy, budget = make()
    budget.grant = LinkGrant(8, FREE_S, False)
    assert policy.choose(offline(now_s=100.0)).interval == 8
    budget.grant = LinkGrant(2, FREE_S, False)
    assert policy.choose(offline(now_s=100.1)).interval == 2


def test_what_is_of_no_use_is_not_asked_for() -> None:
    for situation, least in (
        (offline(), 2),
        (offline(wanted_blocks=100), 8),
        (offline(used_blocks=0), 8),
        (online(wanted_blocks=100), 8),
        (online(), 4),  # steps as short as with 8
    ):
        policy, budget = make()
        policy.choose(situation)
        (wish,) = budget.wished
        assert (wish.min_interval, wish.max_interval) == (least, 8)
        assert wish.objective_s == (situation.decodes.limit_s if situation.num_online else None)


def test_an_idle_moment_changes_no_wish() -> None:
    class Obliging(Budget):
        def ask(self, wish: LinkWish) -> LinkGrant:
            """What was wished before: grants take a while."""
            super().ask(wish)
            return LinkGrant(self.wished[-2:][0].min_interval, FREE_S, False)

    budget = Obliging()
    choices = residencies(NUM_LAYERS, 2, 8, num_blocks=100, layer_bytes=20, block_bytes=1)
    policy = SharedLinkPolicy(choices, (NUM_LAYERS,), budget)
    policy.choose(offline(now_s=100.0))
    assert policy.choose(offline(now_s=101.0)).interval == 2
    assert policy.choose(offline(now_s=110.0, used_blocks=0)).interval == 2
    assert policy.choose(offline(now_s=110.1)).interval == 2
    assert {each.min_interval for each in budget.wished} == {2}


def test_an_objective_is_told_again_when_it_has_changed() -> None:
    policy, budget = make()
    for limit_s in (0.0120, 0.0125, 0.0115, 0.0140, math.inf):
        policy.choose(replace(online(), decodes=StepNeed(limit_s, 0.008)))
    assert [each.objective_s for each in budget.wished] == [0.0120, 0.0120, 0.0120, 0.0140, None]
