"""The queues of blocks that may be entered, beside a look at all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.block import is_reversed
from backfill.core.request import Request, ServiceClass
from backfill.kvcache import free_ends
from backfill.kvcache.content import BlockState, Content, Evictable
from backfill.kvcache.free_ends import FreeEnd
from backfill.kvcache.manager import KVCacheManager
from backfill.kvcache.sharing import SharedLastBlocks
from tests.builders import make_request
from tests.kvcache.kv_driver import SharingDriver
from tests.kvcache.kv_model import Setup
from tests.kvcache.test_kv_rules import setups
from tests.shared import examples

BEYOND = (-1, *Evictable)
MOST_GIVING_WAY = 2  # so that some requests have more blocks


def preempted_ends(sharing: SharedLastBlocks, beyond: int, matched: Collection[Content]) -> Iterator[FreeEnd]:
    for last in sharing._free_ends._preempted.values():
        content = last.table.wanted[-1]
        block, host = content.device, content.host
        if block is None or content.num_wanted != 1 or not beyond < block.state <= BlockState.WANTED:
            continue
        is_alone = not block.num_refs and not block.num_copies and block.peer is None
        has_same_slots = host is None or is_reversed(host.ref) is is_reversed(block.ref)
        if is_alone and is_reversed(block.ref) and has_same_slots and content not in matched:
            yield FreeEnd(block, content.num_device_tokens, content=content, table=last.table)


def running_ends(sharing: SharedLastBlocks, size: int, entering: Request) -> Iterator[FreeEnd]:
    for last in sharing._free_ends._running.values():
        blocks, request = last.table.blocks, last.request
        offline = request if entering.service_class is ServiceClass.ONLINE else entering
        is_pair = request.service_class is not entering.service_class
        if is_pair and offline.num_tokens <= MOST_GIVING_WAY * size and blocks and blocks[-1].peer is None:
            num_slots = request.num_tokens - (len(blocks) - 1) * size
            if 0 < num_slots < size and len(blocks) > last.table.num_known:
                yield FreeEnd(blocks[-1], num_slots, owner=request)


def look_at_all(
    cache: KVCacheManager,
    request: Request,
    num_tokens: int,
    beyond: int,
    may_lose: bool,
    matched: Collection[Content],
) -> FreeEnd | None:
    """As ``SharedLastBlocks.find``."""
    size, sharing = cache.block_size, cache.sharing
    assert isinstance(sharing, SharedLastBlocks)
    room = size - (request.num_tokens - (num_tokens - 1) // size * size)
    if room <= 0:
        return None
    preempted = list[FreeEnd]()
    if request.service_class is ServiceClass.ONLINE:
        preempted = list(preempted_ends(sharing, beyond, matched))
    best = min(preempted, key=lambda end: end.num_slots, default=None)
    if best is not None and best.num_slots <= room:
        return best
    ends = running_ends(sharing, size, request)
    running = [end for end in ends if end.num_slots + max(1, size // 4) <= room]
    if running:
        return min(running, key=lambda end: end.num_slots)
    saved = [
        end
        for end in preempted
        if end.content is not None
        and end.content.host is not None
        and end.content.host.is_valid
        and not end.content.num_unsaved
    ]
    return min(saved, key=lambda end: end.num_slots, default=best if may_lose else None)


class ComparingDriver(SharingDriver):
    """Asks for a block to enter now and then, for each running request and for new ones."""

    asks = 0.3  # not always, because to ask brings the queues up to date

    def act(self, action: Callable[[], object]) -> None:
        super().act(action)
        if self.rng.random() < self.asks:
            self.compare()

    def compare(self) -> None:
        cache, rng = self.model.cache, self.rng
        assert isinstance(cache.sharing, SharedLastBlocks)
        contents = [*cache._store.by_key.values()]
        contents += [table.tail for table in cache._tables.values() if table.tail is not None]
        requests = [each.request for each in self.model.at("running")]
        requests += [
            make_request(rng.randint(1, cache.block_size), service_class=each) for each in ServiceClass
        ]
        for request in requests:
            matched = rng.sample(contents, min(len(contents), rng.choice((0, 0, 2))))
            for beyond in BEYOND:
                arguments = (request, request.num_tokens, beyond, rng.random() < 0.5, matched)
                assert cache.sharing.find(*arguments) == look_at_all(cache, *arguments)


@settings(max_examples=examples(8), deadline=None)
@given(setup=setups(), block_size=st.sampled_from((4, 8, 16)), seed=st.integers(0, 2**32))
def test_the_emptiest_block_is_the_one_that_a_look_at_all_finds(
    setup: Setup, block_size: int, seed: int
) -> None:
    with mock.patch.object(free_ends, "MOST_GIVING_WAY", MOST_GIVING_WAY):
        ComparingDriver(replace(setup, block_size=block_size, bidirectional=True), seed).run(num_rounds=50)
