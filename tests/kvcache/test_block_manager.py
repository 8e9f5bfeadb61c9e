# Over 400 lines: the examples and the model-based test of one class share their builders.
from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from backfill.core.block import BlockCopy, block_index
from backfill.core.plan import CopyDirections
from backfill.core.request import RequestId
from backfill.kvcache.block_manager import BlockManager


@given(num_tokens=st.integers(0, 1000), block_size=st.sampled_from([8, 16, 32]))
def test_blocks_for_is_the_least_that_holds_the_tokens(num_tokens: int, block_size: int) -> None:
    num_blocks = BlockManager(1, block_size).blocks_for(num_tokens)
    assert num_blocks * block_size >= num_tokens
    assert (num_blocks - 1) * block_size < num_tokens or num_blocks == 0


def test_growing_beyond_the_pool_asserts_and_changes_nothing() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    with pytest.raises(AssertionError, match="lacks 3 blocks, 2 are free"):
        blocks.grow(RequestId("a"), 9)
    assert blocks.num_free_blocks == 2
    blocks.check_integrity()


def test_integrity_check_notices_a_block_held_twice() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.grow(RequestId("a"), 4)
    blocks._free.append(blocks.table(RequestId("a"))[0])
    with pytest.raises(AssertionError):
        blocks.check_integrity()


class BlockManagerMachine(RuleBasedStateMachine):
    """Random grow and release against a model that only counts."""

    request_ids = Bundle("request_ids")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(num_blocks=10, block_size=4)
        self.held: dict[RequestId, int] = {}

    @rule(target=request_ids, name=st.integers(0, 5))
    def name_request(self, name: int) -> RequestId:
        return RequestId(f"r{name}")

    @rule(request_id=request_ids, num_tokens=st.integers(0, 48))
    def grow_if_possible(self, request_id: RequestId, num_tokens: int) -> None:
        before = self.held.get(request_id, 0)
        wanted = max(before, -(-num_tokens // 4))
        fits = sum(self.held.values()) - before + wanted <= 10
        if fits:
            table_before = self.blocks.table(request_id) if before else ()
            self.blocks.grow(request_id, num_tokens)
            self.held[request_id] = wanted
            assert self.blocks.table(request_id)[:before] == table_before, "grown, not moved"

    @rule(request_id=request_ids)
    def release(self, request_id: RequestId) -> None:
        self.blocks.release(request_id)
        self.held.pop(request_id, None)

    @invariant()
    def counts_agree(self) -> None:
        self.blocks.check_integrity()
        assert self.blocks.num_free_blocks == 10 - sum(self.held.values())
        for request_id, held in self.held.items():
            assert self.blocks.num_held_blocks(request_id) == held


TestBlockManagerMachine = BlockManagerMachine.TestCase


A, B = RequestId("a"), RequestId("b")


def two_tiers(
    num_blocks: int = 8, num_host_blocks: int = 8, blocking: CopyDirections = CopyDirections.NONE
) -> BlockManager:
    return BlockManager(num_blocks, 4, num_host_blocks, blocking)


def test_checkpointed_blocks_are_free_immediately_and_without_a_copy() -> None:
    blocks = two_tiers()
    blocks.grow(A, 12)
    assert blocks.checkpoint(A, 12, max_blocks=8) == 3
    checkpoint, _ = blocks.take_copies()
    blocks.complete(checkpoint)
    assert blocks.reclaim(A, 12, max_checkpoints=8) == 12
    assert blocks.num_free_blocks == 8
    assert blocks.take_copies() == ((), ())
    assert blocks.num_copies_in_flight == 0


def test_reclaimed_blocks_with_a_copy_in_flight_are_free_when_it_completes() -> None:
    blocks = two_tiers()
    blocks.grow(A, 8)
    blocks.checkpoint(A, 8, max_blocks=1)
    checkpoint, _ = blocks.take_copies()
    assert blocks.reclaim(A, 8) == 4
    assert (blocks.num_free_blocks, blocks.num_unreferenced_blocks) == (7, 1)
    blocks.complete(checkpoint)
    assert (blocks.num_free_blocks, blocks.num_unreferenced_blocks) == (8, 0)


def test_a_shared_prefix_is_checkpointed_once_and_outlives_its_first_owner() -> None:
    blocks = two_tiers()
    blocks.grow(A, 12)
    blocks.share(A, B, 2)
    assert blocks.checkpoint(A, 12, max_blocks=8) == 3
    assert blocks.checkpoint(B, 8, max_blocks=8) == 0
    assert blocks.num_host_blocks_of(B) == 2
    blocks.complete(blocks.take_copies()[0])
    blocks.release(A)
    assert (blocks.num_free_blocks, blocks.num_free_host_blocks) == (6, 6)
    assert blocks.reclaim(B, 8) == 8
    assert (blocks.num_free_blocks, blocks.num_free_host_blocks) == (8, 6)


def test_both_owners_of_a_shared_prefix_are_restored_from_its_one_copy() -> None:
    blocks = two_tiers()
    blocks.grow(A, 8)
    blocks.share(A, B, 2)
    blocks.checkpoint(A, 8, max_blocks=8)
    blocks.complete(blocks.take_copies()[0])
    for request_id in (A, B):
        assert blocks.reclaim(request_id, 8) == 8
    assert (blocks.num_free_blocks, blocks.num_free_host_blocks) == (8, 6)
    for request_id in (A, B):
        blocks.begin_restore(request_id)
        assert blocks.restore(request_id, 8) == 2
    blocks.complete(reversed(blocks.take_copies()[1]))
    for request_id in (A, B):
        assert blocks.end_restore(request_id) == 8
    assert (blocks.num_free_blocks, blocks.num_free_host_blocks) == (4, 6)
    assert blocks.num_checkpointed_blocks == 4
    blocks.check_integrity()


@pytest.mark.parametrize(("num_needed", "kept"), [(0, 14), (2, 14), (3, 12), (4, 8), (5, 8)])
def test_blocks_needed_now_are_dropped_from_the_last_one_back(num_needed: int, kept: int) -> None:
    blocks = two_tiers()
    blocks.grow(A, 14)
    blocks.checkpoint(A, 14, max_blocks=2)
    blocks.complete(blocks.take_copies()[0])
    assert blocks.reclaim(A, 14, num_needed=num_needed, max_checkpoints=8) == kept
    assert blocks.num_free_blocks - 4 >= min(num_needed, 4)
    assert len(blocks.take_copies()[0]) == max(0, 4 - max(num_needed, 2)), "the rest is copied first"


def test_no_more_blocks_are_checkpointed_than_allowed_and_than_the_host_has_free() -> None:
    for num_host_blocks, max_checkpoints, kept in ((8, 1, 4), (2, 8, 8), (0, 8, 0)):
        blocks = two_tiers(num_host_blocks=num_host_blocks)
        blocks.grow(A, 12)
        assert blocks.reclaim(A, 12, max_checkpoints=max_checkpoints) == kept
        assert blocks.num_free_blocks == 8 - kept // 4


def test_blocking_checkpoints_free_their_blocks_immediately() -> None:
    blocks = two_tiers(blocking=CopyDirections.CHECKPOINT)
    blocks.grow(A, 10)
    assert blocks.reclaim(A, 10, num_needed=3, max_checkpoints=8) == 10, "none is dropped to free its blocks"
    assert blocks.num_free_blocks == 8
    assert blocks.is_checkpoint_complete(A)
    assert len(blocks.take_copies()[0]) == 3
    assert blocks.num_copies_in_flight == 0


def test_a_blocking_checkpoint_evicted_before_the_plan_is_not_copied() -> None:
    blocks = two_tiers(num_host_blocks=1, blocking=CopyDirections.CHECKPOINT)
    blocks.grow(A, 4)
    blocks.grow(B, 4)
    kept_block = blocks.table(B)[0]
    blocks.reclaim(A, 4, max_checkpoints=1)
    assert blocks.evict_host_blocks(A, 1) == 0
    blocks.reclaim(B, 4, max_checkpoints=1)
    checkpoint, _ = blocks.take_copies()
    assert checkpoint == ((block_index(kept_block), 0),)


def test_a_last_block_that_is_not_full_is_restored_and_its_copy_is_freed() -> None:
    blocks = two_tiers()
    blocks.grow(A, 6)
    assert blocks.reclaim(A, 6, max_checkpoints=8) == 6
    assert blocks.num_host_blocks_of(A) == 2
    assert blocks.is_checkpoint_complete(A) is False
    blocks.complete(blocks.take_copies()[0])
    blocks.begin_restore(A)
    assert blocks.restore(A, 8) == 2
    assert not blocks.is_restored(A)
    blocks.complete(blocks.take_copies()[1])
    assert blocks.end_restore(A) == 6
    assert blocks.num_free_host_blocks == 7, "the block will be written on"
    assert blocks.num_complete_checkpoints_of(A) == 1
    assert blocks.checkpoint(A, 8, max_blocks=8) == 1, "now it is full"


def test_a_host_block_that_the_next_plan_reads_is_not_written_by_that_plan() -> None:
    blocks = two_tiers(num_host_blocks=1, blocking=CopyDirections.RESTORE)
    blocks.grow(A, 2)
    blocks.reclaim(A, 2, max_checkpoints=1)
    blocks.complete(blocks.take_copies()[0])
    blocks.grow(B, 4)
    blocks.begin_restore(A)
    blocks.restore(A, 1)
    assert blocks.end_restore(A) == 2
    assert blocks.checkpoint(B, 4, max_blocks=1) == 0, "it would begin before the copy to the device"
    assert [len(copies) for copies in blocks.take_copies()] == [0, 1]
    assert blocks.checkpoint(B, 4, max_blocks=1) == 1


def test_a_restore_waits_for_the_copy_that_writes_its_host_block() -> None:
    blocks = two_tiers()
    blocks.grow(A, 8)
    blocks.reclaim(A, 8, max_checkpoints=8)
    first, second = blocks.take_copies()[0]
    blocks.begin_restore(A)
    assert blocks.restore(A, 8) == 0
    blocks.complete([second])
    assert blocks.restore(A, 8) == 0, "the first comes first"
    blocks.complete([first])
    assert blocks.restore(A, 8) == 2


def test_device_blocks_of_a_cancelled_restore_are_free_when_their_copies_complete() -> None:
    blocks = two_tiers()
    blocks.grow(A, 8)
    blocks.reclaim(A, 8, max_checkpoints=8)
    blocks.complete(blocks.take_copies()[0])
    blocks.begin_restore(A)
    blocks.restore(A, 1)
    blocks.cancel_restore(A)
    assert (blocks.num_free_blocks, blocks.num_unreferenced_blocks) == (7, 1)
    blocks.begin_restore(A)
    assert blocks.restore(A, 8) == 2, "one host block may be read twice"
    blocks.release(A)
    assert (blocks.num_free_blocks, blocks.num_free_host_blocks) == (5, 6)
    blocks.complete(blocks.take_copies()[1])
    assert (blocks.num_free_blocks, blocks.num_free_host_blocks) == (8, 8)
    blocks.check_integrity()


def test_copies_of_blocks_on_the_device_are_evicted_back_to_one_in_use() -> None:
    blocks = two_tiers()
    blocks.grow(A, 16)
    blocks.checkpoint(A, 16, max_blocks=4)
    copies = blocks.take_copies()[0]
    blocks.complete([copies[0], copies[2], copies[3]])
    assert blocks.evict_host_blocks(A, 4) == 0
    assert blocks.num_host_blocks_of(A) == 2, "the second is in flight"
    blocks.complete([copies[1]])
    blocks.share(A, B, 1)
    blocks.evict_host_blocks(A, 4)
    assert blocks.num_host_blocks_of(A) == 1, "the first is another's too"


def test_misuse_asserts() -> None:
    blocks = two_tiers()
    blocks.grow(A, 8)
    blocks.grow(B, 4)
    with pytest.raises(AssertionError, match="b has blocks"):
        blocks.share(A, B, 1)
    with pytest.raises(AssertionError, match="2 of 3 blocks"):
        blocks.share(A, RequestId("c"), 3)
    with pytest.raises(AssertionError, match="is not preempted"):
        blocks.begin_restore(A)
    with pytest.raises(AssertionError, match="not being restored"):
        blocks.cancel_restore(A)
    with pytest.raises(AssertionError, match="is in flight"):
        blocks.complete([BlockCopy(block_index(blocks.table(A)[0]), 0)])
    blocks.reclaim(A, 8, max_checkpoints=8)
    for use in (
        lambda: blocks.grow(A, 12),
        lambda: blocks.share(A, RequestId("c"), 1),
        lambda: blocks.checkpoint(A, 8, 1),
        lambda: blocks.reclaim(A, 8),
    ):
        with pytest.raises(AssertionError, match="is preempted"):
            use()
    blocks.complete(blocks.take_copies()[0])
    blocks.begin_restore(A)
    with pytest.raises(AssertionError, match="being restored"):
        blocks.evict_host_blocks(A, 2)
    blocks.restore(A, 1)
    with pytest.raises(AssertionError, match="in flight"):
        blocks.end_restore(A)
    blocks.check_integrity()


GARBAGE = ("garbage", -1)
BLOCK_SIZE = 3
NUM_BLOCKS, NUM_HOST_BLOCKS = 9, 7


@dataclass
class Stream:
    """One request in the model: the tags of its computed tokens, in either tier."""

    tags: list[tuple[str, int]] = field(default_factory=list)
    place: Literal["device", "host", "restoring"] = "device"


@dataclass
class InFlight:
    copy: BlockCopy
    to_host: bool
    is_moved: bool


class TwoTierMachine(RuleBasedStateMachine):
    """Random use of both tiers against the contents of their memory.

    Free blocks hold garbage at once, and a copy moves its block at some moment from its beginning to its
    completion, so that a block that is given out, or read, too early shows as a wrong tag.
    """

    blocking = CopyDirections.NONE
    picks = st.integers(0, 11)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS, blocking=self.blocking)
        self.device = [[GARBAGE] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.host = [[GARBAGE] * BLOCK_SIZE for _ in range(NUM_HOST_BLOCKS)]
        self.streams: dict[RequestId, Stream] = {}
        self.in_flight: list[InFlight] = []
        self.num_named = 0

    # The model's state.

    def at(self, *places: str) -> list[RequestId]:
        return [request_id for request_id, stream in self.streams.items() if stream.place in places]

    def pick(self, pick: int, *places: str) -> RequestId | None:
        eligible = self.at(*places)
        return eligible[pick % len(eligible)] if eligible else None

    def checkpoints_begun(self) -> list[BlockCopy]:
        """Checkpoints that no plan has taken yet."""
        return list(self.blocks._checkpoint.values())

    def untouchable(self) -> tuple[set[int], set[int]]:
        """Device and host blocks with a copy in flight, whether a plan has taken it or not."""
        copies = [*(each.copy for each in self.in_flight), *self.blocks._restore]
        if CopyDirections.CHECKPOINT not in self.blocking:
            copies += self.checkpoints_begun()
        return {copy.device for copy in copies}, {copy.host for copy in copies}

    def restored_by_next_plan(self) -> set[int]:
        """Device blocks that the next plan fills before it computes anything."""
        return {c.device for c in self.blocks._restore} if CopyDirections.RESTORE in self.blocking else set()

    def name(self) -> RequestId:
        self.num_named += 1
        return RequestId(f"s{self.num_named}")

    # Rules.

    @rule(num_tokens=st.integers(1, 9))
    def start(self, num_tokens: int) -> None:
        if self.blocks.blocks_for(num_tokens) <= self.blocks.num_free_blocks:
            request_id = self.name()
            self.streams[request_id] = Stream()
            self.grow(request_id, num_tokens)
            self.compute(request_id, num_tokens)

    @rule(pick=picks, num_tokens=st.integers(1, 7), computes=st.booleans())
    def append(self, pick: int, num_tokens: int, computes: bool) -> None:
        request_id = self.pick(pick, "device")
        if request_id is None:
            return
        num_tokens += len(self.streams[request_id].tags)
        if self.blocks.num_missing_blocks(request_id, num_tokens) <= self.blocks.num_free_blocks:
            self.grow(request_id, num_tokens)
            if computes:
                self.compute(request_id, num_tokens)

    def grow(self, request_id: RequestId, num_tokens: int) -> None:
        before = self.blocks.table(request_id) if self.blocks.num_held_blocks(request_id) else ()
        busy, _ = self.untouchable()
        self.blocks.grow(request_id, num_tokens)
        table = self.blocks.table(request_id)
        assert table[: len(before)] == before, "grown, not moved"
        assert busy.isdisjoint(map(block_index, table[len(before) :])), "a block in a copy was given out"

    def compute(self, request_id: RequestId, num_tokens: int) -> None:
        """A step: its copies begin, then the request's slice is computed."""
        self.take()
        stream, table = self.streams[request_id], self.blocks.table(request_id)
        busy, _ = self.untouchable()
        for position in range(len(stream.tags), num_tokens):
            tag = (f"{request_id} {self.num_named}", position)
            index = block_index(table[position // BLOCK_SIZE])
            assert index not in busy, "a step writes a block that is being copied"
            self.device[index][position % BLOCK_SIZE] = tag
            stream.tags.append(tag)

    @rule(pick=picks, num_blocks=st.integers(1, 3))
    def share(self, pick: int, num_blocks: int) -> None:
        source = self.pick(pick, "device")
        if source is None:
            return
        num_blocks = min(num_blocks, len(self.streams[source].tags) // BLOCK_SIZE)
        target = self.name()
        self.streams[target] = Stream(self.streams[source].tags[: num_blocks * BLOCK_SIZE])
        self.blocks.share(source, target, num_blocks)

    @rule(pick=picks, max_blocks=st.integers(0, 4))
    def checkpoint(self, pick: int, max_blocks: int) -> None:
        request_id = self.pick(pick, "device")
        if request_id is None or self.is_restored_by_next_plan(request_id):
            return
        _, busy = self.untouchable()
        before, num_tokens = len(self.checkpoints_begun()), len(self.streams[request_id].tags)
        uncopied = self.blocks.num_uncheckpointed_blocks(request_id, num_tokens)
        room = self.blocks.num_free_host_blocks
        begun = self.blocks.checkpoint(request_id, num_tokens, max_blocks)
        assert begun == min(max_blocks, uncopied, room)
        new = self.checkpoints_begun()[before:]
        assert len(new) == begun
        assert busy.isdisjoint(copy.host for copy in new), "a host block in a copy was given out"

    @rule(pick=picks, num_needed=st.integers(0, 6), max_checkpoints=st.integers(0, 6))
    def reclaim(self, pick: int, num_needed: int, max_checkpoints: int) -> None:
        request_id = self.pick(pick, "device")
        if request_id is None or self.is_restored_by_next_plan(request_id):
            return
        stream, table = self.streams[request_id], set(self.blocks.table(request_id))
        busy = {ref for ref in table if block_index(ref) in self.untouchable()[0]}
        free, num_saves = self.blocks.num_free_blocks, len(self.checkpoints_begun())
        _, busy_host = self.untouchable()
        is_shared = not table.isdisjoint(self.blocks._more_owners)
        kept = self.blocks.reclaim(
            request_id, len(stream.tags), num_needed=num_needed, max_checkpoints=max_checkpoints
        )
        saves = self.checkpoints_begun()[num_saves:]
        assert len(saves) <= max_checkpoints
        assert busy_host.isdisjoint(copy.host for copy in saves), "a host block in a copy was given out"
        if not is_shared:
            assert self.blocks.num_free_blocks - free >= min(num_needed, len(table) - len(busy))
        assert 0 <= kept <= len(stream.tags)
        self.keep_on_host(request_id, kept)

    def keep_on_host(self, request_id: RequestId, kept: int) -> None:
        stream = self.streams[request_id]
        del stream.tags[kept:]
        stream.place = "host"
        assert self.blocks.num_host_blocks_of(request_id) == self.blocks.blocks_for(kept)
        if not kept:
            del self.streams[request_id]

    def is_restored_by_next_plan(self, request_id: RequestId) -> bool:
        """A checkpoint of such a block before the next plan would copy its present contents."""
        return not self.restored_by_next_plan().isdisjoint(map(block_index, self.blocks.table(request_id)))

    @rule(pick=picks, max_blocks=st.integers(0, 3))
    def evict_host_blocks(self, pick: int, max_blocks: int) -> None:
        request_id = self.pick(pick, "device", "host")
        if request_id is None:
            return
        before = self.blocks.num_host_blocks_of(request_id)
        kept = self.blocks.evict_host_blocks(request_id, max_blocks)
        if self.streams[request_id].place == "device":
            assert kept == 0
            assert before - max_blocks <= self.blocks.num_host_blocks_of(request_id) <= before
        else:
            self.keep_on_host(request_id, kept)
            assert self.blocks.num_host_blocks_of(request_id) == max(0, before - max_blocks)

    @rule(pick=picks, max_blocks=st.integers(0, 4))
    def begin_restore(self, pick: int, max_blocks: int) -> None:
        request_id = self.pick(pick, "host")
        if request_id is None:
            return
        if self.blocks.num_host_blocks_of(request_id) <= self.blocks.num_free_blocks:
            busy, _ = self.untouchable()
            self.blocks.begin_restore(request_id)
            assert busy.isdisjoint(map(block_index, self.blocks.table(request_id)))
            self.streams[request_id].place = "restoring"
            self.restore_some(request_id, max_blocks)

    @rule(pick=picks, max_blocks=st.integers(1, 4))
    def restore(self, pick: int, max_blocks: int) -> None:
        request_id = self.pick(pick, "restoring")
        if request_id is not None:
            self.restore_some(request_id, max_blocks)

    def restore_some(self, request_id: RequestId, max_blocks: int) -> None:
        being_written = {each.copy.host for each in self.in_flight if each.to_host}
        if CopyDirections.CHECKPOINT not in self.blocking:
            being_written |= {copy.host for copy in self.checkpoints_begun()}
        before = len(self.blocks._restore)
        begun = self.blocks.restore(request_id, max_blocks)
        new = self.blocks._restore[before:]
        assert len(new) == begun <= max_blocks
        assert being_written.isdisjoint(copy.host for copy in new), "restored from a block not yet written"

    @rule(pick=picks)
    def end_restore(self, pick: int) -> None:
        request_id = self.pick(pick, "restoring")
        if request_id is not None and self.blocks.is_restored(request_id):
            self.end(request_id)

    def end(self, request_id: RequestId) -> None:
        stream = self.streams[request_id]
        assert self.blocks.end_restore(request_id) == len(stream.tags)
        assert self.blocks.num_complete_checkpoints_of(request_id) == len(stream.tags) // BLOCK_SIZE
        stream.place = "device"

    @rule(pick=picks)
    def cancel_restore(self, pick: int) -> None:
        request_id = self.pick(pick, "restoring")
        if request_id is not None:
            self.blocks.cancel_restore(request_id)
            self.streams[request_id].place = "host"

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        request_id = self.pick(pick, "device", "host", "restoring")
        if request_id is not None:
            self.blocks.release(request_id)
            del self.streams[request_id]

    @rule(moves_when_begun=st.integers(0, 255))
    def plan(self, moves_when_begun: int) -> None:
        self.take(moves_when_begun)

    @rule()
    def settle(self) -> None:
        """All copies complete, and the restores that they complete end."""
        for request_id in self.at("restoring"):
            self.restore_some(request_id, NUM_HOST_BLOCKS)
        self.take()
        self.complete_in(range(len(self.in_flight)))
        for request_id in self.at("restoring"):
            if self.blocks.is_restored(request_id):
                self.end(request_id)

    def take(self, moves_when_begun: int = 0b10110010) -> None:
        """A plan takes the copies begun so far; blocking ones complete before its slices."""
        checkpoint, restore = self.blocks.take_copies()
        assert len({copy.device for copy in restore}) == len(restore), "two copies into one device block"
        assert len({copy.host for copy in checkpoint}) == len(checkpoint), "two copies into one host block"
        for to_host, copies in ((True, checkpoint), (False, restore)):
            waits = (CopyDirections.CHECKPOINT if to_host else CopyDirections.RESTORE) in self.blocking
            for index, copy in enumerate(copies):
                is_moved = waits or bool(moves_when_begun >> index & 1)
                if is_moved:
                    self.move(copy, to_host)
                if not waits:
                    self.in_flight.append(InFlight(copy, to_host, is_moved))

    def move(self, copy: BlockCopy, to_host: bool) -> None:
        if to_host:
            self.host[copy.host] = list(self.device[copy.device])
        else:
            self.device[copy.device] = list(self.host[copy.host])

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        order = data.draw(st.lists(st.sampled_from(range(len(self.in_flight))), min_size=1, unique=True))
        self.complete_in(order)

    def complete_in(self, order: Sequence[int]) -> None:
        done = [self.in_flight[index] for index in order]
        for each in done:
            if not each.is_moved:
                self.move(each.copy, each.to_host)
            self.in_flight.remove(each)
        self.blocks.complete([each.copy for each in done])

    # Invariants.

    @invariant()
    def counts_agree_in_both_tiers(self) -> None:
        self.blocks.check_integrity()
        busy, busy_host = self.untouchable()
        at_once = len(self.restored_by_next_plan())
        assert self.blocks.num_copies_in_flight == len(busy) - at_once, "a block is in two copies in flight"
        free = set(map(block_index, self.blocks._free))
        assert free.isdisjoint(busy), "a block in a copy is free"
        assert busy_host.isdisjoint(self.blocks._free_host), "a host block in a copy is free"
        # A block with a blocking checkpoint still has its contents when the step begins.
        for index in free - {copy.device for copy in self.checkpoints_begun()}:
            self.device[index] = [GARBAGE] * BLOCK_SIZE
        for index in self.blocks._free_host:
            self.host[index] = [GARBAGE] * BLOCK_SIZE

    @invariant()
    def every_counted_token_is_where_the_tables_say(self) -> None:
        unwritten = {each.copy.host for each in self.in_flight if each.to_host}
        unwritten |= {copy.host for copy in self.checkpoints_begun()}
        unfilled = self.restored_by_next_plan()
        for request_id, stream in self.streams.items():
            table = self.blocks._tables[request_id]
            first = list(table.host)
            if stream.place == "device":
                indices = list(map(block_index, table.refs))
                self.check(stream.tags, self.device, indices, unfilled, request_id)
                num_complete = self.blocks.num_complete_checkpoints_of(request_id)
                first = [self.blocks._copy_of[ref] for ref in table.refs[:num_complete]]
                assert CopyDirections.CHECKPOINT in self.blocking or unwritten.isdisjoint(first)
            else:
                assert len(stream.tags) <= len(first) * BLOCK_SIZE
            self.check(stream.tags, self.host, first, unwritten, request_id)

    def check(
        self,
        tags: Sequence[tuple[str, int]],
        memory: Sequence[Sequence[tuple[str, int]]],
        indices: Sequence[int],
        not_yet: set[int],
        request_id: RequestId,
    ) -> None:
        for number, index in enumerate(indices):
            expected = tags[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
            if index not in not_yet:
                assert list(memory[index][: len(expected)]) == list(expected), f"{request_id}, block {number}"

    def teardown(self) -> None:
        self.take()
        for request_id in list(self.streams):
            self.blocks.release(request_id)
        self.complete_in(range(len(self.in_flight)))
        self.blocks.check_integrity()
        assert self.blocks.num_free_blocks == NUM_BLOCKS
        assert self.blocks.num_free_host_blocks == NUM_HOST_BLOCKS
        assert self.blocks.num_copies_in_flight == self.blocks.num_unreferenced_blocks == 0


class BlockingCheckpointMachine(TwoTierMachine):
    blocking = CopyDirections.CHECKPOINT


class BlockingRestoreMachine(TwoTierMachine):
    blocking = CopyDirections.RESTORE


class BlockingMachine(TwoTierMachine):
    blocking = CopyDirections.CHECKPOINT | CopyDirections.RESTORE


MACHINES = (TwoTierMachine, BlockingCheckpointMachine, BlockingRestoreMachine, BlockingMachine)
_TIERS = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTwoTierMachine = TwoTierMachine.TestCase
TestSavingAtOnceMachine = BlockingCheckpointMachine.TestCase
TestRestoringAtOnceMachine = BlockingRestoreMachine.TestCase
TestBlockingMachine = BlockingMachine.TestCase
for _case in (TestTwoTierMachine, TestSavingAtOnceMachine, TestRestoringAtOnceMachine, TestBlockingMachine):
    _case.settings = _TIERS
del _case


@pytest.mark.parametrize("machine_type", MACHINES)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_long_walk_loses_or_overwrites_a_block(machine_type: type[TwoTierMachine], seed: int) -> None:
    """States after many steps, which the machines above rarely reach; those shrink their examples."""
    rng, machine = random.Random(seed), machine_type()
    few, many = functools.partial(rng.randint, 0, 4), functools.partial(rng.randint, 0, 11)

    def complete() -> None:
        machine.complete_in(rng.sample(range(len(machine.in_flight)), min(few(), len(machine.in_flight))))

    actions: list[tuple[int, Callable[[], None]]] = [
        (4, lambda: machine.start(1 + rng.randrange(9))),
        (6, lambda: machine.append(many(), 1 + rng.randrange(7), rng.random() < 0.7)),
        (2, lambda: machine.share(many(), 1 + rng.randrange(3))),
        (5, lambda: machine.checkpoint(many(), few())),
        (5, lambda: machine.reclaim(many(), few(), few())),
        (1, lambda: machine.evict_host_blocks(many(), few())),
        (5, lambda: machine.begin_restore(many(), few())),
        (3, lambda: machine.restore(many(), 1 + few())),
        (4, lambda: machine.end_restore(many())),
        (1, lambda: machine.cancel_restore(many())),
        (2, lambda: machine.release(many())),
        (6, lambda: machine.plan(rng.randrange(256))),
        (6, complete),
        (1, machine.settle),
    ]
    weights = [weight for weight, _ in actions]
    for _, action in rng.choices(actions, weights, k=150):
        action()
        machine.counts_agree_in_both_tiers()
        machine.every_counted_token_is_where_the_tables_say()
    machine.teardown()
