"""The KV cache over two tiers: which request's KV is where. Pure bookkeeping: no tensor is touched here."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import takewhile

from backfill.core.block import BlockRef
from backfill.core.config import PrefixCacheScope
from backfill.core.counters import ClassCounters
from backfill.core.plan import BlockCopies, CopyDirections
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.kvcache.checkpointer import Checkpointer, Saving
from backfill.kvcache.checkpointing import CheckpointPolicy, FixedCheckpoints
from backfill.kvcache.content import BlockKey, Content, Evictable, KeyChain, Match
from backfill.kvcache.copies import Copy, CopyLimits
from backfill.kvcache.counts import BlockCounts
from backfill.kvcache.last_blocks import LastBlocks
from backfill.kvcache.resizing import Resizing
from backfill.kvcache.sharing import SharedLastBlocks
from backfill.kvcache.store import ContentStore
from backfill.kvcache.table import BlockTable

_KEYS_AT_ONCE = 16  # made while a request is looked up


class KVCacheManager:
    """Finds, allocates and frees the KV of requests, on the device and in host memory.

    The KV of a full block is *content*: it depends on its tokens and those before, never changes, and has a
    key. It *resides* on the device, in host memory, or in both. Block tables hold *references* to device
    blocks. Content that no table references stays until its block is needed: that is the prefix cache, and
    it is also where the KV of a preempted request is. So a request that resumes and a new one do the same:
    ``match``, ``allocate``, then ``grow`` and ``commit`` step by step.

    Args:
        num_host_blocks: blocks in the host's pool.
        policy: says which blocks are checkpointed, and when.
        blocking: copies of these directions complete before their step computes a slice.
        prefix_caching: requests share content; without it, each finds only its own, after a preemption.
        bidirectional: offline requests fill their blocks from the last slot, and blocks may be shared.
        secret: of the keys; random by default.
        max_num_blocks: the most that the device's pool may grow to; None: it keeps its size.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        policy: CheckpointPolicy | None = None,
        blocking: CopyDirections = CopyDirections.NONE,
        prefix_caching: bool = True,
        prefix_cache_scope: PrefixCacheScope = "owner",
        bidirectional: bool = False,
        secret: bytes | None = None,
        max_num_blocks: int | None = None,
    ) -> None:
        assert num_blocks > 0 and block_size > 0 and num_host_blocks >= 0
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.blocking = blocking
        self.counters = {each: ClassCounters() for each in ServiceClass}
        self._prefix_caching = prefix_caching
        scope = prefix_cache_scope if prefix_caching else "request"
        self._keys = KeyChain(block_size, scope, secret or secrets.token_bytes(32))
        self._store = ContentStore(
            num_blocks,
            num_host_blocks,
            blocking,
            self.counters,
            prefix_caching,
            bidirectional,
            max_num_blocks,
        )
        self.checkpointer = Checkpointer(self._store, policy or FixedCheckpoints(), block_size, self.counters)
        self.sharing = LastBlocks(self._store)
        if bidirectional:
            self.sharing = SharedLastBlocks(self._store, self.checkpointer, block_size)
        self._device = self._store.device
        self.protection = self._store.protection
        self._tables: dict[RequestId, BlockTable] = {}
        self.counts = BlockCounts(self._store, self._tables, block_size)
        self.resizing = Resizing(self._store, self._tables)

    # What there is.

    @property
    def num_blocks(self) -> int:
        """Blocks of the device's pool that may be used."""
        return self._device.num_blocks

    @property
    def num_copies_in_flight(self) -> int:
        return self._store.ledger.num_in_flight

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one request."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: RequestId) -> tuple[BlockRef, ...]:
        """The request's device blocks in token order."""
        return self._tables[request_id].refs

    # Admission.

    def match(self, request: Request) -> Match:
        """Leading tokens of a request without blocks whose KV exists.

        Nothing is reserved: what is allocated or preempted meanwhile makes the match out of date.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            table = self._tables[request.request_id] = BlockTable(self._keys.root_of(request))
        assert not table.blocks, f"{request.request_id} has blocks"
        found = self._find(request, table, 0)
        num_tokens = len(found) * self.block_size
        tail = self.sharing.returning_tail(table, len(found))
        if tail is not None:
            found.append(tail)
            num_tokens += tail.num_tokens
        return Match(found, num_tokens)

    def num_cached_tokens(self, request: Request) -> int:
        """Leading tokens of a request that was never matched whose KV exists.

        From any thread: it changes nothing, and reads the index key by key. The answer may be out of date.
        """
        return len(self._find(request, BlockTable(self._keys.root_of(request)), 0)) * self.block_size

    def shortage(self, request: Request, match: Match, num_reserved: int, limit: Evictable) -> int:
        """Blocks that lack for all of the request's tokens, with ``num_reserved`` left; at most 0 if none."""
        available = self._device.available(limit)
        needed = self.blocks_for(request.num_tokens) + num_reserved
        for content in match.contents:
            block = content.own_block
            if block is not None:
                needed -= 1
                if block.state <= limit and self._device.may_use(block):
                    available -= 1  # it is available until the request references it
        lack = needed - available
        if lack == 1 and self.blocks_for(request.num_tokens) > len(match.contents):
            lack -= self.sharing.can_enter(request, request.num_tokens, limit, match.contents)
        return lack

    def allocate(self, request: Request, match: Match, limit: Evictable) -> bool:
        """Give a request the blocks of its match, and restore those that are in host memory only.

        Afterwards ``request.num_computed_tokens`` are those of the match.

        Returns: whether all of them are on the device. Otherwise ``is_restored`` says when.
        """
        store, table = self._store, self._tables[request.request_id]
        tail = self.sharing.resume(request, table, match)
        self._count_match(request, table, match)
        absent = [content for content in match.contents if content.device is None]
        for content in match.contents:
            if content.device is not None:
                store.reference(content, request.service_class)
        if tail is not None:
            self.sharing.restore_lost(tail)
        self.checkpointer.save_before_take(len(absent), absent)
        taken = store.take(len(absent), limit, request.service_class)
        for content, block in zip(absent, taken, strict=True):
            assert content.host is not None
            store.hold(content, block)
            store.ledger.restore(block, content.host, request.service_class is ServiceClass.ONLINE)
        table.extend(content.device for content in match.contents if content.device is not None)
        table.num_known = len(match.contents) - (tail is not None)
        if tail is None:
            self.sharing.drop_tail(table)
        self._forget_wanted(table)
        request.num_computed_tokens = match.num_tokens
        request.num_ever_computed_tokens = max(request.num_ever_computed_tokens, request.num_computed_tokens)
        return table.is_restored()

    def is_restored(self, request: Request) -> bool:
        """The KV of all the request's computed tokens is on the device."""
        return self._tables[request.request_id].is_restored()

    def start(self, request: Request) -> None:
        """The request takes part in steps from now on."""
        table = self._tables[request.request_id]
        assert table.is_restored(), f"copies to {request.request_id} are in flight"
        self.sharing.start(request, table)
        self.checkpointer.add_candidate(request, table)

    # Steps.

    def num_missing_blocks(self, request_id: RequestId, num_tokens: int) -> int:
        """Blocks the request lacks for its first ``num_tokens`` tokens."""
        missing = -(-num_tokens // self.block_size) - len(self._tables[request_id].blocks)
        return missing if missing > 0 else 0  # not max(): called for every running request in every step

    def growth_shortage(self, request: Request, num_tokens: int, limit: Evictable) -> int:
        """Blocks that lack for the request's first ``num_tokens`` tokens; at most 0 if none."""
        lack = self.num_missing_blocks(request.request_id, num_tokens) - self._device.available(limit)
        if lack == 1:
            lack -= self.sharing.can_enter(request, num_tokens, limit)
        return lack

    def grow(self, request: Request, num_tokens: int, limit: Evictable) -> None:
        """Allocate what the request lacks for its first ``num_tokens`` tokens; ``growth_shortage`` is 0."""
        missing = self.num_missing_blocks(request.request_id, num_tokens)
        if missing:
            entered = self.sharing.enter_if_short(request, num_tokens, missing, limit)
            self.checkpointer.save_before_take(missing - len(entered))
            taken = self._store.take(missing - len(entered), limit, request.service_class)
            self._tables[request.request_id].extend((*taken, *entered))
            self.sharing.grown(request)

    def match_more(self, request: Request) -> None:
        """Skip the next tokens of a running prompt whose KV another request has computed meanwhile."""
        table = self._tables[request.request_id]
        index, offset = divmod(request.num_computed_tokens, self.block_size)
        if offset or index != len(table.blocks):
            return
        found = self._find(request, table, index)
        found = list(takewhile(lambda content: content.device is not None and content.device.is_valid, found))
        if not found:
            return
        table.extend([self._store.reference(content, request.service_class) for content in found])
        table.num_known = len(table.blocks)
        self.sharing.grown(request)
        request.num_computed_tokens = table.num_known * self.block_size
        num_new = max(0, request.num_computed_tokens - request.num_ever_computed_tokens)
        self._count_hits(request, num_new, 0)
        request.num_ever_computed_tokens += num_new

    def new_keys(self, request: Request, start: int, end: int) -> Sequence[BlockKey]:
        """Keys of the blocks that computing the tokens ``[start, end)`` fills and the device lacks."""
        table, size = self._tables[request.request_id], self.block_size
        self._keys.extend(table.keys, table.root, request, end // size)
        keys, get = table.keys[start // size : end // size], self._store.by_key.get
        return [key for key in keys if not ((found := get(key)) and found.device and found.device.is_valid)]

    def key_of(self, request_id: RequestId, index: int) -> BlockKey | None:
        """Key of the request's block at this index; None if none was made yet."""
        table = self._tables.get(request_id)
        return table.keys[index] if table is not None and index < len(table.keys) else None

    def commit(self, request: Request, num_tokens: int) -> None:
        """The KV of the request's first ``num_tokens`` tokens is computed: its full blocks are content."""
        table = self._tables[request.request_id]
        num_full = num_tokens // self.block_size
        if num_full > table.num_known:
            self._enter(request, table, table.num_known, num_full)
            self.checkpointer.observe_filled(num_full - table.num_known)
            table.num_known = num_full
            self.checkpointer.add_candidate(request, table)

    # Leaving.

    def preempt(self, request: Request) -> None:
        """Drop the request's references. Its KV stays as wanted content, until its blocks are needed.

        ``request.num_computed_tokens`` stays: a match will find as many, unless blocks are taken meanwhile.
        """
        table = self._tables[request.request_id]
        self.checkpointer.remove_candidate(request.request_id)
        num_full, num_tail_tokens = divmod(request.num_computed_tokens, self.block_size)
        if table.tail is not None:  # the request was being restored; its tail may be a whole block
            num_full, num_tail_tokens = len(table.blocks) - 1, table.tail.num_tokens
        self._enter(request, table, 0, num_full)  # again what was computed twice, if the other one is gone
        wanted = [self._store.by_key[key] for key in table.keys[:num_full]]
        self.sharing.preempt(request, table, wanted, num_tail_tokens)
        self._store.want(reversed(table.wanted), 1)
        self._release(request, table)
        self.checkpointer.swap_out(table.wanted)

    def free(self, request: Request) -> None:
        """Drop all that the request references and wants. With prefix caching its content stays.

        Content beyond the request's ``num_reused_tokens`` is taken before all other content.
        """
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        self.checkpointer.remove_candidate(request.request_id)
        self.sharing.forget(request, table)
        if self._prefix_caching:
            held: Sequence[Content | None] = [block.content for block in table.blocks[: table.num_known]]
            if [each for each in held if each is None or each.key is None]:
                # What was computed twice is entered again, if the other one is gone.
                self._enter(request, table, 0, table.num_known)
                held = [block.content for block in table.blocks[: table.num_known]]
            held = held or table.wanted
            num_reused = request.num_reused_tokens
            num_needed = None if num_reused is None else num_reused // self.block_size
            self._store.end_use(held, num_needed, request.arrived_at_s)
        self._release(request, table)
        self._forget_wanted(table)
        if not self._prefix_caching:
            for key in table.keys:
                content = self._store.by_key.get(key)
                if content is not None:
                    self._store.drop(content)

    def _release(self, request: Request, table: BlockTable) -> None:
        """Drop the references, the last one first: a block is never taken before those after it."""
        self.sharing.release(table)
        for block in reversed(table.blocks):
            self._store.release(block, request.service_class)
        table.clear()

    def _forget_wanted(self, table: BlockTable) -> None:
        self._store.want(reversed(table.wanted), -1)
        table.wanted = ()

    # Copies.

    def advance(self, now_s: float) -> None:
        """Set the time, before each plan."""
        self._store.advance(now_s)

    def take_copies(self, limits: CopyLimits, copy_cost: float) -> BlockCopies:
        """The copies that begin with the next plan.

        Chosen are restores for online requests first, then other restores, then tails in shared blocks, then
        other checkpoints (``Checkpointer``).

        Args:
            copy_cost: see ``PoolView``.
        """
        self._store.ledger.begin_restores(limits.online, limits.background)
        self.sharing.begin_copies(limits.background)
        self.checkpointer.start(limits.background, copy_cost)
        return self._store.ledger.take()

    def complete(self, copies: Iterable[Copy]) -> None:
        """Copies of earlier plans have completed."""
        for block in self._store.ledger.complete(copies):
            content = block.content
            if content is not None:
                counters = self.counters[content.service_class]
                counters.num_restored_tokens += content.num_lost or content.num_tokens
                content.num_lost = 0
        self.sharing.end_copies()

    def num_unsecured_tokens(self, request: Request) -> int:
        """Tokens of a request on the device whose KV is lost if its blocks are taken now.

        Those of a last block that is not full do not count. A copy in flight does not secure a block.
        """
        if self.checkpointer.saving is Saving.NEVER:
            return request.num_computed_tokens
        if self.checkpointer.saving.is_waited_for:
            return 0
        table = self._tables[request.request_id]
        num_secured = table.count_secured(self._store.num_host_evictions)
        return (table.num_known - num_secured) * self.block_size

    # Contents.

    def _enter(self, request: Request, table: BlockTable, first: int, last: int) -> None:
        """Make the request's full blocks in ``[first, last)`` content, unless others hold the same."""
        self._keys.extend(table.keys, table.root, request, last)
        keys, blocks = table.keys[first:last], table.blocks[first:last]
        self._store.enter(keys, blocks, self.block_size, request.service_class)

    def _find(self, request: Request, table: BlockTable, first: int) -> list[Content]:
        """Content of the request's blocks from this one on, as far as it exists and can be matched."""
        found: list[Content] = []
        keys, get = table.keys, self._store.by_key.get
        most = request.num_matchable_tokens // self.block_size
        for index in range(first, most):
            if index >= len(keys):  # not all at once: most prompts have nothing cached
                self._keys.extend(keys, table.root, request, min(most, index + _KEYS_AT_ONCE))
            content = get(keys[index])
            if content is None:
                break
            found.append(content)
        return found

    def _count_match(self, request: Request, table: BlockTable, match: Match) -> None:
        """Hits count when a request is first allocated; later it finds its own KV again."""
        num_host = sum(each.num_tokens if each.device is None else each.num_lost for each in match.contents)
        counters = self.counters[request.service_class]
        if self._store.ledger.restores_block:
            counters.num_restored_tokens += num_host
        if request.first_scheduled_at_s is not None:
            return
        if self._prefix_caching:
            counters.num_prefix_queried_tokens += request.num_prompt_tokens
        self._count_hits(request, match.num_tokens - num_host, num_host)
        if request.service_class is ServiceClass.ONLINE:
            num_full = (request.num_prompt_tokens - 1) // self.block_size
            self._keys.extend(table.keys, table.root, request, num_full)
            self._store.observe_reuse(table.keys[:num_full], match.contents)

    def _count_hits(self, request: Request, num_device: int, num_host: int) -> None:
        request.num_cached_tokens += num_device + num_host
        counters = self.counters[request.service_class]
        counters.num_prefix_hit_tokens += num_device
        counters.num_host_prefix_hit_tokens += num_host
