"""The blocks of one tier, by state: which are free to take, and which is taken first."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice

from backfill.core.block import is_reversed, pack_block_ref
from backfill.core.request import ServiceClass
from backfill.kvcache.content import Block, BlockState, Content

# As constants, because looking up a member of an Enum is slow, and this is done for every block of a request.
(
    _EMPTY,
    _UNNEEDED,
    _UNWANTED,
    _SECURED,
    _WANTED,
    _PROTECTED,
    _WANTED_ONLINE,
    _COPYING,
    _REFERENCED,
    _REFERENCED_COPIED,
    _ONLINE,
    _ONLINE_COPIED,
    _ABSENT,
) = BlockState


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"


class LatestFirst(list[Block]):
    """Empty blocks, the latest freed first: its memory is the likeliest to be in a processor's cache."""

    def take(self, count: int) -> list[Block]:
        """As many as there are, at most ``count``."""
        first = max(0, len(self) - count)
        taken = self[first:][::-1]
        del self[first:]
        return taken


class LowestFirst:
    """Empty blocks, the lowest index first, for a pool that shrinks from its upper end: little is there then.

    Args:
        blocks: of the pool, by index. None of those that are in here may change its index.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._indices = list(range(len(blocks)))  # a heap

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Block]:
        return (self._blocks[index] for index in self._indices)

    def append(self, block: Block) -> None:
        heapq.heappush(self._indices, block.index)

    def pop(self) -> Block:
        return self._blocks[heapq.heappop(self._indices)]

    def take(self, count: int) -> list[Block]:
        return [self.pop() for _ in range(min(count, len(self)))]

    def remove_from(self, end: int) -> None:
        """Remove the blocks from this index on."""
        self._indices = [index for index in self._indices if index < end]
        heapq.heapify(self._indices)


class BlockPool:
    """The blocks of the device or of the host's memory.

    Empty blocks are taken first. Cached blocks are in one queue for each state, the
    least recently released first. Requests release their last block first, so a block is not taken before
    those that follow it: what is left of a sequence is a prefix of it.

    A pool with ``max_num_blocks`` can be resized. Blocks from index ``num_blocks`` on are *beyond its end*:
    they are not taken, and each is absent as soon as it has no use (``Resizing``).

    Args:
        on_evicted: called with each content that loses its block in this pool.
        max_num_blocks: the most that it may ever have; None: it is never resized.

    Attributes:
        num_blocks: that may be used; they have the lowest indices.
        blocks: by index, those beyond the end as well.
        num_pinned: blocks of each state that may not be taken: in a copy, or beyond the end.
        on_updated: called with the content of each block whose use has changed; None if nobody asks.
    """

    def __init__(
        self,
        tier: Tier,
        num_blocks: int,
        on_evicted: Callable[[Content], None],
        max_num_blocks: int | None = None,
    ) -> None:
        self.tier = tier
        self.blocks = [Block(index, pack_block_ref(index)) for index in range(max_num_blocks or num_blocks)]
        self.num_blocks = len(self.blocks)
        self.counts = [0] * len(BlockState)
        self.num_pinned = [0] * len(BlockState)
        self.counts[_EMPTY] = self.num_blocks
        self._is_host = tier is Tier.HOST
        self._lowest_first = None if max_num_blocks is None else LowestFirst(self.blocks)
        self._empty: LatestFirst | LowestFirst = LatestFirst(self.blocks[::-1])
        if self._lowest_first is not None:
            self._empty = self._lowest_first
        self._cached: list[OrderedDict[Block, None]] = [OrderedDict() for _ in BlockState]
        self._on_evicted = on_evicted
        self.on_updated: Callable[[Content], None] | None = None
        if max_num_blocks is not None:
            self.resize(num_blocks)

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_draining(self) -> int:
        """Blocks beyond the end that are still in use."""
        return len(self.blocks) - self.num_blocks - self.counts[_ABSENT]

    @property
    def num_becoming_available(self) -> int:
        """Blocks that can be taken, losing no KV, once the copies on them complete."""
        pinned = self.num_pinned
        num_blocks = sum(pinned[: _SECURED + 1]) + pinned[_COPYING]
        if self.num_draining:
            beyond = self.blocks[self.num_blocks :]
            num_blocks -= sum(block.state <= _SECURED or block.state is _COPYING for block in beyond)
        return num_blocks

    def may_use(self, block: Block) -> bool:
        """No copy uses the block, and it is not beyond the end."""
        return not block.num_copies and block.index < self.num_blocks

    def available(self, limit: int) -> int:
        """Blocks that can be taken now: empty ones, and cached ones up to this state."""
        end = limit + 1
        return sum(self.counts[:end]) - sum(self.num_pinned[1:end])

    def first(self, state: BlockState) -> Block | None:
        """The block of this state that is taken first."""
        return next(iter(self._cached[state]), None)

    def reverse(self, state: BlockState) -> Iterator[Block]:
        """Blocks of this state, from the one that is taken last. The pool must not change meanwhile."""
        return reversed(self._cached[state])

    def next_taken(self, state: BlockState, count: int) -> list[Block]:
        """Blocks of this state, at most ``count``, in the order in which they are taken."""
        idle = (block for block in self._cached[state] if not block.is_pinned)
        return list(islice(idle, max(0, count)))

    def take(self, count: int, limit: int) -> list[Block]:
        """Take blocks that are empty, and evict content up to ``limit`` for the rest.

        The caller gives each block a reference, a content or a copy, and then calls ``update``.
        """
        empty = self._empty
        if count == 1 and empty:  # the common case: a decode fills its last block
            block = empty.pop()
            block.state = _COPYING
            self.counts[_EMPTY] -= 1
            self.counts[_COPYING] += 1
            return [block]
        taken = empty.take(count)
        self.counts[_EMPTY] -= len(taken)
        state = 0
        assert len(taken) == count or count - len(taken) <= self.available(limit), f"no {count} blocks"
        while len(taken) < count:
            state += 1
            if self.counts[state] > self.num_pinned[state]:
                idle: Iterable[Block] = self._cached[state]
                if self.num_pinned[state]:
                    idle = (block for block in idle if not block.is_pinned)
                victims = list(islice(idle, count - len(taken)))
                self._evict(victims, state)
                taken += victims
        for block in taken:
            block.state = _COPYING
        self.counts[_COPYING] += count
        return taken

    def reference_taken(self, taken: Sequence[Block], is_online: bool) -> None:
        """Give each of the blocks that were just taken its first reference, and ``update`` them."""
        state = _ONLINE if is_online else _REFERENCED
        for block in taken:
            block.num_refs, block.num_online_refs, block.state = 1, int(is_online), state
        self.counts[_COPYING] -= len(taken)
        self.counts[state] += len(taken)

    def replace(self, old: Block, new: Block) -> None:
        """The pool knows the memory that two blocks share by the new one from now on."""
        self.num_pinned[old.state] -= old.is_pinned
        self.counts[old.state] -= 1
        if _EMPTY < old.state < _COPYING:
            del self._cached[old.state][old]
        self.counts[_COPYING] += 1
        old.is_guest, old.is_pinned, old.state = True, False, _COPYING
        new.is_guest, new.is_pinned, new.state = False, False, _COPYING
        self.blocks[new.index] = new
        self.update(new)

    def update(self, block: Block) -> None:
        """Enter what has changed: the block's references or copies, or its content's users or residencies."""
        if self.on_updated is not None and block.content is not None:
            self.on_updated(block.content)
        if block.is_guest:
            return
        old, new = block.state, self._state_of(block)
        if block.is_pinned or block.num_copies or block.index >= self.num_blocks:
            self.num_pinned[old] -= block.is_pinned
            block.is_pinned = not self.may_use(block)
            self.num_pinned[new] += block.is_pinned
        if old is new:
            return
        block.state = new
        self.counts[old] -= 1
        self.counts[new] += 1
        if _EMPTY < old < _COPYING:
            del self._cached[old][block]
        if _EMPTY < new < _COPYING:
            queue = self._cached[new]
            queue[block] = None
            if old is _COPYING or (new is _SECURED and old < _REFERENCED):
                # It is copied, not released. Copies go from a request's first block to its last one.
                queue.move_to_end(block, last=False)
        elif new is _EMPTY:
            self._empty.append(block)

    def update_released(self, block: Block, content: Content) -> None:
        """``update`` of a block of the device that has just lost its last reference and keeps its content.

        It has the usual cases of ``_state_of`` once more, because every end of a request takes this way.
        """
        is_plain = self.on_updated is None and content.host is None and not block.is_guest
        if not is_plain or block.num_copies or block.is_pinned:
            self.update(block)
            return
        if content.num_wanted:
            state = _WANTED_ONLINE if content.service_class is ServiceClass.ONLINE else _WANTED
        elif content.is_protected:
            state = _PROTECTED
        else:
            state = _UNNEEDED if content.is_unneeded else _UNWANTED
        self.counts[block.state] -= 1
        self.counts[state] += 1
        block.state = state
        self._cached[state][block] = None

    def _state_of(self, block: Block) -> BlockState:
        content = block.content
        if block.num_refs:
            if content is None or content.host is None:
                return _ONLINE if block.num_online_refs else _REFERENCED
            return _ONLINE_COPIED if block.num_online_refs else _REFERENCED_COPIED
        if content is None:
            if block.num_copies:
                return _COPYING
            return _EMPTY if block.index < self.num_blocks else _ABSENT
        is_wanted = content.num_wanted > 0
        if self._is_host:
            # The copy of a running request's block. Copies of preempted requests are secured by no device
            # block: that one is about to be taken, which is why the copy was made.
            twin = content.device
            is_secured = twin is not None and twin.num_refs > 0
        else:
            is_secured = is_wanted and content.host is not None and not content.num_unsaved
        if is_secured:
            return _SECURED
        if is_wanted:
            return _WANTED_ONLINE if content.service_class is ServiceClass.ONLINE else _WANTED
        if content.is_protected:
            return _PROTECTED
        return _UNNEEDED if content.is_unneeded else _UNWANTED

    # Resizing.

    def resize(self, num_blocks: int) -> None:
        """Blocks from this index on are beyond the end; those before it are not."""
        assert self._lowest_first is not None, f"the {self.tier.value}'s pool has a fixed size"
        first, last = sorted((num_blocks, self.num_blocks))
        self.num_blocks = num_blocks
        self._lowest_first.remove_from(num_blocks)
        for block in self.blocks[first:last]:
            self.update(block)

    def evict_beyond(self, block: Block) -> None:
        """Drop the content of a cached block beyond the end."""
        self.num_pinned[block.state] -= block.is_pinned
        self._evict([block], block.state)
        block.state, block.is_pinned = _COPYING, False
        self.counts[_COPYING] += 1
        self.update(block)

    def exchange(self, block: Block, taken: Block) -> None:
        """The two have each other's memory from now on. The second was taken and has no use yet."""
        block.index, taken.index = taken.index, block.index
        for each in (block, taken):
            self.blocks[each.index] = each
            each.ref = pack_block_ref(each.index, is_reversed(each.ref))
            if each.peer is not None:
                each.peer.index = each.index
                each.peer.ref = pack_block_ref(each.index, is_reversed(each.peer.ref))
            self.update(each)

    def _evict(self, blocks: Sequence[Block], state: int) -> None:
        """Drop the contents of cached blocks of one state."""
        queue, is_host, on_evicted = self._cached[state], self._is_host, self._on_evicted
        self.counts[state] -= len(blocks)
        for block in blocks:
            content = block.content
            assert content is not None
            del queue[block]
            block.content = None
            if is_host:
                content.host = None
            else:
                content.device = None
            on_evicted(content)
