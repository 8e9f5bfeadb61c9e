"""Who owns which KV block, on the device and in host memory. Pure bookkeeping: no tensor is touched here.

Over 400 lines: one class has the bookkeeping of both tiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from backfill.core.block import BlockCopy, BlockRef, block_index, pack_block_ref
from backfill.core.plan import CopyDirections
from backfill.core.request import RequestId

Key = TypeVar("Key", BlockRef, int)


@dataclass(slots=True)
class _Table:
    """Where one request's KV is: on the device, or after a preemption in host memory.

    Attributes:
        refs: the block table: device blocks in token order. A new tuple when it grows, because plans hold it.
        num_checkpointed: leading device blocks known to have a host copy, complete or in flight.
        num_complete: leading device blocks known to have a complete host copy.
        host: host blocks in token order, of a preempted request; during a restore they are the sources of
            its first ``refs``.
        num_host_tokens: tokens in ``host``; its last block may be partly filled.
        num_restored: leading host blocks whose copy to the device has begun.
    """

    refs: tuple[BlockRef, ...] = ()
    num_checkpointed: int = 0
    num_complete: int = 0
    host: tuple[int, ...] = ()
    num_host_tokens: int = 0
    num_restored: int = 0


class BlockManager:
    """Owns the blocks of both pools: every request's block table and every block's host copy.

    KV never changes once it is written. So a full block and its host copy stay equal, and a checkpointed
    block can be reclaimed by changing a table. Copies run beside the steps. A block in a copy is not freed
    before the copy completes, even if its request ends (ConServe, sections 4.4 and 5).

    Free blocks are on stacks: the most recently freed block is allocated first, because its memory is the
    likeliest to be in a cache.

    Args:
        num_blocks: blocks in the device's pool.
        block_size: tokens a block holds.
        num_host_blocks: blocks in the host's pool.
        blocking: copies of these directions complete before their step computes a slice
            (``StepPlan.blocking_copies``). Here they count as complete when they begin.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        blocking: CopyDirections = CopyDirections.NONE,
    ) -> None:
        assert num_blocks > 0 and block_size > 0 and num_host_blocks >= 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.blocking = blocking
        self._has_blocking_checkpoints = CopyDirections.CHECKPOINT in blocking
        self._has_blocking_restores = CopyDirections.RESTORE in blocking
        self._free: list[BlockRef] = [pack_block_ref(index) for index in range(num_blocks - 1, -1, -1)]
        self._free_host: list[int] = list(range(num_host_blocks - 1, -1, -1))
        self._tables: dict[RequestId, _Table] = {}
        self._copy_of: dict[BlockRef, int] = {}  # host copies of full blocks on the device
        # Owners beyond the first, of shared blocks. The owner of a host block is a preempted request, or the
        # device block whose copy it is.
        self._more_owners: dict[BlockRef, int] = {}
        self._more_host_owners: dict[int, int] = {}
        # Copies in flight, by device block; a host block may be the source of several.
        self._checkpointing: dict[BlockRef, int] = {}
        self._restoring: dict[BlockRef, int] = {}
        self._num_copies_on: dict[int, int] = {}
        self._incomplete_host: set[int] = set()  # host blocks that a copy still writes
        self._unreferenced: set[BlockRef] = set()  # freed when the copy on them completes
        self._unreferenced_host: set[int] = set()
        self._checkpoint: dict[int, BlockCopy] = {}  # begun since the last plan, by host block
        self._restore: list[BlockCopy] = []

    # Device blocks.

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_unreferenced_blocks(self) -> int:
        """Blocks that become free when the copies on them complete."""
        return len(self._unreferenced)

    @property
    def usage_frac(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one request."""
        return -(-num_tokens // self.block_size)

    def num_held_blocks(self, request_id: RequestId) -> int:
        table = self._tables.get(request_id)
        return 0 if table is None else len(table.refs)

    def num_idle_blocks(self, request_id: RequestId) -> int:
        """Blocks of the request that no copy reads or writes: a preemption frees them immediately."""
        refs = self._tables[request_id].refs if request_id in self._tables else ()
        saving, restoring = self._checkpointing, self._restoring
        if not (saving or restoring):
            return len(refs)
        return sum(ref not in saving and ref not in restoring for ref in refs)

    def num_missing_blocks(self, request_id: RequestId, num_tokens: int) -> int:
        """Blocks the request lacks for its first ``num_tokens`` tokens."""
        table = self._tables.get(request_id)
        missing = -(-num_tokens // self.block_size) - (0 if table is None else len(table.refs))
        return missing if missing > 0 else 0  # not max(): called for every running request in every step

    def grow(self, request_id: RequestId, num_tokens: int) -> None:
        """Allocate what the request lacks for its first ``num_tokens`` tokens; enough blocks must be free."""
        missing = self.num_missing_blocks(request_id, num_tokens)
        assert missing <= len(self._free), f"{request_id} lacks {missing} blocks, {len(self._free)} are free"
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = _Table()
        assert not table.host, f"{request_id} is preempted"
        if missing:
            table.refs += self._take(missing)

    def table(self, request_id: RequestId) -> tuple[BlockRef, ...]:
        """The request's device blocks in token order."""
        return self._tables[request_id].refs

    def share(self, source: RequestId, target: RequestId, num_blocks: int) -> None:
        """Share the first ``num_blocks`` blocks of one request, which are full, with one that has none."""
        assert target not in self._tables, f"{target} has blocks"
        table = self._tables[source]
        assert not table.host, f"{source} is preempted"
        shared = table.refs[:num_blocks]
        assert len(shared) == num_blocks, f"{source} has {len(shared)} of {num_blocks} blocks"
        for ref in shared:
            self._more_owners[ref] = self._more_owners.get(ref, 0) + 1
        self._tables[target] = _Table(refs=shared)

    def release(self, request_id: RequestId) -> None:
        """Free all blocks of the request in both pools, if it has any."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        if table.host:
            self._release_host(table.host)
        elif self._copy_of:
            self._forget_copies(table.refs[: self._num_checkpointed(table)])
        self._release_refs(table.refs)

    # Host copies.

    @property
    def num_free_host_blocks(self) -> int:
        return len(self._free_host)

    @property
    def host_usage_frac(self) -> float:
        return 1.0 - len(self._free_host) / self.num_host_blocks if self.num_host_blocks else 0.0

    @property
    def num_checkpointed_blocks(self) -> int:
        """Full device blocks that have a host copy, complete or in flight."""
        return len(self._copy_of)

    @property
    def num_copies_in_flight(self) -> int:
        num_blocking = len(self._restore) if self._has_blocking_restores else 0
        return len(self._checkpointing) + len(self._restoring) - num_blocking

    def num_complete_checkpoints_of(self, request_id: RequestId) -> int:
        """Leading device blocks of the request whose host copy is complete."""
        table = self._tables.get(request_id)
        if table is None or not self._copy_of:
            return 0
        num_checkpointed = self._num_checkpointed(table)
        num_complete, refs = table.num_complete, table.refs
        while num_complete < num_checkpointed and refs[num_complete] not in self._checkpointing:
            num_complete += 1
        table.num_complete = num_complete
        return num_complete

    def num_uncheckpointed_blocks(self, request_id: RequestId, num_tokens: int) -> int:
        """Full blocks of the request's first ``num_tokens`` tokens without a host copy, even in flight."""
        table = self._tables.get(request_id)
        return 0 if table is None else max(0, num_tokens // self.block_size - self._num_checkpointed(table))

    def num_host_blocks_of(self, request_id: RequestId) -> int:
        """Host blocks of this request, complete or in flight, whether it is preempted or on the device."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table.host) or self._num_checkpointed(table)

    def checkpoint(self, request_id: RequestId, num_tokens: int, max_blocks: int) -> int:
        """Begin to checkpoint the next full blocks of a request on the device; returns how many.

        Args:
            num_tokens: tokens of the request whose KV is computed.
        """
        table = self._tables[request_id]
        assert not table.host, f"{request_id} is preempted"
        first = self._num_checkpointed(table)
        last = min(num_tokens // self.block_size, first + max_blocks, first + len(self._free_host))
        for ref in table.refs[first:last]:
            self._copy_of[ref] = self._begin_checkpoint(ref)
        table.num_checkpointed = max(first, last)
        return table.num_checkpointed - first

    def reclaim(
        self, request_id: RequestId, num_tokens: int, *, num_needed: int = 0, max_checkpoints: int = 0
    ) -> int:
        """Free the request's device blocks; keep its KV as far as it is, or can be, in host memory.

        Checkpointed blocks are freed immediately. Of the others, up to ``max_checkpoints`` from the first one
        on are checkpointed and freed when their copies complete, unless ``num_needed`` demands them sooner.
        The rest are freed immediately, and their KV is lost. Blocking checkpoints free their blocks
        immediately, so ``num_needed`` loses no KV then.

        Args:
            num_tokens: tokens of the request whose KV is computed.
        Returns: how many of these tokens are kept: a prefix.
        """
        table = self._tables[request_id]
        assert not table.host, f"{request_id} is preempted"
        refs = table.refs
        num_checkpointed = self._num_checkpointed(table)
        num_written = self.blocks_for(num_tokens)
        host = self._move_copies(refs[:num_checkpointed])
        free_before = len(self._free)
        self._release_refs(refs[:num_checkpointed])
        self._release_refs(refs[num_written:])
        uncopied = refs[num_checkpointed:num_written]
        num_dropped = 0
        if not self._has_blocking_checkpoints:
            num_dropped = min(len(uncopied), max(0, num_needed - (len(self._free) - free_before)))
        num_checkpoints = min(len(uncopied) - num_dropped, max_checkpoints, len(self._free_host))
        for ref in uncopied[:num_checkpoints]:
            host_block = self._begin_checkpoint(ref)
            host.append(host_block)
            if ref in self._more_owners:  # others still use it, and now it has a copy
                self._copy_of[ref] = host_block
                self._add_host_owner(host_block)
        self._release_refs(uncopied)
        kept = min(num_tokens, len(host) * self.block_size)
        if host:
            self._tables[request_id] = _Table(host=tuple(host), num_host_tokens=kept)
        else:
            del self._tables[request_id]
        return kept

    def evict_host_blocks(self, request_id: RequestId, max_blocks: int) -> int:
        """Evict host blocks of the request, from its last one back.

        For a request on the device, eviction ends before a copy that is shared or in flight.

        Returns: tokens that a preempted request still has in host memory; 0 for one on the device.
        """
        table = self._tables[request_id]
        assert not (table.host and table.refs), f"{request_id} is being restored"
        if table.host:
            keep = max(0, len(table.host) - max_blocks)
            self._release_host(table.host[keep:])
            table.host = table.host[:keep]
            table.num_host_tokens = min(table.num_host_tokens, keep * self.block_size)
            if not keep:
                del self._tables[request_id]
            return table.num_host_tokens
        last = self._num_checkpointed(table)
        first = max(0, last - max_blocks)
        busy = self._more_owners.keys() | self._checkpointing.keys()
        while last > first and table.refs[last - 1] not in busy:
            last -= 1
            self._release_host((self._copy_of.pop(table.refs[last]),))
        table.num_checkpointed = last
        table.num_complete = min(table.num_complete, last)
        return 0

    # Restoring.

    def begin_restore(self, request_id: RequestId) -> None:
        """Allocate the device blocks to which a preempted request is restored; they must be free."""
        table = self._tables[request_id]
        assert table.host and not table.refs, f"{request_id} is not preempted"
        table.refs = self._take(len(table.host))

    def restore(self, request_id: RequestId, max_blocks: int) -> int:
        """Begin to restore the next host blocks; returns how many.

        Fewer than ``max_blocks`` if no more are left, or if the next one is still being written.
        """
        table = self._tables[request_id]
        begun = 0
        while begun < max_blocks and table.num_restored < len(table.host):
            ref, host = table.refs[table.num_restored], table.host[table.num_restored]
            if host in self._incomplete_host:
                break
            self._restore.append(BlockCopy(block_index(ref), host))
            self._restoring[ref] = host
            self._num_copies_on[host] = self._num_copies_on.get(host, 0) + 1
            table.num_restored += 1
            begun += 1
        return begun

    def is_checkpoint_complete(self, request_id: RequestId) -> bool:
        """All host blocks of a preempted request are completely written."""
        return self._incomplete_host.isdisjoint(self._tables[request_id].host)

    def is_restored(self, request_id: RequestId) -> bool:
        """All its blocks are on the device again."""
        table = self._tables[request_id]
        if table.num_restored < len(table.host):
            return False
        return self._has_blocking_restores or self._restoring.keys().isdisjoint(table.refs)

    def end_restore(self, request_id: RequestId) -> int:
        """Complete a restore; returns the request's tokens on the device.

        Its full blocks keep their host copies, so they are checkpointed already. The copy of a last block
        that is not full is freed, because the request will write to that block.
        """
        table = self._tables[request_id]
        assert self.is_restored(request_id), f"copies to {request_id} are in flight"
        num_full = table.num_host_tokens // self.block_size
        self._copy_of.update(zip(table.refs[:num_full], table.host, strict=False))
        self._release_host(table.host[num_full:])
        self._tables[request_id] = _Table(refs=table.refs, num_checkpointed=num_full, num_complete=num_full)
        return table.num_host_tokens

    def cancel_restore(self, request_id: RequestId) -> None:
        """Free the device blocks of a request that is being restored; its host blocks stay."""
        table = self._tables[request_id]
        assert table.host, f"{request_id} is not being restored"
        self._release_refs(table.refs)
        table.refs, table.num_restored = (), 0

    # Copies.

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """The next plan's checkpoint and restore copies: those begun since the last call.

        A plan's checkpoint copies begin before its restore copies. So the source of a blocking restore stays
        in use until the plan is made, although the restore counts as complete before.
        """
        checkpoint, restore = tuple(self._checkpoint.values()), tuple(self._restore)
        self._checkpoint.clear()
        self._restore.clear()
        if self._has_blocking_restores:
            self.complete(restore)
        return checkpoint, restore

    def complete(self, copies: Iterable[BlockCopy]) -> None:
        """Copies of earlier plans have completed."""
        for device, host in copies:
            ref = pack_block_ref(device)
            in_flight = self._checkpointing if ref in self._checkpointing else self._restoring
            known_host = in_flight.pop(ref, None)
            assert known_host == host, f"no copy of {device} and host block {host} is in flight"
            self._incomplete_host.discard(host)
            left = self._num_copies_on.pop(host) - 1
            if left:
                self._num_copies_on[host] = left
            elif host in self._unreferenced_host:
                self._unreferenced_host.remove(host)
                self._free_host.append(host)
            if ref in self._unreferenced:
                self._unreferenced.remove(ref)
                self._free.append(ref)

    # Helpers.

    def _take(self, count: int) -> tuple[BlockRef, ...]:
        free = self._free
        assert count <= len(free)
        return tuple(free.pop() for _ in range(count))

    def _release_refs(self, refs: Sequence[BlockRef]) -> None:
        """Device blocks lose an owner. Without one they are freed, or unreferenced while a copy uses them."""
        shared, saving, restoring = self._more_owners, self._checkpointing, self._restoring
        if all(not each or each.keys().isdisjoint(refs) for each in (shared, saving, restoring)):
            self._free.extend(reversed(refs))
            return
        for ref in reversed(refs):
            if ref in shared:
                _decrement(shared, ref)
            elif ref in saving or ref in restoring:
                self._unreferenced.add(ref)
            else:
                self._free.append(ref)

    def _release_host(self, blocks: Sequence[int]) -> None:
        for host in reversed(blocks):
            if host in self._more_host_owners:
                _decrement(self._more_host_owners, host)
            elif host in self._num_copies_on:
                self._unreferenced_host.add(host)
            else:
                self._checkpoint.pop(host, None)  # a blocking checkpoint whose owner ended before the plan
                self._free_host.append(host)

    def _add_host_owner(self, host: int) -> None:
        self._more_host_owners[host] = self._more_host_owners.get(host, 0) + 1

    def _forget_copies(self, refs: Sequence[BlockRef]) -> None:
        """Free the host copies of device blocks that are about to lose their last owner."""
        for ref in refs:
            if ref not in self._more_owners:
                self._release_host((self._copy_of.pop(ref),))

    def _move_copies(self, refs: Sequence[BlockRef]) -> list[int]:
        """Make a request that is about to lose its device blocks the owner of their host copies."""
        if not self._more_owners or self._more_owners.keys().isdisjoint(refs):
            return list(map(self._copy_of.pop, refs))
        moved = []
        for ref in refs:
            if ref in self._more_owners:
                moved.append(self._copy_of[ref])
                self._add_host_owner(moved[-1])
            else:
                moved.append(self._copy_of.pop(ref))
        return moved

    def _num_checkpointed(self, table: _Table) -> int:
        num_checkpointed, refs = table.num_checkpointed, table.refs
        while num_checkpointed < len(refs) and refs[num_checkpointed] in self._copy_of:
            num_checkpointed += 1
        table.num_checkpointed = num_checkpointed
        return num_checkpointed

    def _begin_checkpoint(self, ref: BlockRef) -> int:
        assert ref not in self._restoring, f"block {block_index(ref)} is not restored before the next plan"
        host = self._free_host.pop()
        self._checkpoint[host] = BlockCopy(block_index(ref), host)
        if not self._has_blocking_checkpoints:
            self._checkpointing[ref] = host
            self._num_copies_on[host] = 1
            self._incomplete_host.add(host)
        return host

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free, in a copy, or owned as often as counted."""
        tables = self._tables.values()
        device: list[BlockRef] = [ref for table in tables for ref in table.refs]
        owners: dict[BlockRef, int] = {}
        for ref in device:
            owners[ref] = owners.get(ref, 0) + 1
        more = {ref: count - 1 for ref, count in owners.items() if count > 1}
        assert more == self._more_owners, "shared device blocks are miscounted"
        assert self._unreferenced.isdisjoint(owners)
        assert self._unreferenced <= self._checkpointing.keys() | self._restoring.keys()
        assert not self._checkpointing.keys() & self._restoring.keys()
        everything = sorted([*owners, *self._unreferenced, *self._free])
        assert everything == sorted(map(pack_block_ref, range(self.num_blocks))), (
            f"{len(owners)} owned + {len(self._unreferenced)} in copies + {len(self._free)} free "
            f"!= {self.num_blocks} blocks, or one is held twice"
        )
        host_owners: dict[int, int] = {}
        for host in [*self._copy_of.values(), *(host for table in tables for host in table.host)]:
            host_owners[host] = host_owners.get(host, 0) + 1
        more_host = {host: count - 1 for host, count in host_owners.items() if count > 1}
        assert more_host == self._more_host_owners, "shared host blocks are miscounted"
        assert self._unreferenced_host.isdisjoint(host_owners)
        everything_host = sorted([*host_owners, *self._unreferenced_host, *self._free_host])
        assert everything_host == list(range(self.num_host_blocks)), (
            f"{len(host_owners)} owned + {len(self._unreferenced_host)} in copies + "
            f"{len(self._free_host)} free != {self.num_host_blocks} host blocks, or one is held twice"
        )
        on: dict[int, int] = {}
        for host in [*self._checkpointing.values(), *self._restoring.values()]:
            on[host] = on.get(host, 0) + 1
        assert on == self._num_copies_on, "copies in flight are miscounted"
        assert self._incomplete_host == set(self._checkpointing.values())
        assert self._copy_of.keys() <= owners.keys(), "a free block has a copy"


def _decrement(counts: dict[Key, int], key: Key) -> None:
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1
