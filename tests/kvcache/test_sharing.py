"""Two requests in one block of four slots: the online one from slot 0, the offline one from slot 3."""

from __future__ import annotations

import pytest

from backfill.core.block import BlockCopy, is_reversed
from backfill.core.config import CheckpointingName
from backfill.core.plan import CopyDirections
from backfill.kvcache.content import Content, Evictable
from backfill.kvcache.free_ends import MOST_GIVING_WAY
from tests.kvcache.kv_examples import (
    OFFLINE,
    ONLINE,
    SIZE,
    A,
    B,
    C,
    admit,
    checkpointed,
    compute,
    copy_all,
    leave,
    make_cache,
    run,
    submit,
    take,
)
from tests.kvcache.kv_model import CacheModel, Running

NOTHING = Evictable.LOSING_NOTHING


def make_shared_cache(
    num_blocks: int,
    num_host_blocks: int = 0,
    policy: CheckpointingName = "none",
    blocking: CopyDirections = CopyDirections.NONE,
) -> CacheModel:
    return make_cache(num_blocks, num_host_blocks, policy, blocking, prefix_caching=False, bidirectional=True)


def decode(model: CacheModel, each: Running) -> bool:
    """Compute the last token of a request and sample another one; False if it has to wait, or gave way."""
    end = each.request.num_tokens
    victim = model.preempt_for_slots(each, end)
    model.check()
    if victim is each or not model.cache.sharing.reserve_slots(each.request, end):
        return False
    assert model.grow(each, end, NOTHING)
    model.check()
    if model.setup.blocking:
        model.take_copies()
    model.compute(each, end - 1, end)
    model.commit(each, end)
    each.request.append(7)
    model.check()
    return True


def pair(model: CacheModel, num_offline_tokens: int) -> tuple[Running, Running]:
    """An offline request in one block, and an online one that has filled a block."""
    return run(model, A[:num_offline_tokens]), run(model, B[:4], ONLINE)


def last_block(model: CacheModel, each: Running) -> int:
    return model.cache.table(each.request.request_id)[-1] >> 1


def test_an_online_request_without_an_empty_block_enters_the_rear_ones_block() -> None:
    model = make_shared_cache(2)
    offline, online = pair(model, 1)
    assert decode(model, online)
    assert last_block(model, online) == last_block(model, offline)
    assert not is_reversed(model.cache.table(online.request.request_id)[-1])
    assert is_reversed(model.cache.table(offline.request.request_id)[-1])
    assert model.cache.counts.referenced == 2
    assert copy_all(model) == 0, "while they do not meet, nothing is copied"
    sharing = model.cache.sharing
    assert (sharing.num_shared, sharing.num_paired) == (1, 1)
    model.preempt(offline)
    assert (sharing.num_shared, sharing.num_paired) == (1, 0)


def test_an_offline_request_enters_the_front_ones_block() -> None:
    model = make_shared_cache(2)
    online = run(model, A[:1], ONLINE)
    offline = run(model, B[:4])
    assert decode(model, offline)
    assert last_block(model, online) == last_block(model, offline)
    assert not decode(model, offline), "a slot stays free for the next online token"
    assert offline.place == "queued"
    assert decode(model, online)


def test_a_block_is_entered_only_where_none_is_empty_and_a_quarter_stays_free() -> None:
    model = make_shared_cache(3)
    offline, online = pair(model, 2)
    assert decode(model, online)
    assert last_block(model, online) != last_block(model, offline)
    model = make_shared_cache(2)
    run(model, A[:3])
    online = run(model, B[:4], ONLINE)
    assert not model.grow(online, 5, NOTHING)


def test_a_running_request_keeps_its_block_while_one_can_be_taken_that_loses_nothing() -> None:
    model = make_shared_cache(3, 3, "eager")
    copied = checkpointed(model, C[:4])
    model.preempt(copied)
    pair(model, 1)
    _, online = model.at("running")
    assert model.cache.counts.available(NOTHING) == 1
    assert decode(model, online)
    assert not model.cache.sharing.blocks
    assert model.cache.match(copied.request).num_tokens == 4, "the host has it"


@pytest.mark.parametrize(("num_blocks", "shares"), [(MOST_GIVING_WAY, True), (MOST_GIVING_WAY + 1, False)])
@pytest.mark.parametrize("enters", ["online", "offline"])
def test_a_long_offline_request_shares_no_running_ones_block(
    num_blocks: int, shares: bool, enters: str
) -> None:
    """It would give way soon, with all its blocks, for the half of one."""
    end = (num_blocks - 1) * SIZE
    prompt = list(range(1000, 1000 + end + 1))
    if enters == "online":
        model = make_shared_cache(num_blocks + 1)
        run(model, prompt)
        entering = run(model, B[:4], ONLINE)
    else:
        model = make_shared_cache(num_blocks)
        run(model, B[:1], ONLINE)
        entering = run(model, prompt[:end])
    assert model.grow(entering, entering.request.num_tokens, NOTHING) is shares


def test_a_short_offline_requests_block_is_entered_though_a_long_ones_would_come_first() -> None:
    model = make_shared_cache(MOST_GIVING_WAY + 3)
    run(model, list(range(1000, 1000 + MOST_GIVING_WAY * SIZE + 1)))
    short = run(model, A[:1])
    online = run(model, B[:4], ONLINE)
    assert model.grow(online, 5, NOTHING)
    assert last_block(model, online) == last_block(model, short)


def test_of_two_blocks_the_one_with_more_free_slots_is_entered() -> None:
    model = make_shared_cache(4)
    run(model, A[:2])
    emptier = run(model, B[:1])
    online = run(model, C[:8], ONLINE)
    assert decode(model, online)
    assert last_block(model, online) == last_block(model, emptier)


def test_requests_of_one_class_do_not_share() -> None:
    for service_class in (ONLINE, OFFLINE):
        model = make_shared_cache(2)
        run(model, A[:1], service_class)
        other = run(model, B[:4], service_class)
        assert not model.grow(other, 5, NOTHING)


def meet(model: CacheModel) -> tuple[Running, Running]:
    """An online request whose next token would be written over the offline one's last: that one gives way."""
    offline, online = pair(model, 1)
    assert decode(model, online)
    assert decode(model, offline)  # slots: online, free, offline, offline
    assert decode(model, online)
    assert offline.place == "queued"
    return online, offline


def test_a_tail_is_copied_by_its_slots_before_the_first_of_them_is_overwritten() -> None:
    model = make_shared_cache(2, 2, "eager")
    online, offline = meet(model)
    index, sharing = last_block(model, online), model.cache.sharing
    copies = model.take_copies()
    assert [(copy.device, copy.first, copy.num) for copy in copies.slot_checkpoint] == [(index, 2, 2)]
    assert not decode(model, online), "it waits for a copy that reads the slot"
    model.complete(list(model.in_flight))
    assert decode(model, online)
    assert copy_all(model) == 0, "it has been copied"
    assert decode(model, online), "the block is full"
    assert (sharing.num_overwritten, model.cache.checkpointer.num_copied_slots) == (2, 2)
    assert not sharing.blocks
    assert model.cache.match(offline.request).num_tokens == 2, "the host has all of it"


def test_a_tail_is_copied_at_the_preemption_where_steps_wait_for_copies() -> None:
    model = make_shared_cache(2, 2, "swap", CopyDirections.CHECKPOINT)
    offline, online = pair(model, 1)
    assert decode(model, online)
    index = last_block(model, online)
    model.preempt(offline)
    copies = model.take_copies()
    assert [(copy.device, copy.first, copy.num) for copy in copies.slot_checkpoint] == [(index, 3, 1)]
    model.check()
    for _ in range(3):
        assert decode(model, online)
    assert (model.cache.sharing.num_overwritten, model.cache.checkpointer.num_copied_slots) == (1, 1)
    assert model.cache.match(offline.request).num_tokens == 1, "the host has it"


def test_lazy_checkpoints_copy_a_slot_in_the_step_that_overwrites_it() -> None:
    model = make_shared_cache(2, 2, "lazy", CopyDirections.CHECKPOINT)
    online, offline = meet(model)
    index = last_block(model, online)
    assert not model.take_copies()
    end = online.request.num_tokens
    assert model.cache.sharing.reserve_slots(online.request, end), "it does not wait"
    copies = model.take_copies()
    assert [(copy.device, copy.first, copy.num) for copy in copies.slot_checkpoint] == [(index, 2, 1)]
    model.check()
    assert decode(model, online)
    assert decode(model, online), "the block is full"
    assert model.cache.match(offline.request).num_tokens == 2, "the host has all of it"


def test_what_was_overwritten_comes_back_into_the_same_block_if_it_is_free_again() -> None:
    model = make_shared_cache(2, 2, "eager")
    online, offline = meet(model)
    index = last_block(model, online)
    copy_all(model)
    assert decode(model, online)
    model.free(online)
    assert admit(model, offline) == 2
    copies = model.take_copies()
    assert [(copy.device, copy.first, copy.num) for copy in copies.slot_restore] == [(index, 2, 1)]
    assert not copies.restore
    model.complete(list(model.in_flight))
    model.end_restores()
    assert decode(model, offline)


@pytest.mark.parametrize("is_saved", [True, False])
def test_while_the_front_is_in_use_the_tail_comes_from_the_host_or_is_computed_again(is_saved: bool) -> None:
    model = make_shared_cache(3, 2, "eager" if is_saved else "none")
    other = run(model, C[:3])
    online, offline = meet(model)
    model.free(other)
    copy_all(model)
    assert decode(model, online)
    assert admit(model, offline) == (2 if is_saved else 0)
    assert len(model.take_copies().restore) == is_saved
    model.complete(list(model.in_flight))
    model.end_restores()
    assert model.grow(offline, 3, NOTHING)
    assert last_block(model, offline) != last_block(model, online)


def test_a_tail_with_a_host_copy_is_overwritten_without_another_one() -> None:
    model = make_shared_cache(2, 2, "eager")
    offline, online = pair(model, 3)
    model.preempt(offline)
    assert copy_all(model) == 2  # the tail, and the online request's block
    for _ in range(4):
        assert decode(model, online)
        assert copy_all(model) == 0
    assert (model.cache.sharing.num_overwritten, model.cache.checkpointer.num_copied_slots) == (3, 0)
    model.free(online)
    assert admit(model, offline) == 3, "a whole block comes back, since nothing of it is on the device"
    assert len(model.take_copies().restore) == 1


def test_to_look_up_a_tail_that_the_host_has_leaves_it_on_the_device() -> None:
    model = make_shared_cache(2, 2, "eager")
    offline, online = pair(model, 2)
    model.preempt(offline)
    copy_all(model)
    assert decode(model, online)
    match = model.cache.match(offline.request)
    assert (match.num_tokens, match.is_on_device, match.num_device_blocks) == (2, False, 0)
    assert model.cache.shortage(offline.request, match, 0, NOTHING) > 0
    model.check()
    assert model.cache.sharing.num_shared == 1
    model.free(online)
    assert admit(model, offline) == 2
    assert not model.take_copies().restore, "it is on the device still"


def test_a_tail_that_the_host_has_comes_back_into_another_block_beside_a_running_request() -> None:
    model = make_shared_cache(3, 4, "eager")
    other = run(model, C[:3])
    offline, online = pair(model, 2)
    model.preempt(offline)
    copy_all(model)
    assert decode(model, online)
    model.free(other)
    index = last_block(model, online)
    assert admit(model, offline) == 2
    assert not model.cache.sharing.blocks
    assert [copy.device == index for copy in model.take_copies().restore] == [False]


def test_without_room_in_host_memory_only_what_is_overwritten_is_lost() -> None:
    model = make_shared_cache(2)
    online, offline = meet(model)
    assert copy_all(model) == 0
    assert decode(model, online)
    assert (model.cache.sharing.num_overwritten, model.cache.checkpointer.num_copied_slots) == (1, 0)
    model.free(online)
    assert admit(model, offline) == 1


def test_the_rest_of_a_tail_stays_when_the_host_evicts_what_was_overwritten() -> None:
    model = make_shared_cache(3, 1, "eager")
    other = run(model, C[:3])
    online, offline = meet(model)
    model.free(other)
    copy_all(model)
    assert decode(model, online)
    assert offline_tail(model, offline).num_lost == 1
    model.preempt(run(model, C[:3], ONLINE))
    copy_all(model)
    tail = offline_tail(model, offline)
    assert (tail.num_tokens, tail.num_lost, tail.host) == (1, 0, None)
    model.check()


def offline_tail(model: CacheModel, each: Running) -> Content:
    tail = model.cache._tables[each.request.request_id].tail
    assert tail is not None
    return tail


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_last_full_block_of_a_preempted_request_is_entered_and_loses_its_key(is_saved: bool) -> None:
    model = make_shared_cache(2, 2 if is_saved else 0, "eager" if is_saved else "none")
    offline, online = pair(model, 4)
    model.preempt(offline)
    copy_all(model)
    assert decode(model, online)
    tail = offline_tail(model, offline)
    assert tail.key is None
    assert (tail.num_tokens, tail.num_lost) == ((4, 1) if is_saved else (3, 0))
    model.free(online)
    assert admit(model, offline) == tail.num_tokens
    copies = model.take_copies()
    assert [copy.num for copy in copies.slot_restore] == [1] * is_saved


def test_a_block_that_two_requests_want_is_not_entered() -> None:
    model = make_cache(2, bidirectional=True)
    both = [run(model, A[:4]), submit(model, A[:5])]
    admit(model, both[1])
    online = run(model, B[:4], ONLINE)
    for each in both:
        model.preempt(each)
    assert not model.grow(online, 5, NOTHING)


def test_a_block_that_the_request_itself_has_found_is_not_entered() -> None:
    model = make_cache(2, bidirectional=True)
    offline = run(model, A[:4])
    run(model, B[:4], ONLINE)
    model.preempt(offline)
    online = submit(model, A[:5], ONLINE)
    match = model.cache.match(online.request)
    assert match.num_tokens == 4
    assert model.cache.shortage(online.request, match, 0, NOTHING) == 1


def test_a_tail_that_is_dropped_under_a_copy_keeps_its_slots_until_the_copy_completes() -> None:
    model = make_shared_cache(2, 2, "eager")
    online, offline = meet(model)
    model.take_copies()
    model.free(offline)
    model.check()
    assert not decode(model, online), "a copy reads the slot"
    model.complete(list(model.in_flight))
    assert not model.cache.sharing.blocks
    assert decode(model, online)


def test_the_front_request_leaves_under_a_copy_of_the_rear_and_nobody_takes_the_block() -> None:
    model = make_shared_cache(2, 2, "eager")
    online, offline = meet(model)
    model.take_copies()
    model.complete([each for each in model.in_flight if isinstance(each.copy, BlockCopy)])
    model.free(online)
    model.free(offline)
    model.check()
    assert model.cache.counts.available(Evictable.ALL) == 1
    model.complete(list(model.in_flight))
    assert model.cache.counts.available(Evictable.ALL) == 2


def test_a_preempted_online_request_leaves_nothing_beside_a_running_one() -> None:
    model = make_shared_cache(2)
    offline, online = pair(model, 1)
    assert decode(model, online)
    model.preempt(online)
    model.check()
    assert not model.cache.sharing.blocks
    assert decode(model, offline)
    assert model.cache.match(online.request).num_tokens == 4


def test_both_are_preempted_and_the_later_tail_stays() -> None:
    model = make_shared_cache(2)
    online, offline = meet(model)
    model.preempt(online)
    model.check()
    assert model.cache.match(online.request).num_tokens == 6
    assert model.cache.match(offline.request).num_tokens == 0


def test_an_offline_prefix_is_used_from_its_own_direction_and_so_is_its_host_copy() -> None:
    model = make_cache(4, 4, "eager", bidirectional=True)
    leave(model, A[:8])
    online = run(model, A[:9], ONLINE)
    refs = model.cache.table(online.request.request_id)
    assert [is_reversed(ref) for ref in refs] == [True, True, False]
    assert online.request.num_cached_tokens == 8
    model.preempt(online)
    copy_all(model)
    evictor = submit(model, C[:16])
    admit(model, evictor)
    assert model.grow(evictor, 16, Evictable.ALL)
    model.free(evictor)
    assert admit(model, online) == 9
    copy_all(model)
    refs = model.cache.table(online.request.request_id)
    assert [is_reversed(ref) for ref in refs] == [True, True, False]


def test_a_block_whose_host_copy_is_filled_from_the_other_end_is_not_entered() -> None:
    """Its slots cannot be restored from there: the host has the copy of an online request's equal block."""
    model = make_cache(4, 8, "eager", prefix_caching=True, bidirectional=True)
    online, offline = submit(model, A[:5], ONLINE), submit(model, A[:5], OFFLINE)
    admit(model, online)
    admit(model, offline)
    compute(model, online)
    compute(model, offline, SIZE)
    copy_all(model)
    copy_all(model)
    model.free(online)
    take(model, 3)
    model.preempt(offline)
    model.check()
    (content,) = [each for each in model.cache._store.by_key.values() if each.num_wanted]
    assert content.device is not None and content.host is not None
    assert is_reversed(content.device.ref) and not is_reversed(content.host.ref)
    others = run(model, B[:12], ONLINE)
    new = submit(model, C[:2], ONLINE)
    admit(model, new)
    compute(model, new)
    assert not model.cache.sharing.num_entered
    model.free(new)
    model.free(others)
    assert admit(model, offline) in (0, SIZE)
    for _ in range(4):
        copy_all(model)
