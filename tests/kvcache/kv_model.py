"""A model of what the memory of the KV cache holds."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backfill.core.block import BlockRef, SlotCopy, block_index, is_reversed
from backfill.core.config import CheckpointingName, PrefixCacheScope, SchedulerConfig
from backfill.core.plan import BlockCopies, CopyDirections
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.kvcache.checkpointer import Saving
from backfill.kvcache.content import Block, BlockKey, BlockState, Evictable, Match
from backfill.kvcache.copies import Copy, CopyLimits
from backfill.kvcache.create import create_checkpoint_policy
from backfill.kvcache.manager import KVCacheManager
from tests.builders import make_request
from tests.integrity import check_kv

Rows = NDArray[np.int64]  # [tokens, 3]: token id, position, hash of the namespace and all tokens so far


@dataclass(frozen=True)
class Setup:
    """What one run of the driver varies."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    vocab_size: int
    policy: CheckpointingName
    blocking: CopyDirections
    prefix_caching: bool
    scope: PrefixCacheScope
    bidirectional: bool = False
    max_num_blocks: int | None = None  # the pool is resized, and never smaller than ``num_blocks``


@dataclass(eq=False)
class Running:
    """One request of the model: where it is, and what its KV must read."""

    request: Request
    root: int
    place: Literal["queued", "restoring", "running"] = "queued"
    suspended_until: int | None = None  # end of the slice that is suspended
    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def expected(self, start: int, end: int) -> Rows:
        request, rows = self.request, self.rows
        for position in range(len(rows), end):
            prompt, output = request.prompt_token_ids, request.output_token_ids
            token = prompt[position] if position < len(prompt) else output[position - len(prompt)]
            before = rows[-1][2] if rows else self.root
            rows.append((token, position, hash((before, token))))
        return np.array(rows[start:end], dtype=np.int64).reshape(-1, 3)


@dataclass(eq=False)
class InFlight:
    copy: Copy
    slots: slice
    to_host: bool
    is_moved: bool

    def shares_slots(self, slots: slice) -> bool:
        return self.slots.start < slots.stop and slots.start < self.slots.stop


class CacheModel:
    """The memory of both tiers beside the manager that decides what is where.

    Memory without a user holds garbage at once, and a copy moves its block at its beginning or at its
    completion. So whatever is given out, read or written too early shows as a wrong row.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup, self.rng, self.now_s, self.num_named = setup, rng, 0.0, 0
        self.size = setup.block_size
        self.cache = KVCacheManager(
            setup.num_blocks,
            setup.block_size,
            setup.num_host_blocks,
            policy=create_checkpoint_policy(SchedulerConfig(checkpointing=setup.policy)),
            blocking=setup.blocking,
            prefix_caching=setup.prefix_caching,
            prefix_cache_scope=setup.scope,
            bidirectional=setup.bidirectional,
            secret=b"model",
            max_num_blocks=setup.max_num_blocks,
        )
        most = setup.max_num_blocks or setup.num_blocks
        self.device = np.full((most, self.size, 3), -1, dtype=np.int64)
        self.host = np.full((setup.num_host_blocks, self.size, 3), -1, dtype=np.int64)
        self.all: dict[RequestId, Running] = {}
        self.in_flight: list[InFlight] = []
        self.limits = CopyLimits(0, 0)
        self.known: dict[BlockKey, Rows] = {}

    # Looking.

    def at(self, *places: str) -> list[Running]:
        return [each for each in self.all.values() if each.place in places]

    def unfilled(self) -> set[int]:
        """Device blocks that the next plan fills before it computes anything."""
        restores = self.cache._store.ledger._restore
        return {copy.device for copy in restores} if CopyDirections.RESTORE in self.setup.blocking else set()

    def still_read(self) -> set[int]:
        """Device blocks that the next plan's blocking checkpoints read, although they may be empty."""
        is_blocking = CopyDirections.CHECKPOINT in self.setup.blocking
        return {copy.device for copy in self.cache._store.ledger._checkpoint} if is_blocking else set()

    def unwritten_host(self) -> set[int]:
        return {copy.host for copy in self.cache._store.ledger._checkpoint}

    def check(self) -> None:
        """The manager's own account, every request's computed tokens, and all content in both tiers."""
        cache = self.cache
        check_kv(cache)
        counts = cache.counts
        total = counts.empty + counts.cached + counts.cached_with_copy + counts.protected + counts.referenced
        assert total == cache.num_blocks + cache.resizing.num_draining
        for uses, size in ((counts.device_by_use, total), (counts.host_by_use, self.setup.num_host_blocks)):
            by_use = (uses.online, uses.offline, uses.cached, uses.empty)
            assert min(by_use) >= 0 and sum(by_use) == size, by_use
        self.check_beyond_end()
        self.learn_keys()
        unfilled = self.unfilled()
        for each in self.at("running"):
            self.check_table(each, each.request.num_computed_tokens, unfilled)
        tails = {
            table.tail: self.all[request_id] for request_id, table in cache._tables.items() if table.tail
        }
        starts = {
            table.tail: (table.wanted.index(table.tail) if table.wanted else len(table.blocks) - 1)
            * self.size
            for table in cache._tables.values()
            if table.tail
        }
        guests = [block.peer for block in cache._device.blocks if block.peer is not None]
        for blocks, memory, skipped in (
            ((*cache._device.blocks, *guests), self.device, unfilled),
            (cache._store.host.blocks, self.host, self.unwritten_host()),
        ):
            for block in blocks:
                content, is_host = block.content, memory is self.host
                if content is None or block.index in skipped:
                    continue
                if not block.is_valid and (is_host or not content.num_lost):
                    continue
                if content.key is not None:
                    expected = self.known[content.key]
                else:
                    start = starts[content]
                    expected = tails[content].expected(start, start + content.num_tokens)
                assert len(expected) == content.num_tokens
                first, last = 0, content.num_device_tokens
                if is_host:
                    first, last = content.num_unsaved, content.num_tokens
                held = memory[block.index, self.slots(block.ref, first, last)]
                assert np.array_equal(held, expected[first:last]), f"{block}"
        self.spoil()

    def check_beyond_end(self) -> None:
        """Nothing but what has yet to be drained is beyond the pool's end."""
        device, num_used = self.cache._device, 0
        for block in device.blocks[device.num_blocks :]:
            is_used = bool(block.num_refs or block.num_copies or block.content or block.peer)
            assert is_used is not (block.state is BlockState.ABSENT), f"{block}"
            num_used += is_used
        assert num_used == self.cache.resizing.num_draining
        empty = [block.index for block in device._empty]
        assert all(index < device.num_blocks for index in empty)

    def slots(self, ref: BlockRef, first: int, last: int) -> list[int]:
        """Where the tokens ``[first, last)`` of a block are."""
        return [self.size - 1 - each if is_reversed(ref) else each for each in range(first, last)]

    def learn_keys(self) -> None:
        for request_id, table in self.cache._tables.items():
            for index, key in enumerate(table.keys):
                if key not in self.known or index == len(table.keys) - 1:
                    rows = self.all[request_id].expected(index * self.size, (index + 1) * self.size)
                    assert np.array_equal(self.known.setdefault(key, rows), rows), "a key of two contents"

    def check_table(self, each: Running, num_tokens: int, unfilled: set[int]) -> None:
        refs = self.cache.table(each.request.request_id)
        expected = each.expected(0, num_tokens)
        assert len(refs) * self.size >= num_tokens
        for number in range(-(-num_tokens // self.size)):
            index = block_index(refs[number])
            rows = expected[number * self.size : (number + 1) * self.size]
            if index not in unfilled:
                held = self.device[index, self.slots(refs[number], 0, len(rows))]
                assert np.array_equal(held, rows), f"{each}, block {number}"

    def spoil(self) -> None:
        """Overwrite memory that holds nothing, unless the next plan's blocking copies still read it."""
        still_read, unfilled = self.still_read(), self.unfilled()
        host_read = {copy.host for copy in self.cache._store.ledger._restore if copy.device in unfilled}
        for block in self.cache._device.blocks:
            content, peer = block.content, block.peer
            if block.index in still_read:
                continue
            if peer is not None:
                front, rear = (peer, block) if is_reversed(block.ref) else (block, peer)
                self.device[block.index, front.num_slots : self.size - rear.num_slots] = -1
            elif content is None and not block.num_refs:
                self.device[block.index] = -1
            elif content is not None and content.num_lost and not block.num_copies:
                lost = self.slots(block.ref, content.num_device_tokens, content.num_tokens)
                self.device[block.index, lost] = -1
        for block in self.cache._store.host.blocks:
            if block.content is None and block.index not in host_read:
                self.host[block.index] = -1

    def block_of(self, each: Running, position: int) -> Block:
        return self.cache._tables[each.request.request_id].blocks[position // self.size]

    def advance(self, now_s: float, max_copies: int) -> None:
        self.cache.advance(now_s)
        self.limits = CopyLimits(max_copies, max_copies)

    def resize(self, num_blocks: int) -> None:
        """What cannot be taken before is beyond the end, and what can be taken is not."""
        cache = self.cache
        before = {request_id: table.refs for request_id, table in cache._tables.items()}
        cache.resizing.resize(num_blocks)
        assert cache.num_blocks == num_blocks
        assert before == {request_id: table.refs for request_id, table in cache._tables.items()}

    def drain(self, limit: Evictable, max_moves: int, in_flight: Collection[RequestId] = ()) -> None:
        """Blocks move in the order that the plan has, and only into memory before the end.

        Those of requests in flight stay where they are.
        """
        cache = self.cache
        num_draining = cache.resizing.num_draining
        held = {each: cache._tables[each].refs for each in in_flight}
        cache.resizing.drain(limit, max_moves, in_flight)
        assert held == {each: cache._tables[each].refs for each in in_flight}
        assert cache.resizing.num_draining <= num_draining
        moves = cache.resizing.take_moves()
        assert len(moves) <= min(max_moves, num_draining)
        for move in moves:
            assert move.target < cache.num_blocks <= move.source
            self.device[move.target] = self.device[move.source]

    # A request's life.

    def submit(self, request: Request | None = None) -> Running:
        rng, setup = self.rng, self.setup
        self.num_named += 1
        if request is None:
            most = min(setup.num_blocks * self.size - 1, 6 * self.size)
            most_output = setup.num_blocks * self.size - most
            if setup.bidirectional:  # many requests beside each other, most of whose blocks are last blocks
                most = min(rng.choice((1, 1, 3)) * self.size, most)
                most_output = min(2 * self.size, setup.num_blocks * self.size - most)
            prompt = [rng.randrange(setup.vocab_size) for _ in range(rng.randint(1, most))]
            if self.all and rng.random() < 0.5:  # begins as another one does
                other = rng.choice(list(self.all.values())).request.prompt_token_ids
                prompt = [*other, *prompt][:most]
            request = make_request(
                request_id=f"r{self.num_named}",
                prompt_token_ids=prompt,
                max_tokens=rng.randint(1, most_output),
                service_class=rng.choice(list(ServiceClass)),
            )
            request.owner, request.cache_salt = rng.choice(("a", "b")), rng.choice(("", "", "s"))
            if rng.random() < 0.5:
                request.num_reused_tokens = rng.randint(0, len(prompt))
        request.enqueue(self.num_named)
        namespace = {"": 0, "a": 1, "b": 2, "s": 3}
        root = hash((namespace[request.owner], namespace[request.cache_salt]))
        if setup.scope == "global":
            root = hash((0, namespace[request.cache_salt]))
        if not setup.prefix_caching:
            root = hash((-1, self.num_named))
        each = self.all[request.request_id] = Running(request, root)
        return each

    def admit(self, each: Running, limit: Evictable, num_reserved: int, may_preempt: bool = True) -> bool:
        """Match and allocate, preempting others as long as blocks lack; False if they lack in the end."""
        cache, request = self.cache, each.request
        num_cached, is_new = cache.num_cached_tokens(request), request.first_scheduled_at_s is None
        match = cache.match(request)
        assert match.num_tokens == num_cached or not is_new
        while (shortage := cache.shortage(request, match, num_reserved, limit)) > 0:
            victims = self.at("running", "restoring")
            if not victims or not may_preempt or self.rng.random() < 0.3:
                return False
            self.preempt(self.rng.choice(victims))
            match = cache.match(request)
        needed = cache.blocks_for(request.num_tokens) + num_reserved
        found = [content.device for content in match.contents]
        is_restored = cache.allocate(request, match, limit)
        request.first_scheduled_at_s = 0.0
        num_shared = int(self.setup.bidirectional)  # at most
        needed -= len(match.contents) + num_shared
        assert needed <= cache.counts.available(limit), f"{shortage} were said to lack"
        assert cache.growth_shortage(request, request.num_tokens, limit) <= 0
        assert request.num_computed_tokens == match.num_tokens < request.num_tokens
        for content, block in zip(match.contents, found, strict=True):
            if block is None and content.device is not None and content.device.index not in self.still_read():
                self.device[content.device.index] = -1
        each.place = "restoring"
        if is_restored:
            self.start(each)
        return True

    def start(self, each: Running) -> None:
        self.cache.start(each.request)
        each.place = "running"

    def end_restores(self) -> None:
        for each in self.at("restoring"):
            if self.cache.is_restored(each.request):
                self.start(each)

    def preempt(self, each: Running) -> None:
        cache, request_id = self.cache, each.request.request_id
        before = {limit: cache.counts.available(limit) for limit in (Evictable.OFFLINE, Evictable.ALL)}
        freed = {limit: cache.counts.num_freed([request_id], Match((), 0), limit) for limit in before}
        is_offline = each.request.service_class is ServiceClass.OFFLINE
        cache.preempt(each.request)
        assert cache.counts.available(Evictable.ALL) >= before[Evictable.ALL] + freed[Evictable.ALL]
        if is_offline:
            limit = Evictable.OFFLINE
            assert cache.counts.available(limit) >= before[limit] + freed[limit]
        each.request.num_preemptions += 1
        each.place, each.suspended_until = "queued", None

    def free(self, each: Running) -> None:
        self.learn_keys()
        self.cache.free(each.request)
        assert self.cache.counts.held(each.request.request_id) == 0
        del self.all[each.request.request_id]

    def grow(self, each: Running, num_tokens: int, limit: Evictable) -> bool:
        """Blocks for so many tokens, if there are enough."""
        request_id = each.request.request_id
        before = self.cache.table(request_id)
        missing = self.cache.num_missing_blocks(request_id, num_tokens)
        if self.cache.growth_shortage(each.request, num_tokens, limit) > 0:
            return False
        self.cache.grow(each.request, num_tokens, limit)
        after = self.cache.table(request_id)
        assert after[: len(before)] == before and len(after) == len(before) + missing
        for block in self.cache._tables[request_id].blocks[len(before) :]:
            if block.index not in self.still_read() and block.peer is None:
                self.device[block.index] = -1
        return True

    def preempt_for_slots(self, each: Running, num_tokens: int) -> Running | None:
        """Preempt the request that is in the way of this one, if there is one."""
        victim = self.cache.sharing.to_preempt(each.request, num_tokens)
        if victim is None:
            return None
        self.preempt(self.all[victim.request_id])
        return self.all[victim.request_id]

    # Steps.

    def compute(self, each: Running, start: int, end: int, *, is_whole: bool = True) -> None:
        """Write the slots of a slice, all of them right or, if it was stopped, with garbage."""
        self.check_table(each, start, set())
        for position, row in zip(range(start, end), each.expected(start, end), strict=True):
            block = self.block_of(each, position)
            assert block.num_refs == 1 and block.content is None, f"{block} is written"
            (slot,) = self.slots(block.ref, position % self.size, position % self.size + 1)
            for copy in self.in_flight:
                is_copied = copy.copy.device == block.index and copy.shares_slots(slice(slot, slot + 1))
                assert not is_copied, f"{block} is written under a copy"
            assert block.peer is None or position % self.size < block.num_slots, f"{block} is not claimed"
            self.device[block.index, slot] = row if is_whole else -2

    def commit(self, each: Running, end: int) -> None:
        request = each.request
        request.num_computed_tokens = end
        request.num_ever_computed_tokens = max(request.num_ever_computed_tokens, end)
        self.cache.commit(request, end)

    # Copies.

    def take_copies(self) -> BlockCopies:
        """A plan takes the copies begun so far; blocking ones complete before its slices."""
        num_room = self.cache._store.host.available(BlockState.SECURED)
        copies = self.cache.take_copies(self.limits, 0.0)
        restore, checkpoint = copies.restore, copies.checkpoint
        assert len({copy.device for copy in restore}) == len(restore), "two copies into one device block"
        assert len({copy.host for copy in checkpoint}) == len(checkpoint), "two copies into one host block"
        for direction, of_direction in (
            (CopyDirections.CHECKPOINT, (*checkpoint, *copies.slot_checkpoint)),
            (CopyDirections.RESTORE, (*restore, *copies.slot_restore)),
        ):
            waits = direction in self.setup.blocking
            for copy in of_direction:
                slots = slice(0, self.size)
                if isinstance(copy, SlotCopy):
                    assert 0 <= copy.first < copy.first + copy.num <= self.size
                    slots = slice(copy.first, copy.first + copy.num)
                is_moved = waits or self.rng.random() < 0.5
                each = InFlight(copy, slots, direction is CopyDirections.CHECKPOINT, is_moved)
                self.check_apart(each)
                if is_moved:
                    self.move(each)
                elif each.to_host:
                    self.host[copy.host, slots] = -3
                else:
                    self.device[copy.device, slots] = -3
                if not waits:
                    self.in_flight.append(each)
        assert self.cache.num_copies_in_flight == len(self.in_flight)
        self.check_tails_beside_others(num_room)
        return copies

    def check_tails_beside_others(self, num_room: int) -> None:
        """Those in blocks whose other end is in use are copied, but for want of time or room."""
        cache = self.cache
        if cache.checkpointer.saving is not Saving.BESIDE_STEPS:
            return
        shared = cache.sharing.blocks.values()
        if num_room >= len(shared) and cache.num_copies_in_flight < self.limits.background:
            for block in shared:
                assert block.peer is not None
                assert block.peer.content is None or block.peer.content.host is not None, f"{block.peer}"

    def check_apart(self, each: InFlight) -> None:
        """No other copy in flight touches what this one writes, or writes what it reads."""
        for other in self.in_flight:
            if other.shares_slots(each.slots):
                if each.copy.device == other.copy.device:
                    assert each.to_host and other.to_host, f"{each} beside {other}"
                if each.copy.host == other.copy.host:
                    assert not each.to_host and not other.to_host, f"{each} beside {other}"

    def move(self, each: InFlight) -> None:
        device, host, slots = each.copy.device, each.copy.host, each.slots
        if each.to_host:
            self.host[host, slots] = self.device[device, slots]
        else:
            self.device[device, slots] = self.host[host, slots]

    def complete(self, done: Sequence[InFlight]) -> None:
        for each in done:
            if not each.is_moved:
                self.move(each)
            self.in_flight.remove(each)
        self.cache.complete([each.copy for each in done])
