"""Examples of the rules by which the KV cache finds, keeps, protects and evicts blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.config import CheckpointingName, PrefixCacheScope
from backfill.core.plan import CopyDirections
from backfill.kvcache.content import BlockKey, Evictable, KeyChain, Match
from backfill.kvcache.protection import CacheProtection
from tests.builders import make_request
from tests.kvcache.kv_driver import Driver, SharingDriver
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
    expect_reuse,
    found,
    leave,
    make_cache,
    run,
    submit,
    swap_out,
    take,
)
from tests.kvcache.kv_model import Setup
from tests.shared import examples

# What is found.


def test_a_match_leaves_the_last_token() -> None:
    model = make_cache()
    leave(model, A[:8])
    assert [found(model, A[:length]) for length in (0, 3, 4, 7, 8, 9)] == [0, 0, 4, 4, 8, 8]
    each = submit(model, A[:8])
    assert model.cache.match(each.request).num_tokens == 4, "its last block's last token is needed"


def test_content_exists_at_commit_and_not_before() -> None:
    model = make_cache()
    each = submit(model, A)
    admit(model, each)
    assert model.grow(each, 16, Evictable.ALL)
    model.compute(each, 0, 8, is_whole=False)
    assert found(model, A) == 0, "the slice was stopped"
    compute(model, each, 6)
    assert found(model, A) == 4, "a block that is not full has no key"


def test_a_running_prompt_jumps_over_what_another_has_computed_meanwhile() -> None:
    model = make_cache()
    ahead, behind = submit(model, [*A, 1]), submit(model, [*A, 2])
    for each in (ahead, behind):
        admit(model, each)
        compute(model, each, 4)
    compute(model, ahead, 16)
    model.cache.match_more(behind.request)
    model.check()
    assert behind.request.num_computed_tokens == 16
    assert behind.request.num_cached_tokens == 16
    tables = [model.cache.table(each.request.request_id) for each in (ahead, behind)]
    assert tables[0][:4] == tables[1]
    compute(model, behind)


def test_a_running_prompt_does_not_jump_over_what_a_copy_still_fills() -> None:
    model = make_cache(4, 4, "eager")
    away = run(model, A[:8])
    swap_out(model, away)
    behind = submit(model, [*A[:8], 1])
    model.cache.match(behind.request)
    admit(model, away)
    model.cache.match_more(behind.request)
    assert behind.request.num_computed_tokens == 0
    copy_all(model)
    model.cache.match_more(behind.request)
    assert behind.request.num_computed_tokens == 8


def test_content_computed_twice_stays_without_a_key_and_is_freed_first() -> None:
    model = make_cache()
    requests = [submit(model, A[:9]) for _ in range(2)]
    for each in requests:
        admit(model, each)
    for each in requests:
        compute(model, each)
    first, second = requests
    table = model.cache.table(second.request.request_id)
    assert model.block_of(first, 0).content is not None
    assert model.block_of(second, 0).content is None
    assert set(table).isdisjoint(model.cache.table(first.request.request_id)), "tables are not rewritten"
    model.free(second)
    assert (model.cache.counts.empty, found(model, A[:8])) == (5, 8)
    model.free(first)
    assert found(model, A[:8]) == 8


def test_content_computed_twice_gets_its_key_when_the_other_is_gone() -> None:
    model = make_cache(4)
    first, second = submit(model, A[:8]), submit(model, A[:8])
    for each in (first, second):
        admit(model, each)
    for each in (first, second):
        compute(model, each)
        each.request.append(7)
    model.free(first)
    take(model, 2)
    assert found(model, A[:8]) == 0
    model.preempt(second)
    assert (admit(model, second), found(model, A[:8])) == (8, 8)


@pytest.mark.parametrize("num_cached", [0, 20])
def test_keys_are_made_only_near_the_first_block_that_is_missing(num_cached: int) -> None:
    model = make_cache(256)
    prompt = list(range(100 * SIZE))
    if num_cached:
        leave(model, prompt[: num_cached * SIZE])
    each = submit(model, prompt)
    assert model.cache.match(each.request).num_tokens == num_cached * SIZE
    num_keys = len(model.cache._tables[each.request.request_id].keys)
    assert num_cached < num_keys <= num_cached + 16


def test_a_prefix_on_the_device_and_in_host_memory_by_turns_is_found_whole() -> None:
    model = make_cache(8, 8, "eager")
    model.free(checkpointed(model, [*A, 1]))
    on_device = submit(model, [*A[:4], 5])
    admit(model, on_device)
    take(model, 7)  # all but the block that is referenced
    each = submit(model, [*A[:8], 5])
    admit(model, each)
    copy_all(model)
    model.preempt(each)
    match = model.cache.match(submit(model, [*A, 9]).request)
    assert (match.num_tokens, match.num_device_blocks) == (16, 2)


def test_keys_depend_on_namespace_secret_and_tokens_and_not_on_how_these_are_split() -> None:
    chain = KeyChain(SIZE, "owner", b"one")
    first, second = make_request(prompt_token_ids=A[:15]), make_request(prompt_token_ids=A[:6])
    for token in A[6:15]:
        second.append(token)
    roots = {chain.root_of(first), KeyChain(SIZE, "owner", b"2").root_of(first)}
    for first.owner, first.cache_salt in (("a", "bc"), ("ab", "c"), ("", "a"), ("a", "")):
        roots.add(chain.root_of(first))
    assert len(roots) == 6
    root, other_root, *_ = roots
    whole, parts, other = list[BlockKey](), list[BlockKey](), list[BlockKey]()
    chain.extend(whole, root, first, 3)
    for num_blocks in (1, 1, 3):
        chain.extend(parts, root, second, num_blocks)
    assert whole == parts and len(set(whole)) == 3
    chain.extend(other, other_root, first, 3)
    assert not set(whole) & set(other)


# What is evicted.


def test_eviction_goes_from_the_tail() -> None:
    model = make_cache(4)
    leave(model, A)
    for kept in (12, 8, 4, 0):
        take(model, 4 - kept // 4)
        assert found(model, A) == kept


def test_what_was_used_longest_ago_is_evicted_first() -> None:
    model = make_cache(4)
    leave(model, A[:8])
    leave(model, B[:8])
    leave(model, [*A[:8], 1][:8])
    take(model, 2)
    assert (found(model, A[:8]), found(model, B[:8])) == (8, 0)


def test_offline_work_may_not_take_what_online_requests_used_a_short_time_ago() -> None:
    model = make_cache(8)
    expect_reuse(model)
    leave(model, A[:8], ONLINE)
    assert model.cache.counts.available(Evictable.OFFLINE) == 6
    assert model.cache.counts.available(Evictable.ALL) == 8
    model.advance(59.0, 100)
    assert model.cache.counts.available(Evictable.OFFLINE) == 6
    model.advance(61.0, 100)
    assert model.cache.counts.available(Evictable.LOSING_NOTHING) == 8
    assert found(model, A[:8]) == 8


def test_offline_use_does_not_end_or_prolong_the_protection() -> None:
    model = make_cache(8)
    expect_reuse(model)
    leave(model, A[:8], ONLINE)
    model.advance(30.0, 100)
    leave(model, A[:8])
    assert model.cache.counts.available(Evictable.OFFLINE) == 6
    long_one = run(model, A[:9])
    model.advance(100.0, 100)
    model.free(long_one)
    assert model.cache.counts.available(Evictable.LOSING_NOTHING) == 8


def test_a_small_host_pool_does_not_end_protection_on_the_device() -> None:
    model = make_cache(8, 4, "eager")
    expect_reuse(model)
    each = run(model, A, ONLINE)
    assert copy_all(model) == 4
    model.free(each)
    model.advance(0.1, 100)
    model.check()
    assert model.cache.counts.available(Evictable.OFFLINE) == 4


def test_online_requests_take_the_content_of_offline_ones_before_their_own() -> None:
    model = make_cache(8)
    for tokens, service_class in ((A[:8], ONLINE), (B[:8], OFFLINE)):
        model.preempt(run(model, tokens, service_class))
    leave(model, C[:8], ONLINE)
    order = [(2, (8, 8, 8)), (4, (8, 0, 8)), (6, (8, 0, 0)), (8, (0, 0, 0))]
    for num_taken, expected in order:
        take(model, num_taken)
        assert tuple(found(model, tokens[:8]) for tokens in (A, B, C)) == expected


def test_a_victim_frees_the_blocks_that_no_other_request_uses() -> None:
    model = make_cache(8)
    first, second = run(model, A[:9]), run(model, [*A[:8], 1])
    freed = model.cache.counts.num_freed
    contents = [content for index in (0, 4) if (content := model.block_of(first, index).content) is not None]
    ids = [first.request.request_id, second.request.request_id]
    nothing, of_first = Match((), 0), Match(contents, 8)
    assert [freed([each], nothing, Evictable.ALL) for each in ids] == [1, 1]
    assert freed(ids, nothing, Evictable.ALL) == 4, "what they share is free without both"
    assert freed(ids, of_first, Evictable.ALL) == 2, "the match would reference it again"
    assert model.cache.counts.available(Evictable.ALL) == 4
    model.preempt(second)
    assert model.cache.counts.available(Evictable.ALL) == 5
    model.preempt(first)
    assert model.cache.counts.available(Evictable.ALL) == 8


def test_blocks_that_a_match_would_pin_are_not_available_to_it() -> None:
    model = make_cache(4)
    leave(model, A[:8])
    each = submit(model, [*A[:8], *B[:8]])
    match = model.cache.match(each.request)
    shortages = [model.cache.shortage(each.request, match, reserved, Evictable.ALL) for reserved in (0, 1)]
    assert shortages == [0, 1]


BLOCKING = [CopyDirections(bits) for bits in range(4)]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    return Setup(
        num_blocks=draw(st.integers(6, 12)),
        block_size=draw(st.integers(2, 4)),
        num_host_blocks=draw(st.integers(0, 8)),
        vocab_size=draw(st.integers(2, 3)),
        policy=draw(st.sampled_from(get_args(CheckpointingName))),
        blocking=draw(st.sampled_from(BLOCKING)),
        prefix_caching=draw(st.sampled_from((True, True, False))),
        scope=draw(st.sampled_from(get_args(PrefixCacheScope))),
    )


@settings(max_examples=examples(12))
@given(setup=setups(), seed=st.integers(0, 2**32))
def test_no_use_of_the_cache_loses_mixes_or_overwrites_kv(setup: Setup, seed: int) -> None:
    Driver(setup, seed).run(num_rounds=25)


@settings(max_examples=examples(8))
@given(setup=setups(), block_size=st.sampled_from((4, 8, 16, 32)), seed=st.integers(0, 2**32))
def test_two_requests_in_one_block_lose_mix_or_overwrite_no_kv(
    setup: Setup, block_size: int, seed: int
) -> None:
    SharingDriver(replace(setup, block_size=block_size, bidirectional=True), seed).run(num_rounds=60)


@settings(max_examples=examples(8))
@given(setup=setups(), num_more=st.integers(1, 10), seed=st.integers(0, 2**32))
def test_a_pool_that_grows_and_shrinks_loses_mixes_or_overwrites_no_kv(
    setup: Setup, num_more: int, seed: int
) -> None:
    Driver(replace(setup, max_num_blocks=setup.num_blocks + num_more), seed).run(num_rounds=25)


@settings(max_examples=examples(6))
@given(setup=setups(), num_more=st.integers(1, 10), seed=st.integers(0, 2**32))
def test_shared_blocks_move_with_both_of_their_ends(setup: Setup, num_more: int, seed: int) -> None:
    max_num_blocks = setup.num_blocks + num_more
    resized = replace(setup, block_size=8, bidirectional=True, max_num_blocks=max_num_blocks)
    SharingDriver(resized, seed).run(num_rounds=40)


KEYS = [BlockKey(bytes([index])) for index in range(10)]


def unused(num_blocks: int) -> CacheProtection:
    """After many prompts of which nothing was used before."""
    protection = CacheProtection(num_blocks)
    for _ in range(1000):
        protection.observe(KEYS, 0, None, 0.0)
    return protection


def test_half_a_pool_is_protected_until_it_shows_that_nothing_is_used_again() -> None:
    protection = CacheProtection(10)
    assert protection.max_share == 0.5
    for _ in range(40):
        protection.observe(KEYS, 0, None, 0.0)
    assert protection.max_share < 0.01


def test_half_a_pool_is_protected_once_half_of_the_prompts_are_used_again() -> None:
    protection = unused(10)
    shares = [protection.max_share]
    for _ in range(100):
        protection.observe(KEYS, 5, None, 0.0)
        shares.append(protection.max_share)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(0.5, abs=0.001)


def test_it_follows_a_lower_use_down_again() -> None:
    protection = CacheProtection(10)
    for reused in [10] * 50 + [1] * 50:
        protection.observe(KEYS, reused, None, 0.0)
    assert protection.max_share == pytest.approx(0.1, abs=0.01)


def test_an_idle_night_does_not_stand_for_how_soon_content_is_used_again() -> None:
    protection = CacheProtection(10)
    for now_s in range(0, 300, 3):
        protection.observe(KEYS, 5, now_s - 10.0, now_s)
    evening, night_s = protection.reuse, 300 + 36_000.0
    for minutes in range(5):
        released_at_s = 290.0 if minutes == 0 else night_s + 60 * minutes - 10.0
        protection.observe(KEYS, 5, released_at_s, night_s + 60.0 * minutes)
    assert protection.reuse.interval_s <= 60.0
    assert protection.reuse.per_s > evening.per_s / 2


def test_content_that_was_evicted_too_early_counts_as_used_again() -> None:
    protection = CacheProtection(10)
    for now_s in range(100):
        for key in KEYS:
            protection.remember(key, now_s - 2.0)
        protection.observe(KEYS, 0, None, float(now_s))
    assert protection.max_share == pytest.approx(0.5)
    assert protection.kept_s == pytest.approx(4 * 2.0, abs=0.1)


def test_only_leading_blocks_count_and_only_as_many_keys_as_blocks_are_remembered() -> None:
    protection = unused(3)
    for key in KEYS[:5]:
        protection.remember(key, 0.0)
    for _ in range(9):
        protection.observe(KEYS, 0, None, 1.0)  # the first two are forgotten, so nothing leads
        assert protection.max_share == pytest.approx(0.0)
    protection.observe(KEYS, 2, None, 1.0)
    assert protection.max_share == pytest.approx(0.1 * 5 / 10)


@pytest.mark.parametrize(("reused_after_s", "kept_s"), [(0.1, 5.0), (8.0, 32.0), (600.0, 60.0)])
def test_protection_lasts_four_times_as_long_as_until_reuse_within_bounds(
    reused_after_s: float, kept_s: float
) -> None:
    protection = CacheProtection(10)
    assert protection.kept_s == 60.0
    for _ in range(100):
        protection.observe(KEYS, 10, 1000.0 - reused_after_s, 1000.0)
    assert protection.kept_s == pytest.approx(kept_s, rel=0.01)


def test_prompts_shorter_than_a_block_say_nothing() -> None:
    protection = CacheProtection(10)
    protection.observe(KEYS, 10, None, 0.0)
    before = protection.max_share
    protection.observe([], 0, None, 0.0)
    assert protection.max_share == before > 0
