"""Examples of what the KV cache copies to host memory and back, and of blocks in a copy."""

from __future__ import annotations

import pytest

from backfill.core.counters import TierBlocks
from backfill.core.plan import CopyDirections
from backfill.core.request import PriorityLevel
from backfill.kvcache.content import Evictable
from backfill.kvcache.copies import CopyLimits
from tests.kvcache.kv_examples import (
    OFFLINE,
    ONLINE,
    A,
    B,
    C,
    admit,
    checkpointed,
    compute,
    copy_all,
    found,
    leave,
    make_cache,
    num_copied,
    run,
    submit,
    swap_out,
    take,
)

BOTH = CopyDirections.CHECKPOINT | CopyDirections.RESTORE


# Preemption.


def test_a_request_resumes_without_a_copy_when_nobody_needed_its_blocks() -> None:
    model = make_cache(8, 8, "adaptive")
    each = run(model, A[:10])
    table = model.cache.table(each.request.request_id)
    model.advance(0.0, 0)
    model.preempt(each)
    assert each.request.num_computed_tokens == 10
    assert (admit(model, each), model.cache.table(each.request.request_id)) == (10, table)
    assert each.place == "running"
    assert copy_all(model) == 0


def test_wanted_content_is_written_back_before_it_is_dropped() -> None:
    model = make_cache(8, 8, "adaptive")
    each = run(model, A[:10])
    model.preempt(each)
    assert model.cache.counts.available(Evictable.LOSING_NOTHING) == 5
    assert copy_all(model) == 3, "although the pool is hardly used"
    counts = model.cache.counts
    assert (counts.empty, counts.cached_with_copy, counts.cached) == (5, 3, 0)
    take(model, 8, Evictable.LOSING_NOTHING)
    counters = model.cache.counters[OFFLINE]
    assert (counters.num_checkpointed_tokens, counters.num_reclaimed_tokens) == (10, 10)
    assert (admit(model, each), each.place) == (10, "restoring")
    copy_all(model)
    assert (each.place, counters.num_restored_tokens) == ("running", 10)


def test_the_tail_is_moved_on_resume_and_full_blocks_keep_their_copies() -> None:
    model = make_cache(8, 8, "eager")
    each = run(model, A[:10])
    model.preempt(each)
    copy_all(model)
    assert model.cache.counts.host_usage_frac == 3 / 8
    assert model.cache.counts.host_by_use == TierBlocks(offline=3, empty=5)
    take(model, 8)
    admit(model, each)
    copy_all(model)
    assert model.cache.counts.host_usage_frac == 2 / 8
    assert model.cache.counts.checkpointed == 2
    assert model.cache.counts.host_by_use == TierBlocks(offline=2, empty=6), "copies of what it references"
    compute(model, each, 11)
    assert model.cache.num_unsecured_tokens(each.request) == 0


def test_swapping_copies_all_of_a_victim_at_once() -> None:
    model = make_cache(8, 8, "swap", BOTH)
    each = run(model, A[:10])
    assert model.cache.num_unsecured_tokens(each.request) == 0
    model.preempt(each)
    assert model.cache.counts.available(Evictable.LOSING_NOTHING) == 8
    take(model, 8, Evictable.LOSING_NOTHING)
    admit(model, each)
    assert each.place == "running"
    copies = model.take_copies()
    assert (len(copies.checkpoint), len(copies.restore)) == (3, 3)
    assert model.cache.num_copies_in_flight == 0
    model.check()


def test_lazy_checkpoints_are_made_of_what_an_allocation_takes_and_no_more() -> None:
    model = make_cache(8, 8, "lazy", CopyDirections.CHECKPOINT)
    each = run(model, A[:16])
    model.preempt(each)
    assert copy_all(model) == 0, "nobody has taken its blocks"
    take(model, 6)  # 4 were empty
    copies = model.take_copies()
    assert len(copies.checkpoint) == 2
    assert model.cache.match(each.request).num_tokens == 16, "nothing was lost"
    assert model.cache.num_copies_in_flight == 0, "the step waits for them"


def test_the_share_that_is_taken_follows_what_preempted_requests_lose() -> None:
    model = make_cache(8, 8, "adaptive")
    share = model.cache.checkpointer
    assert share.taken_share == 1.0, "until something is known"
    for _ in range(40):
        leave(model, A[:4])
        take(model, 8)
    assert share.taken_share < 0.01, "nobody comes back for what was taken"
    for _ in range(40):
        leave(model, C[:8])
        each = run(model, B[:8])
        model.preempt(each)
        take(model, 8)
        model.free(each)
    assert share.taken_share == pytest.approx(0.5, rel=0.3), "2 of the 4 blocks that were filled"


def test_a_lazy_checkpoint_does_not_evict_what_the_same_allocation_restores() -> None:
    model = make_cache(8, 2, "lazy", CopyDirections.CHECKPOINT)
    first = run(model, A[:8])
    model.preempt(first)
    take(model, 8)
    model.take_copies()
    assert model.cache.match(first.request).num_tokens == 8, "in host memory alone"
    second = run(model, B[:16])
    third = run(model, C[:16], ONLINE)
    model.preempt(second)
    model.preempt(third)
    assert admit(model, first) == 8


@pytest.mark.parametrize("policy", ["none", "swap"])
def test_what_is_not_saved_at_preemption_is_not_saved_later(policy: str) -> None:
    blocking = CopyDirections.CHECKPOINT if policy == "swap" else CopyDirections.NONE
    model = make_cache(8, 1 if policy == "swap" else 8, policy, blocking)  # type: ignore[arg-type]
    each = run(model, A[:8])
    model.preempt(each)
    copy_all(model)
    assert copy_all(model) == 0
    take(model, 8)
    assert model.cache.match(each.request).num_tokens == (4 if policy == "swap" else 0)


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_victim_loses_what_has_no_complete_copy(is_failed: bool) -> None:
    model = make_cache(8, 8, "eager")
    each = run(model, A[:14])
    assert model.cache.num_unsecured_tokens(each.request) == 12
    model.take_copies()
    first, *rest = model.in_flight
    model.complete(rest)
    assert model.cache.num_unsecured_tokens(each.request) == 12
    model.complete([first])
    assert model.cache.num_unsecured_tokens(each.request) == 0
    if is_failed:  # its KV is not wanted any more
        each.request.num_computed_tokens = 0
        model.preempt(each)
        assert model.cache.counts.available(Evictable.LOSING_NOTHING) == 8


# Copies that run beside steps.


def test_a_block_in_a_copy_is_not_taken_before_it_completes() -> None:
    model = make_cache(8, 8, "eager")
    each = run(model, A[:8])
    model.take_copies()
    model.preempt(each)
    assert model.cache.counts.available(Evictable.ALL) == 6
    assert model.cache.counts.becoming_available == 2
    model.free(each)
    assert (model.cache.counts.available(Evictable.ALL), model.cache.counts.becoming_available) == (6, 2)
    copy_all(model)
    assert (model.cache.counts.available(Evictable.ALL), model.cache.counts.becoming_available) == (8, 0)
    take(model, 8)
    assert found(model, A[:8]) == 8, "the write-back has completed and is cache"


def test_a_completed_copy_does_not_change_who_is_evicted_first() -> None:
    model = make_cache(8, 8, "eager")
    victims = [run(model, tokens[:8]) for tokens in (A, B)]
    for each in victims:
        model.preempt(each)
    model.take_copies()
    model.complete(model.in_flight[::-1])
    for kept in ((4, 8), (0, 8), (0, 4), (0, 0)):
        take(model, 8 - sum(kept) // 4)
        on_device = [model.cache.match(each.request).num_device_blocks * 4 for each in victims]
        assert tuple(on_device) == kept


@pytest.mark.parametrize("is_copied_first", [False, True])
def test_secured_blocks_are_taken_from_the_tail(is_copied_first: bool) -> None:
    model = make_cache(4, 4, "eager")
    each = run(model, A[:12])
    if is_copied_first:
        copy_all(model)
    model.preempt(each)
    copy_all(model)
    for num_left in (2, 1, 0):
        take(model, 4 - num_left)
        contents = model.cache.match(each.request).contents
        assert [content.device is not None for content in contents] == [True] * num_left + [False] * (
            3 - num_left
        )


def test_blocks_in_a_copy_count_once_in_a_shortage() -> None:
    model = make_cache(4, 4, "eager")
    each = run(model, A)
    model.take_copies()
    model.preempt(each)
    other = submit(model, [*A[:8], 1])
    match = model.cache.match(other.request)
    assert model.cache.shortage(other.request, match, 0, Evictable.ALL) == 1
    copy_all(model)
    assert model.cache.shortage(other.request, match, 1, Evictable.ALL) == 0


def test_two_fetches_share_an_entry_and_one_of_them_may_be_cancelled() -> None:
    model = make_cache(8, 8, "eager")
    model.free(checkpointed(model, A[:8]))
    take(model, 8)
    first, second = submit(model, [*A[:8], 1]), submit(model, [*A[:8], 2])
    for each in (first, second):
        assert admit(model, each) == 8
    assert model.cache.counts.referenced == 2
    model.preempt(first)
    assert copy_all(model) == 2
    assert second.place == "running"
    compute(model, second)
    assert (admit(model, first), first.place) == (8, "running")


def test_a_cancelled_restore_is_forgotten_if_it_has_not_begun_and_never_counted() -> None:
    model = make_cache(8, 8, "eager")
    each = run(model, A[:10])
    swap_out(model, each)
    counters = model.cache.counters[OFFLINE]
    for _ in range(3):
        assert (admit(model, each), each.place) == (10, "restoring")
        model.preempt(each)
        model.check()
    admit(model, each)
    model.advance(0.0, 1)
    model.take_copies()
    model.preempt(each)
    assert (model.cache.counts.empty, model.cache.counts.becoming_available) == (7, 1)
    copy_all(model)
    model.advance(0.0, 100)
    before = counters.num_restored_tokens
    assert (admit(model, each), each.place) == (10, "restoring")
    assert (copy_all(model), each.place) == (2, "running"), "one block is on the device already"
    assert counters.num_restored_tokens - before == 6


def test_a_queued_restore_that_an_online_request_needs_too_begins_first() -> None:
    model = make_cache(12, 12, "eager")
    ahead, shared = (run(model, tokens[:8]) for tokens in (A, B))
    swap_out(model, ahead, shared)
    online = submit(model, [*B[:8], 1], ONLINE)
    for each in (ahead, shared, online):
        admit(model, each)
    model.advance(0.0, 2)
    assert copy_all(model) == 2
    assert [each.place for each in (ahead, shared, online)] == ["restoring", "running", "running"]


def test_online_restores_begin_first_and_though_the_step_can_afford_no_other_copy() -> None:
    model = make_cache(16, 16, "eager")
    offline, online = run(model, A[:8]), run(model, B[:8], ONLINE)
    swap_out(model, offline, online)
    for each in (offline, online):
        admit(model, each)
    running = run(model, C[:8])
    model.limits = CopyLimits(100, 0)
    assert copy_all(model) == 2
    assert [each.place for each in (offline, online)] == ["restoring", "running"]
    assert copy_all(model) == 0
    model.limits = CopyLimits(100, 3)
    model.take_copies()
    assert model.cache.num_copies_in_flight == 3
    assert num_copied(model, running) == 1, "the offline restore has begun before it"
    model.complete(model.in_flight[:])
    assert model.cache.is_restored(offline.request)


def test_a_block_is_not_checkpointed_before_the_same_plan_restores_it() -> None:
    model = make_cache(8, 8, "eager", CopyDirections.RESTORE)
    each = run(model, A[:10])
    swap_out(model, each)
    admit(model, each)
    model.preempt(each)
    copy_all(model)
    assert model.cache.match(each.request).num_tokens == 10


# Checkpoints of running requests.


def test_candidates_are_copied_least_urgent_first_and_whole_before_the_next() -> None:
    model = make_cache(16, 16, "eager")
    online, promoted = run(model, A[:8], ONLINE), run(model, B[:8])
    promoted.request.priority_level = PriorityLevel.PROMOTED
    offline = run(model, C[:13])
    for expected in ([3, 1, 0], [3, 2, 2]):
        model.advance(0.0, 4)
        copy_all(model)
        requests = (offline, promoted, online)
        assert [num_copied(model, each) for each in requests] == expected
    assert copy_all(model) == 0
    assert model.cache.counters[OFFLINE].num_checkpointed_tokens == 5 * 4
    assert model.cache.counters[ONLINE].num_checkpointed_tokens == 2 * 4


def test_copies_of_running_requests_give_way_to_preempted_ones_from_the_last() -> None:
    model = make_cache(8, 4, "eager")
    running = run(model, [*A, 1])
    copy_all(model)
    victim = run(model, B[:8])
    assert copy_all(model) == 0, "a running request's copies do not push out another's"
    model.preempt(victim)
    assert copy_all(model) == 2
    assert model.cache.num_unsecured_tokens(running.request) == 8
    take(model, 3)
    assert model.cache.match(victim.request).num_tokens == 8
    assert model.cache.counters[OFFLINE].num_evicted_host_blocks == 2


def test_what_gave_way_is_a_candidate_again_with_the_next_block() -> None:
    model = make_cache(16, 4, "eager")
    running = run(model, [*A, 1])
    copy_all(model)
    victim = run(model, B[:8])
    model.preempt(victim)
    copy_all(model)
    model.free(victim)
    leave(model, C[:1])
    for token in (1, 2):
        running.request.append(token)
    compute(model, running, 20)
    copy_all(model)
    assert num_copied(model, running) == 4


def test_of_preempted_requests_only_offline_copies_give_way_to_online_ones() -> None:
    model = make_cache(8, 2, "eager")
    offline, other, online = run(model, A[:8]), run(model, B[:8]), run(model, C[:8], ONLINE)
    for each, num_copies in ((offline, 2), (other, 0), (online, 2)):
        model.preempt(each)
        assert copy_all(model) == num_copies
    take(model, 8)
    found_by = [model.cache.match(each.request).num_tokens for each in (offline, other, online)]
    assert found_by == [0, 0, 8]
