from __future__ import annotations

from collections.abc import Sequence

import pytest

from backfill.core.block import BlockCopy
from backfill.core.config import CheckpointingName
from backfill.core.counters import ClassCounters
from backfill.core.plan import CopyDirections
from backfill.core.request import PriorityLevel, Request, ServiceClass
from backfill.kvcache.block_manager import BlockManager
from backfill.kvcache.checkpointing import create_checkpoint_policy
from backfill.kvcache.host_tier import HostTier
from tests.builders import make_request

BLOCK_SIZE = 4


class Tier:
    """A host tier without a scheduler: requests get their blocks and tokens by hand."""

    def __init__(
        self,
        policy: CheckpointingName = "eager",
        *,
        num_blocks: int = 32,
        num_host_blocks: int = 32,
        blocking: CopyDirections = CopyDirections.NONE,
        may_copy: int = 100,
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, num_host_blocks, blocking)
        self.counters = {service_class: ClassCounters() for service_class in ServiceClass}
        self.host = HostTier(self.blocks, create_checkpoint_policy(policy), self.counters)
        self.host.limit_copies(may_copy)
        self.on_device: list[Request] = []

    def run(
        self,
        num_tokens: int,
        rank: PriorityLevel = PriorityLevel.OFFLINE,
        *,
        arrived_at_s: float = 0.0,
        is_candidate: bool = True,
    ) -> Request:
        """A request on the device with so many computed tokens."""
        is_online = rank is PriorityLevel.ONLINE
        request = make_request(
            num_tokens,
            service_class=ServiceClass.ONLINE if is_online else ServiceClass.OFFLINE,
            arrived_at_s=arrived_at_s,
        )
        request.priority_level = rank
        self.blocks.grow(request.request_id, num_tokens)
        request.num_computed_tokens = num_tokens
        self.on_device.append(request)
        if is_candidate:
            self.host.add_candidate(request)
        return request

    def num_with_copy(self, *requests: Request) -> list[int]:
        return [self.blocks.num_host_blocks_of(request.request_id) for request in requests]

    def copy_all(self) -> None:
        self.host.start_checkpoints()
        self.complete()

    def begin_copies(self) -> int:
        """How many the tier begins now."""
        before = self.blocks.num_checkpointed_blocks
        self.host.start_checkpoints()
        return self.blocks.num_checkpointed_blocks - before

    def complete(self) -> Sequence[BlockCopy]:
        copies = [copy for kind in self.blocks.take_copies() for copy in kind]
        self.blocks.complete(copies)
        return copies

    def preempt(self, request: Request, num_needed: int = 0) -> None:
        self.on_device.remove(request)
        self.host.reclaim(request, num_needed, self.on_device)
        self.blocks.check_integrity()


def test_candidates_are_copied_least_urgent_first_and_whole_before_the_next() -> None:
    tier = Tier(may_copy=4)
    online, promoted = tier.run(8, PriorityLevel.ONLINE), tier.run(8, PriorityLevel.PROMOTED)
    early, late = tier.run(13, arrived_at_s=1.0), tier.run(10, arrived_at_s=2.0)
    requests = (late, early, promoted, online)
    for expected in ([2, 2, 0, 0], [2, 3, 2, 1], [2, 3, 2, 2]):
        tier.host.start_checkpoints()
        tier.complete()
        assert tier.num_with_copy(*requests) == expected
    assert tier.begin_copies() == 0
    assert tier.counters[ServiceClass.OFFLINE].num_checkpointed_tokens == 7 * BLOCK_SIZE
    assert tier.counters[ServiceClass.ONLINE].num_checkpointed_tokens == 2 * BLOCK_SIZE


def test_copies_in_flight_never_exceed_what_is_allowed() -> None:
    tier = Tier(may_copy=3)
    request = tier.run(40)
    assert tier.begin_copies() == 3
    assert tier.begin_copies() == 0
    first, *_ = tier.blocks.take_copies()[0]
    tier.blocks.complete([first])
    assert tier.begin_copies() == 1
    tier.host.limit_copies(1)
    assert tier.begin_copies() == 0
    tier.host.limit_copies(5)
    tier.preempt(request)
    assert tier.blocks.num_copies_in_flight == 5
    assert request.num_computed_tokens == 6 * BLOCK_SIZE, "what is copied, is being, and may be"


def test_restores_share_what_is_allowed_and_go_on_with_the_first_until_it_is_back() -> None:
    tier = Tier()
    first, second = tier.run(12), tier.run(10)
    tier.copy_all()
    for request in (first, second):
        tier.preempt(request)
    tier.complete()
    tier.host.limit_copies(2)
    for request in (first, second):
        assert tier.host.can_begin_restore(request)
        assert tier.host.begin_restore(request) is False
    restored: list[list[Request]] = []
    for _ in range(4):
        tier.host.continue_restores()
        assert tier.blocks.num_copies_in_flight == 2
        tier.complete()
        restored.append(tier.host.take_restored())
        if second in restored[-1]:
            break
    assert restored == [[], [first], [second]]
    assert second.num_computed_tokens == 10
    assert tier.counters[ServiceClass.OFFLINE].num_restored_tokens == 22
    assert not tier.host.restoring


def test_a_victim_loses_what_has_no_copy_and_cannot_be_waited_for() -> None:
    for policy, num_host_blocks, blocking, lost in (
        ("none", 32, CopyDirections.NONE, 18),
        ("eager", 0, CopyDirections.NONE, 18),
        ("eager", 32, CopyDirections.NONE, 16),
        ("swap", 32, CopyDirections.CHECKPOINT, 0),
    ):
        tier = Tier(policy, num_host_blocks=num_host_blocks, blocking=blocking)  # type: ignore[arg-type]
        assert tier.host.lost_tokens(tier.run(18)) == lost
    tier = Tier(may_copy=3)
    request = tier.run(18)
    tier.copy_all()
    assert tier.host.lost_tokens(request) == 4


def test_without_checkpointing_a_preempted_request_keeps_nothing() -> None:
    tier = Tier("none")
    request = tier.run(18)
    tier.copy_all()
    tier.preempt(request)
    assert request.num_computed_tokens == 0
    assert not tier.host.has_host_copy(request)
    assert tier.blocks.num_free_blocks == 32


def test_swapping_keeps_all_a_preempted_request_has_whatever_is_allowed() -> None:
    tier = Tier("swap", blocking=CopyDirections.CHECKPOINT | CopyDirections.RESTORE, may_copy=1)
    request = tier.run(18)
    tier.preempt(request, num_needed=5)
    assert request.num_computed_tokens == 18
    assert tier.blocks.num_free_blocks == 32
    assert tier.host.can_begin_restore(request)
    assert tier.host.begin_restore(request) is True
    assert [len(copies) for copies in tier.blocks.take_copies()] == [5, 5]
    counters = tier.counters[ServiceClass.OFFLINE]
    assert (counters.num_reclaimed_tokens, counters.num_restored_tokens) == (18, 18)
    assert counters.num_checkpointed_tokens == 18


def test_a_restore_that_a_step_waits_for_does_not_begin_before_its_copies_are_written() -> None:
    tier = Tier(blocking=CopyDirections.RESTORE)
    request = tier.run(8)
    tier.preempt(request)
    assert not tier.host.can_begin_restore(request)
    tier.complete()
    assert tier.host.can_begin_restore(request)


def test_a_cancelled_restore_can_begin_again() -> None:
    tier = Tier()
    request = tier.run(10)
    tier.preempt(request)
    tier.complete()
    tier.host.begin_restore(request)
    tier.host.continue_restores()
    tier.host.cancel_restore(request)
    assert tier.host.has_host_copy(request)
    assert request.num_computed_tokens == 10
    tier.complete()
    assert tier.blocks.num_free_blocks == 32
    tier.host.begin_restore(request)
    tier.host.continue_restores()
    tier.complete()
    assert tier.host.take_restored() == [request]


def test_for_a_preempted_request_copies_of_what_is_on_the_device_give_way_first() -> None:
    tier = Tier(num_host_blocks=8)
    away = tier.run(8, arrived_at_s=9.0)
    tier.preempt(away)
    online, offline = tier.run(12, PriorityLevel.ONLINE), tier.run(12)
    tier.copy_all()
    assert tier.num_with_copy(away, online, offline) == [2, 3, 3]
    victim = tier.run(16, PriorityLevel.PROMOTED, is_candidate=False)
    tier.preempt(victim)
    assert tier.num_with_copy(away, online, offline, victim) == [2, 0, 2, 4], (
        "of the most urgent on the device"
    )
    assert victim.num_computed_tokens == 16
    tier.complete()
    tier.host.forget(victim.request_id)
    tier.copy_all()
    assert tier.num_with_copy(online, offline) == [3, 3], "what gave way is a candidate again"


def test_off_the_device_only_the_less_urgent_give_way_and_compute_anew_what_they_lose() -> None:
    tier = Tier(num_host_blocks=6)
    away = {level: tier.run(8, level) for level in PriorityLevel}
    for request in away.values():
        tier.preempt(request)
    tier.complete()
    assert tier.num_with_copy(*away.values()) == [2, 2, 2]
    tier.preempt(tier.run(8))
    assert tier.num_with_copy(*away.values()) == [2, 2, 2], "not for its own class"
    victim = tier.run(12, PriorityLevel.PROMOTED)
    tier.preempt(victim)
    assert tier.num_with_copy(
        away[PriorityLevel.OFFLINE], away[PriorityLevel.PROMOTED], away[PriorityLevel.ONLINE]
    ) == [0, 2, 2]
    assert away[PriorityLevel.OFFLINE].num_computed_tokens == 0
    assert not tier.host.has_host_copy(away[PriorityLevel.OFFLINE])
    assert victim.num_computed_tokens == 8, "as far as there is room"


def test_a_request_off_the_device_loses_no_more_than_is_wanted() -> None:
    tier = Tier(num_host_blocks=4)
    away = tier.run(14)
    tier.preempt(away)
    tier.complete()
    victim = tier.run(8, PriorityLevel.ONLINE)
    tier.preempt(victim)
    assert (away.num_computed_tokens, victim.num_computed_tokens) == (8, 8)
    assert tier.host.has_host_copy(away)


def test_nothing_gives_way_for_a_request_that_may_not_be_saved() -> None:
    tier = Tier(num_host_blocks=2, may_copy=2)
    other = tier.run(8)
    tier.copy_all()
    tier.host.limit_copies(0)
    victim = tier.run(8, PriorityLevel.ONLINE, is_candidate=False)
    tier.preempt(victim)
    assert tier.num_with_copy(other) == [2]
    assert victim.num_computed_tokens == 0


@pytest.mark.parametrize("state", ["candidate", "copying", "away", "restoring"])
def test_a_request_that_ends_leaves_nothing_in_either_pool(state: str) -> None:
    tier = Tier()
    request = tier.run(10)
    if state != "candidate":
        tier.host.start_checkpoints()
    if state in ("away", "restoring"):
        tier.preempt(request)
    if state == "restoring":
        tier.complete()
        tier.host.begin_restore(request)
        tier.host.continue_restores()
    tier.host.forget(request.request_id)
    tier.complete()
    assert (tier.blocks.num_free_blocks, tier.blocks.num_free_host_blocks) == (32, 32)
    assert tier.begin_copies() == 0
    assert not tier.host.restoring
    tier.blocks.check_integrity()


def test_copies_of_others_do_not_give_way_to_blocks_that_are_dropped() -> None:
    tier = Tier(num_host_blocks=2)
    saved = tier.run(8, PriorityLevel.ONLINE)
    tier.host.start_checkpoints()
    tier.blocks.complete(tier.blocks.take_copies()[0])
    victim = tier.run(8)
    tier.host.reclaim(victim, 2, tier.on_device)
    assert victim.num_computed_tokens == 0, "both its blocks were needed immediately"
    assert tier.blocks.num_host_blocks_of(saved.request_id) == 2
