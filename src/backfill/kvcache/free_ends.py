"""Which blocks may be entered from their other end, the one with the most free slots first."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeAlias

from backfill.core.block import is_reversed
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.kvcache.content import Block, BlockState, Content
from backfill.kvcache.table import BlockTable

Group: TypeAlias = ServiceClass | BlockState
_LEAST_REBUILT = 64  # a shorter queue keeps its outdated entries
MOST_GIVING_WAY = 8
"""Blocks of an offline request that shares one with a running online one: all that it has gives way soon."""


class FreeEnd(NamedTuple):
    """A block that may be entered from its other end.

    Attributes:
        num_slots: that are in use or about to be written.
        owner: the running request that fills it; None if a preempted one wants it.
        content, table: of the preempted request.
    """

    block: Block
    num_slots: int
    owner: Request | None = None
    content: Content | None = None
    table: BlockTable | None = None


class _Rank(NamedTuple):
    """Where a last block is queued.

    Attributes:
        group: of a running request, its class; of a preempted one, the state of the block.
    """

    group: Group
    num_slots: int


@dataclass(slots=True, eq=False)
class _LastBlock:
    """The last block of a running request, or of a preempted offline one that wants ``content`` there.

    Attributes:
        age: the smaller, the longer the request runs, or waits.
        queued_as: None if it is not queued.
    """

    age: int
    request: Request
    table: BlockTable
    content: Content | None = None
    queued_as: _Rank | None = None


class FreeEnds:
    """Last blocks by group and slots in use, so that to find the emptiest one takes no look at all of them.

    A queued block is looked at again when its turn comes: it may be fuller, or closed, by then. So only what
    may open a block or make it emptier has to be said: ``add``, ``add_preempted``, ``update`` and
    ``on_updated``.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ages = count()
        self._running: dict[RequestId, _LastBlock] = {}
        self._preempted: dict[RequestId, _LastBlock] = {}
        self._wanting: dict[Content, list[_LastBlock]] = {}  # those of preempted requests
        self._changed: dict[Content, None] = {}
        groups: tuple[Group, ...] = (*ServiceClass, BlockState.SECURED, BlockState.WANTED)
        self._queues: dict[Group, list[tuple[int, int, _LastBlock]]] = {group: [] for group in groups}

    # Whose last blocks there are.

    def add(self, request: Request, table: BlockTable) -> None:
        """The request takes part in steps from now on."""
        last = self._running[request.request_id] = _LastBlock(next(self._ages), request, table)
        self._queue(last)

    def add_preempted(self, request: Request, table: BlockTable) -> None:
        """The offline request will come back for what its table wants."""
        if table.wanted:
            content = table.wanted[-1]
            last = _LastBlock(next(self._ages), request, table, content)
            self._preempted[request.request_id] = last
            self._wanting.setdefault(content, []).append(last)
            self._changed[content] = None

    def remove(self, request_id: RequestId) -> None:
        """The request no longer takes part in steps, or no longer wants its KV."""
        last = self._running.pop(request_id, None)
        if last is not None:
            last.queued_as = None
        last = self._preempted.pop(request_id, None)
        if last is not None:
            last.queued_as = None
            assert last.content is not None
            wanting = self._wanting[last.content]
            wanting.remove(last)
            if not wanting:
                del self._wanting[last.content]
                self._changed.pop(last.content, None)

    def table_of(self, request_id: RequestId) -> BlockTable:
        """Of a running request."""
        return self._running[request_id].table

    # What may open a block or make it emptier.

    def update(self, request_id: RequestId) -> None:
        """The request has another last block, or has it for itself again."""
        last = self._running.get(request_id)
        if last is not None:
            self._queue(last)

    def on_updated(self, content: Content) -> None:
        """The content's device block has changed, or what the content is used for."""
        if content in self._wanting:
            self._changed[content] = None

    # The emptiest ones.

    def may_pair(self, request: Request) -> bool:
        """Whether a running request may share its last block with a running one of the other class."""
        is_online = request.service_class is ServiceClass.ONLINE
        return is_online or request.num_tokens <= MOST_GIVING_WAY * self._block_size

    def running(self, service_class: ServiceClass) -> FreeEnd | None:
        """Of the requests of this class."""
        last = self._first(service_class)
        if last is None:
            return None
        assert last.queued_as is not None
        return FreeEnd(last.table.blocks[-1], last.queued_as.num_slots, owner=last.request)

    def preempted(self, states: Iterable[BlockState], excluded: Collection[Content] = ()) -> FreeEnd | None:
        """Of the blocks in these states that preempted offline requests want: secured, wanted or both."""
        for content in self._changed:
            for last in self._wanting[content]:
                self._queue(last)
        self._changed.clear()
        found = [each for state in states if (each := self._first(state, excluded)) is not None]
        if not found:
            return None
        last = min(found, key=_order)
        assert last.content is not None and last.content.device is not None
        return FreeEnd(
            last.content.device, last.content.num_device_tokens, content=last.content, table=last.table
        )

    def _first(self, group: Group, excluded: Collection[Content] = ()) -> _LastBlock | None:
        queue, skipped = self._queues[group], list[tuple[int, int, _LastBlock]]()
        found = None
        while queue:
            num_slots, _, last = queue[0]
            if last.queued_as != (group, num_slots):
                heapq.heappop(queue)
            elif self._rank_of(last) != last.queued_as:
                heapq.heappop(queue)
                self._queue(last)
            elif last.content in excluded:
                skipped.append(heapq.heappop(queue))
            else:
                found = last
                break
        for each in skipped:
            heapq.heappush(queue, each)
        return found

    def _queue(self, last: _LastBlock) -> None:
        rank = self._rank_of(last)
        if rank == last.queued_as:
            return
        last.queued_as = rank
        if rank is None:
            return
        queue = self._queues[rank.group]
        heapq.heappush(queue, (*_order(last), last))
        if len(queue) > _LEAST_REBUILT + 2 * (len(self._running) + len(self._preempted)):
            lasts = {each for *_, each in queue if each.queued_as and each.queued_as.group == rank.group}
            queue[:] = [(*_order(each), each) for each in lasts]
            heapq.heapify(queue)

    def _rank_of(self, last: _LastBlock) -> _Rank | None:
        """Where it belongs; None if it may not be entered."""
        return self._running_rank(last) if last.content is None else self._preempted_rank(last.content)

    def _running_rank(self, last: _LastBlock) -> _Rank | None:
        blocks = last.table.blocks
        # In use once all its known tokens are computed.
        num_slots = last.request.num_tokens - (len(blocks) - 1) * self._block_size
        is_open = bool(blocks) and 0 < num_slots < self._block_size
        if not is_open or not self.may_pair(last.request):
            return None
        if blocks[-1].peer is not None or len(blocks) <= last.table.num_known:
            return None
        return _Rank(last.request.service_class, num_slots)

    def _preempted_rank(self, content: Content) -> _Rank | None:
        block, host = content.device, content.host
        if block is None or block.peer is not None or content.num_wanted != 1:
            return None
        if block.num_refs or block.num_copies or block.state not in (BlockState.SECURED, BlockState.WANTED):
            return None
        # A host copy may have been made of another block with the same tokens, filled from the front. Its
        # slots are others.
        has_same_slots = host is None or is_reversed(host.ref) is is_reversed(block.ref)
        if not is_reversed(block.ref) or not has_same_slots:
            return None
        return _Rank(block.state, content.num_device_tokens)


def _order(last: _LastBlock) -> tuple[int, int]:
    """The smaller, the sooner it is entered: by slots in use, then by age."""
    assert last.queued_as is not None
    return last.queued_as.num_slots, last.age
