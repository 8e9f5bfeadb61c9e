"""All content, and where it resides: the two pools, and the copies between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from backfill.core.block import pack_block_ref
from backfill.core.counters import ClassCounters
from backfill.core.plan import CopyDirections
from backfill.core.request import ServiceClass
from backfill.kvcache.content import Block, BlockKey, BlockState, Content
from backfill.kvcache.copies import CopyLedger
from backfill.kvcache.pool import BlockPool, Tier
from backfill.kvcache.protection import CacheProtection

_MOST_EXPIRED = 256  # blocks of a pool whose protection ends before one step, which bounds the time it takes


class ContentStore:
    """Keeps content findable by its key, and both pools informed of what becomes of it.

    Args:
        is_shared: content may be of use to requests other than the one that computed it.
        is_bidirectional: offline requests fill their blocks from the last slot.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        blocking: CopyDirections,
        counters: Mapping[ServiceClass, ClassCounters],
        is_shared: bool,
        is_bidirectional: bool,
        max_num_blocks: int | None = None,
    ) -> None:
        self.device = BlockPool(Tier.DEVICE, num_blocks, self._on_device_eviction, max_num_blocks)
        self.host = BlockPool(Tier.HOST, num_host_blocks, self._on_host_eviction)
        self.ledger = CopyLedger(self.device, self.host, blocking)
        self.by_key: dict[BlockKey, Content] = {}
        self.num_host_evictions = 0  # of content that block tables name
        self.num_wanted_evictions = 0  # from the device, of what preempted requests will come back for
        self._counters = counters
        self._is_shared = is_shared
        self._is_bidirectional = is_bidirectional
        self._now_s = 0.0
        self.protection = CacheProtection(max_num_blocks or num_blocks)

    def update(self, content: Content) -> None:
        """What the content is used for, or where it resides, has changed."""
        if content.device is not None:
            self.device.update(content.device)
        if content.host is not None:
            self.host.update(content.host)

    def enter(
        self, keys: Iterable[BlockKey], blocks: Iterable[Block], num_tokens: int, service_class: ServiceClass
    ) -> None:
        """Device blocks hold the KV of these keys, which becomes content unless others hold it."""
        for key, block in zip(keys, blocks, strict=True):
            content = self.by_key.get(key)
            if content is None:
                content = self.by_key[key] = Content(key, num_tokens, service_class)
            if content.device is None:
                self.hold(content, block)

    def hold(self, content: Content, block: Block) -> None:
        """The content resides in this device block."""
        is_as_before = block.num_refs and block.content is None and content.host is None
        content.device, block.content = block, content
        if not is_as_before or self.device.on_updated is not None:
            self.update(content)

    def reference(self, content: Content, service_class: ServiceClass) -> Block:
        """Count one more block table, of a request of this class, that names the content's device block."""
        block, is_online = content.device, service_class is ServiceClass.ONLINE
        assert block is not None
        block.num_refs += 1
        block.num_online_refs += is_online
        if block.num_refs == 1 or (is_online and block.num_online_refs == 1):
            self.update(content)
        if is_online and not block.is_valid:
            self.ledger.prioritize(block)
        return block

    def take(self, count: int, limit: int, service_class: ServiceClass) -> list[Block]:
        """Blocks for the table of a request of this class."""
        taken, is_offline = self.device.take(count, limit), service_class is ServiceClass.OFFLINE
        if self._is_bidirectional:
            for block in taken:
                block.ref = pack_block_ref(block.index, is_offline)
        self.device.reference_taken(taken, not is_offline)
        return taken

    def release(self, block: Block, service_class: ServiceClass) -> None:
        """Count one block table less that names the block, of a request of this class."""
        content, is_online = block.content, service_class is ServiceClass.ONLINE
        block.num_refs -= 1
        block.num_online_refs -= is_online
        if block.num_refs and not is_online:
            return
        is_cancelled = not block.num_refs and not block.is_valid and self.ledger.cancel_restore(block)
        if is_cancelled and (content is None or not content.num_lost):
            block.content = None
            self.device.update(block)
            if content is not None:
                content.device = None
                self.update(content)
        elif content is None:
            self.device.update(block)
        else:
            if is_online or not (content.is_protected and content.released_at_s > self._protected_since_s):
                content.service_class = service_class
                content.is_protected = is_online and self._is_shared
                content.released_at_s = self._now_s
            if block.num_refs:
                self.device.update(block)
            else:
                self.device.update_released(block, content)
            if content.host is not None:
                self.host.update(content.host)

    def end_use(
        self, contents: Iterable[Content | None], num_needed: int | None, arrived_at_s: float
    ) -> None:
        """A request that holds or wants these is about to end.

        Args:
            contents: of its leading blocks; None for a block that another one has computed too.
            num_needed: leading ones that waiting requests of its pool need; None if that is not known.
            arrived_at_s: when it was taken from the pool. Who was taken later knows better.
        """
        for index, content in enumerate(contents):
            if content is None:
                continue
            if num_needed is None:
                content.has_unplanned_users, content.is_unneeded = True, False
            elif arrived_at_s >= content.planned_at_s:
                content.planned_at_s = arrived_at_s
                content.is_unneeded = index >= num_needed and not content.has_unplanned_users

    def want(self, contents: Iterable[Content], change: int) -> None:
        """One request more or less, by ``change``, will come back for these."""
        for content in contents:
            content.num_wanted += change
            if content.device is None or not content.device.num_refs:  # else it is in use anyway
                self.update(content)

    def drop(self, content: Content) -> None:
        """Make content reside nowhere. Its blocks stay with the tables and the copies that use them."""
        device, host = content.device, content.host
        content.device = content.host = None
        content.num_lost = content.num_unsaved = 0
        self._forget_if_gone(content)
        if device is not None:
            device.content = None
            self.device.update(device)
        if host is not None:
            host.content = None
            self.host.update(host)

    # Protection of what online requests used.

    @property
    def _protected_since_s(self) -> float:
        return self._now_s - self.protection.kept_s

    def advance(self, now_s: float) -> None:
        """Set the time, and end the protection of what has had it long enough, or has too much of a pool."""
        self._now_s = now_s
        since_s = self._protected_since_s
        for pool in (self.device, self.host):
            most = math.inf
            if pool is self.device:
                most = min(self.protection.max_share * pool.num_blocks, self.protection.max_blocks)
            for _ in range(_MOST_EXPIRED):
                block = pool.first(BlockState.PROTECTED)
                if block is None:
                    break
                content = block.content
                assert content is not None
                if content.released_at_s > since_s and pool.counts[BlockState.PROTECTED] <= most:
                    break
                content.is_protected = False
                self.update(content)

    def observe_reuse(self, keys: Sequence[BlockKey], found: Sequence[Content]) -> None:
        """Learn from an online request how much of its prompt was used before, and how long ago.

        Args:
            keys: of the full blocks of its prompt.
            found: what is cached of it: leading blocks.
        """
        last = found[-1] if found else None
        is_in_use = last is not None and last.device is not None and last.device.num_refs > 0
        released_at_s = None
        if last is not None and last.service_class is ServiceClass.ONLINE and not is_in_use:
            released_at_s = last.released_at_s
        self.protection.observe(keys, len(found), released_at_s, self._now_s)

    # Evictions.

    def become_tail(self, content: Content) -> None:
        """Only the offline request that wants the content finds it from now on."""
        if content.key is not None:
            del self.by_key[content.key]
            content.key = None
        content.service_class, content.is_protected = ServiceClass.OFFLINE, False
        self.update(content)

    def truncate(self, tail: Content, num_tokens: int) -> None:
        """Only the tail's first tokens are left, on the device."""
        host, tail.host = tail.host, None
        tail.num_tokens, tail.num_lost, tail.num_unsaved = num_tokens, 0, 0
        if host is not None:
            host.content = None
            self.host.update(host)

    def _on_device_eviction(self, content: Content) -> None:
        counters = self._counters[content.service_class]
        counters.num_evicted_blocks += 1
        self.num_wanted_evictions += content.num_wanted > 0
        if content.host is None and content.key is not None:  # the common case
            content.num_lost = 0
            self._forget(content, content.key)
            return
        if content.host is not None and content.num_wanted:
            counters.num_reclaimed_tokens += content.num_tokens
        content.num_lost = 0
        if content.num_unsaved:
            self.drop(content)
        self._forget_if_gone(content)

    def _on_host_eviction(self, content: Content) -> None:
        self._counters[content.service_class].num_evicted_host_blocks += 1
        self.num_host_evictions += content.device is not None and content.device.num_refs > 0
        if content.num_lost or content.num_unsaved:
            self.truncate(content, content.num_device_tokens)
        self.update(content)
        self._forget_if_gone(content)

    def _forget_if_gone(self, content: Content) -> None:
        if content.device is None and content.host is None and content.key is not None:
            self._forget(content, content.key)

    def _forget(self, content: Content, key: BlockKey) -> None:
        del self.by_key[key]
        if self._is_shared and content.service_class is ServiceClass.ONLINE:
            self.protection.remember(key, content.released_at_s)
