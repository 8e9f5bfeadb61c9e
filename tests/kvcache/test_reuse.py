"""What requests of an offline pool say of their prompts' reuse, and what is evicted first because of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.request import ServiceClass
from backfill.kvcache.content import BlockKey, BlockState, Evictable
from tests.kvcache.kv_examples import (
    OFFLINE,
    ONLINE,
    SIZE,
    A,
    B,
    C,
    copy_all,
    expect_reuse,
    found,
    leave,
    make_cache,
    run,
    take,
)
from tests.kvcache.kv_model import CacheModel, Running
from tests.shared import examples


def run_planned(
    model: CacheModel,
    tokens: Sequence[int],
    num_reused_tokens: int | None,
    at_s: float = 0.0,
    service_class: ServiceClass = OFFLINE,
) -> Running:
    each = run(model, tokens, service_class)
    each.request.num_reused_tokens = num_reused_tokens
    each.request.arrived_at_s = at_s
    return each


def leave_planned(
    model: CacheModel, tokens: Sequence[int], num_reused_tokens: int | None, at_s: float = 0.0
) -> None:
    model.free(run_planned(model, tokens, num_reused_tokens, at_s))
    model.check()


@pytest.mark.parametrize("num_reused_tokens", [8, 9, 11])
def test_what_no_other_request_needs_is_evicted_before_what_was_used_longer_ago(
    num_reused_tokens: int,
) -> None:
    model = make_cache(8)
    leave(model, B[:8])
    leave_planned(model, [*A, 1], num_reused_tokens)
    assert (found(model, A), found(model, B[:8])) == (16, 8), "it stays until its blocks are needed"
    take(model, 4)
    assert (found(model, A), found(model, B[:8])) == (8, 8)
    take(model, 6)
    assert (found(model, A), found(model, B[:8])) == (8, 0), "the rest is in its place by last use"


def test_unneeded_content_is_evicted_from_the_tail_and_the_longest_unused_first() -> None:
    model = make_cache(4)
    leave_planned(model, A[:8], 0)
    leave_planned(model, B[:8], 0)
    for num_taken, expected in ((1, (4, 8)), (2, (0, 8)), (3, (0, 4)), (4, (0, 0))):
        take(model, num_taken)
        assert (found(model, A[:8]), found(model, B[:8])) == expected


def test_what_a_preempted_request_wants_is_not_unneeded_until_it_ends() -> None:
    model = make_cache(8)
    each = run_planned(model, A[:8], 0)
    model.preempt(each)
    leave(model, B[:8])
    take(model, 6)
    assert (found(model, A[:8]), found(model, B[:8])) == (8, 0)
    leave(model, B[:8])
    model.free(each)
    take(model, 6)
    assert (found(model, A[:8]), found(model, B[:8])) == (0, 8)


def test_what_online_requests_used_stays_protected() -> None:
    model = make_cache(8)
    expect_reuse(model)
    leave(model, A[:8], ONLINE)
    leave_planned(model, A[:8], 0)
    assert model.cache.counts.available(Evictable.OFFLINE) == 6
    model.advance(61.0, 100)
    assert model.cache._device.counts[BlockState.UNNEEDED] == 0
    model.check()


def test_host_copies_of_unneeded_content_are_taken_first_too() -> None:
    model = make_cache(8, 4, "eager")
    for tokens, num_reused_tokens in ((B[:8], 8), (A[:8], 0)):
        each = run_planned(model, tokens, num_reused_tokens)
        assert copy_all(model) == 2
        model.free(each)
    assert model.cache.counts.host_usage_frac == 0.0
    take(model, 8)
    each = run(model, C[:8])
    assert copy_all(model) == 2
    model.free(each)
    take(model, 8)
    assert (found(model, A[:8]), found(model, B[:8])) == (0, 8)


@dataclass
class Facts:
    """What the users of one block's content said of it, remembered apart from the cache."""

    is_unneeded: bool = False
    said_at_s: float = -1.0
    has_unplanned_users: bool = False


@dataclass
class Account:
    """Requests of some blocks each, and what follows from them for each content, by its key."""

    model: CacheModel = field(default_factory=lambda: make_cache(12))
    facts: dict[BlockKey, Facts] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    num_started: int = 0

    def start(self, blocks: Sequence[int], num_reused_tokens: int | None) -> None:
        tokens = [10 * block + offset for block in blocks for offset in range(SIZE)]
        if self.model.cache.counts.available(Evictable.ALL) < len(blocks) + 1:
            return
        self.num_started += 1
        before = self.unused()
        each = run_planned(self.model, [*tokens, 7], num_reused_tokens, self.num_started)
        self.running.append(each)
        self.check_evictions(before)

    def end(self, each: Running) -> None:
        self.running.remove(each)
        request, table = each.request, self.model.cache._tables[each.request.request_id]
        for index, key in enumerate(table.keys[: table.num_known]):
            facts = self.facts.setdefault(key, Facts())
            if request.num_reused_tokens is None:
                facts.has_unplanned_users = True
            elif request.arrived_at_s > facts.said_at_s:
                facts.said_at_s = request.arrived_at_s
                facts.is_unneeded = (index + 1) * SIZE > request.num_reused_tokens
        self.model.free(each)
        self.model.check()

    def unused(self) -> set[BlockKey]:
        contents = self.model.cache._store.by_key.items()
        return {key for key, each in contents if each.device is not None and not each.device.num_refs}

    def evict(self, num_blocks: int) -> None:
        before = self.unused()
        if (num_available := self.model.cache.counts.available(Evictable.ALL)) > 0:
            take(self.model, min(num_blocks, num_available))
        self.check_evictions(before)

    def check_evictions(self, before: set[BlockKey]) -> None:
        kept = any(self.is_unneeded(key) for key in before & self.unused())
        for key in before - set(self.model.cache._store.by_key):
            assert self.is_unneeded(key) or not kept
            del self.facts[key]  # who computes it again says anew what it is good for

    def is_unneeded(self, key: BlockKey) -> bool:
        facts = self.facts[key]
        return facts.is_unneeded and not facts.has_unplanned_users


@settings(max_examples=examples(50))
@given(data=st.data())
def test_nothing_is_evicted_before_all_that_no_request_needs(data: st.DataObject) -> None:
    account = Account()
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["start", "start", "end", "end", "evict"]))
        if step == "start":
            blocks = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
            account.start(blocks, data.draw(st.none() | st.integers(0, len(blocks) * SIZE)))
        elif step == "end" and account.running:
            account.end(data.draw(st.sampled_from(account.running)))
        elif step == "evict":
            account.evict(data.draw(st.integers(1, 12)))
    for each in list(account.running):
        account.end(each)
