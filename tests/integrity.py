"""Checks of the scheduler's and the KV cache's own account: an AssertionError where counts disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from backfill.core.block import is_reversed
from backfill.core.request import RequestId, RequestStatus, ServiceClass
from backfill.kvcache.content import Block, BlockState
from backfill.kvcache.copies import CopyLedger
from backfill.kvcache.free_ends import FreeEnds, _order
from backfill.kvcache.manager import KVCacheManager
from backfill.kvcache.pool import BlockPool
from backfill.kvcache.sharing import SharedLastBlocks
from backfill.kvcache.store import ContentStore
from backfill.scheduling.in_flight import StepsInFlight
from backfill.scheduling.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Blocks, queues and requests agree."""
    kv, requests, in_flight = scheduler.kv, scheduler.requests, scheduler.in_flight
    check_kv(kv)
    _check_in_flight(in_flight, requests.by_id)
    for request_id, scheduled in in_flight.slices.items():
        assert request_id in requests.running, f"{request_id} is in flight and does not run"
        blocks = scheduled.blocks  # its table may have grown since
        assert kv.table(request_id)[: len(blocks)] == blocks, f"{request_id}: its step has others"
        num_computed = scheduled.start
        if request_id in in_flight.open:
            num_computed += scheduled.num_tokens
        is_to_end = request_id in (*in_flight.ending, *in_flight.lost)
        assert is_to_end or requests.by_id[request_id].num_computed_tokens == num_computed
    num_waiting = sum(map(len, requests.waiting.values()))
    assert len(requests.running) + len(requests.restoring) + num_waiting == len(requests.by_id)
    num_online = sum(each.service_class is ServiceClass.ONLINE for each in requests.by_id.values())
    assert num_online == requests.num_online, f"{num_online} online, {requests.num_online} counted"
    for request_id, request in requests.by_id.items():
        held = kv.counts.held(request_id)
        is_running, is_restoring = request_id in requests.running, request_id in requests.restoring
        expected = [request.status is each for each in (RequestStatus.RUNNING, RequestStatus.RESTORING)]
        assert [is_running, is_restoring] == expected, f"{request_id} is misplaced"
        assert is_running or is_restoring or held == 0, f"{request_id} waits and holds {held} blocks"
        assert 0 <= request.num_computed_tokens <= request.num_tokens
        if is_running or is_restoring:
            assert kv.blocks_for(request.num_computed_tokens) <= held, f"{request_id} lacks blocks"


def check_kv(manager: KVCacheManager) -> None:
    """References, contents and copies are counted right in both pools."""
    store = manager._store
    device, host = _used(store.device), _used(store.host)
    _check_store(store, device, host)
    if isinstance(manager.sharing, SharedLastBlocks):
        _check_shared_blocks(manager.sharing)
    tables = manager._tables
    for request_id, table in tables.items():
        assert table.num_known <= len(table.blocks), f"{request_id} has content without blocks"
        assert table.refs == tuple([block.ref for block in table.blocks])
    refs = Counter([block for table in tables.values() for block in table.blocks])
    wanted = Counter([content for table in tables.values() for content in table.wanted])
    guests = [block.peer for block in device if block.peer is not None]
    for block in (*device, *guests):
        assert block.num_refs == refs.pop(block, 0), f"references of block {block.index} are miscounted"
    assert not refs, "a table names a block that is in no pool"
    tails = {table.tail for table in tables.values()}
    for tail in tails:
        if tail is not None and tail.num_lost:
            assert tail.device is not None and tail.host is not None, "lost tokens are nowhere"
            assert 0 <= tail.num_unsaved <= tail.num_device_tokens, "lost tokens are not in host memory"
            assert is_reversed(tail.device.ref) is is_reversed(tail.host.ref), "its slots are others there"
    for block in (*device, *guests, *host):
        held = block.content
        assert held is None or held.num_wanted == wanted[held], "wanted content is miscounted"
        assert held is None or held.key is not None or held in tails, "a tail without a request"


def _check_in_flight(steps: StepsInFlight, unfinished: Collection[RequestId]) -> None:
    last = {each.request_id: each for each in steps.all_slices}
    assert last == steps.slices, "slices in flight are counted wrong"
    assert all(name in unfinished for name in last), "a request in flight has ended"
    assert all(name in last for name in (*steps.ending, *steps.open, *steps.lost)), "who is in no step waits"
    assert steps.open.isdisjoint((*steps.ending, *steps.lost)), "who is to end, or failed, goes on"


def _used(pool: BlockPool) -> list[Block]:
    """All but the blocks that are empty in every respect, which are most of a large pool."""
    return [
        block
        for block in pool.blocks
        if block.state
        or block.num_refs
        or block.num_online_refs
        or block.num_copies
        or block.content is not None
        or block.peer is not None
        or block.is_pinned
        or block.is_guest
        or not block.is_valid
    ]


def _check_store(store: ContentStore, device: Sequence[Block], host: Sequence[Block]) -> None:
    _check_pool(store.device, device)
    _check_pool(store.host, host)
    _check_ledger(store.ledger, device, host)
    for key, content in store.by_key.items():
        assert content.key == key and (content.device or content.host), "content resides nowhere"
    for block in (*device, *host):
        key_of = None if block.content is None else block.content.key
        assert key_of is None or store.by_key.get(key_of) is block.content, "content cannot be found"


def _check_pool(pool: BlockPool, used: Sequence[Block]) -> None:
    """Every block is in the right queue and counted once."""
    indices = [block.index for block in pool.blocks]
    assert indices == list(range(len(indices))), f"{pool.tier}: blocks are at {indices}"
    counts, pinned = [0] * len(BlockState), [0] * len(BlockState)
    counts[BlockState.EMPTY] = len(indices) - len(used)
    for block in used:
        counts[block.state] += 1
        pinned[block.state] += block.is_pinned
        assert block.state is pool._state_of(block), f"{pool.tier}: {block} is misplaced"
        assert block.is_pinned is (block.num_copies > 0 or block.index >= pool.num_blocks)
        assert block.num_refs >= block.num_online_refs >= 0 and block.num_copies >= 0
        assert not block.is_guest
        assert block.is_valid or block.num_copies, f"{pool.tier}: no copy fills block {block.index}"
        if block.content is not None:
            residency = block.content.host if pool._is_host else block.content.device
            assert residency is block, f"{pool.tier}: {block.index} is not where its content is"
    assert counts == pool.counts, f"{pool.tier}: {counts} blocks, {pool.counts} counted"
    assert pinned == pool.num_pinned, f"{pool.tier}: {pinned} pinned, {pool.num_pinned} counted"
    queues = [list(pool._empty), *pool._cached[BlockState.UNNEEDED : BlockState.COPYING]]
    for state, blocks in enumerate(queues):
        assert len(blocks) == counts[state] == [block.state for block in blocks].count(BlockState(state))
    assert max([block.index for block in queues[BlockState.EMPTY]], default=-1) < pool.num_blocks
    assert counts[BlockState.ABSENT] <= len(pool.blocks) - pool.num_blocks


def _check_ledger(ledger: CopyLedger, device: Sequence[Block], host: Sequence[Block]) -> None:
    """Every pin has its copy."""
    queued = [*ledger._online.items(), *ledger._offline.items()]
    pairs = [*((device, host) for device, (host, _) in queued), *ledger._in_flight.values()]
    in_copies = [each for pair in pairs for each in pair]
    pins = Counter([*in_copies, *(block for _, block in ledger._pinned_until_plan)])
    guests = [block.peer for block in device if block.peer is not None]
    for block in [*device, *guests, *host]:
        assert block.num_copies == pins.pop(block, 0), f"block {block.index} is pinned without a copy"
    assert not pins, "a block that is in no pool is pinned"


def _check_shared_blocks(sharing: SharedLastBlocks) -> None:
    """Both ends of each shared block agree."""
    _check_free_ends(sharing._free_ends)
    shared = [block for block in sharing._store.device.blocks if block.peer is not None]
    owners = set[Block]()
    for block in shared:
        peer = block.peer
        assert peer is not None and peer.peer is block and peer.is_guest and peer.index == block.index
        assert is_reversed(peer.ref) is not is_reversed(block.ref), "both fill it from one end"
        assert block.num_slots > 0 and peer.num_slots > 0, "an end without slots"
        assert block.num_slots + peer.num_slots <= sharing._block_size, f"the ends of {block.index} overlap"
        assert block.num_refs == 1 and block.content is None, "the pool knows the wrong end"
        assert peer.num_refs or peer.content is not None or peer.num_copies, "a guest of no use"
        if peer.num_refs:
            assert peer.num_refs == 1 and peer.content is None and not peer.num_copies
        elif peer.content is not None:
            assert peer.content.device is peer
            assert peer.content.num_device_tokens == peer.num_slots
        owners.update(end for end in (block, peer) if end.num_refs)
    assert owners == set(sharing._owners) == set(sharing.blocks.values()), "ends without requests"


def _check_free_ends(ends: FreeEnds) -> None:
    """Each block that may be entered is found where it is looked for."""
    for last in (*ends._running.values(), *ends._preempted.values()):
        rank, queued_as = ends._rank_of(last), last.queued_as
        if rank is not None and last.content not in ends._changed:
            assert queued_as is not None and queued_as.group == rank.group, f"{last} is not queued"
            assert queued_as.num_slots <= rank.num_slots, f"{last} is queued as a fuller block"
        if queued_as is not None:
            assert (*_order(last), last) in ends._queues[queued_as.group], f"{last} is not in its queue"
    wanting = [last for lasts in ends._wanting.values() for last in lasts]
    assert set(wanting) == set(ends._preempted.values()) and len(wanting) == len(ends._preempted)
