"""Who owns which KV block, on the device and in host memory. Pure bookkeeping: no tensor is touched here."""

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
    """Where one request's KV is: on the device, or, once its blocks were reclaimed, in host memory.

    Attributes:
        refs: device blocks in token order. Replaced when they grow: plans take them as they are.
        num_copied: so many leading ones have a host copy, complete or under way; there may be more of them
            since this was last looked at.
        num_saved: likewise, whose copy is complete.
        host: host blocks in token order, of a request that is off the device; while it is restored they are
            the sources of its first ``refs``.
        num_host_tokens: tokens they hold; the last one may be partly filled.
        num_restored: leading host blocks whose copy to the device has begun.
    """

    refs: tuple[BlockRef, ...] = ()
    num_copied: int = 0
    num_saved: int = 0
    host: tuple[int, ...] = ()
    num_host_tokens: int = 0
    num_restored: int = 0


class BlockManager:
    """Owns the blocks of both pools: every request's block table and every block's host copy.

    KV never changes once it is written, so a full block and its copy in host memory stay equal for ever: a
    block that has one is *checkpointed*, and its device memory can be given away by changing a table.
    Copies run beside the steps. A block that one reads or writes belongs to nobody until it is complete,
    whatever becomes of its request (ConServe, sections 4.4 and 5).

    Free blocks are kept on stacks: the most recently freed is handed out first, since its memory is the
    likeliest to be in a cache.

    Args:
        num_blocks: blocks in the device's pool.
        block_size: tokens a block holds.
        num_host_blocks: blocks in the host's pool.
        blocking: copies of these directions are complete before the step that they are begun with computes
            anything (``StepPlan.blocking_copies``): their blocks are free, or whole, at once.
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
        self._saves_at_once = CopyDirections.CHECKPOINT in blocking
        self._restores_at_once = CopyDirections.RESTORE in blocking
        self._free: list[BlockRef] = [pack_block_ref(index) for index in range(num_blocks - 1, -1, -1)]
        self._free_host: list[int] = list(range(num_host_blocks - 1, -1, -1))
        self._tables: dict[RequestId, _Table] = {}
        self._copy_of: dict[BlockRef, int] = {}  # host copies of full blocks on the device
        # Blocks with more than one owner: how many more. An owner of a host block is a request that is off
        # the device, or a device block whose copy it is.
        self._more_owners: dict[BlockRef, int] = {}
        self._more_host_owners: dict[int, int] = {}
        # Copies under way, by their device block; a host block may be the source of several.
        self._saving: dict[BlockRef, int] = {}
        self._restoring: dict[BlockRef, int] = {}
        self._num_copies_on: dict[int, int] = {}
        self._unwritten: set[int] = set()  # host blocks that are not whole yet
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
        """Blocks that become free when the copies on them are complete."""
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
        """Blocks the request holds that no copy reads or writes: preempting it frees them at once."""
        refs = self._tables[request_id].refs if request_id in self._tables else ()
        saving, restoring = self._saving, self._restoring
        if not (saving or restoring):
            return len(refs)
        return sum(ref not in saving and ref not in restoring for ref in refs)

    def num_missing_blocks(self, request_id: RequestId, num_tokens: int) -> int:
        """Blocks the request must still be given to hold its first ``num_tokens`` tokens."""
        table = self._tables.get(request_id)
        missing = -(-num_tokens // self.block_size) - (0 if table is None else len(table.refs))
        return missing if missing > 0 else 0  # asked for every running request in every step

    def grow(self, request_id: RequestId, num_tokens: int) -> None:
        """Give the request the blocks it lacks for its first ``num_tokens`` tokens; they must be free."""
        missing = self.num_missing_blocks(request_id, num_tokens)
        assert missing <= len(self._free), f"{request_id} lacks {missing} blocks, {len(self._free)} are free"
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = _Table()
        assert not table.host, f"{request_id} is off the device"
        if missing:
            table.refs += self._take(missing)

    def table(self, request_id: RequestId) -> tuple[BlockRef, ...]:
        """The request's device blocks in token order."""
        return self._tables[request_id].refs

    def share(self, source: RequestId, target: RequestId, num_blocks: int) -> None:
        """Let the first blocks of one request, full ones, be those of another that has none."""
        assert target not in self._tables, f"{target} has blocks"
        table = self._tables[source]
        assert not table.host, f"{source} is off the device"
        shared = table.refs[:num_blocks]
        assert len(shared) == num_blocks, f"{source} has {len(shared)} of {num_blocks} blocks"
        for ref in shared:
            self._more_owners[ref] = self._more_owners.get(ref, 0) + 1
        self._tables[target] = _Table(refs=shared)

    def release(self, request_id: RequestId) -> None:
        """Take back all the request has in both pools; nothing is fine."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        if table.host:
            self._release_host(table.host)
        elif self._copy_of:
            self._forget_copies(table.refs[: self._num_copied(table)])
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
        """Full device blocks that have a host copy, complete or under way."""
        return len(self._copy_of)

    @property
    def num_copies_under_way(self) -> int:
        at_once = len(self._restore) if self._restores_at_once else 0
        return len(self._saving) + len(self._restoring) - at_once

    def num_checkpointed_blocks_of(self, request_id: RequestId) -> int:
        """Leading device blocks of the request whose host copy is complete."""
        table = self._tables.get(request_id)
        if table is None or not self._copy_of:
            return 0
        num_copied = self._num_copied(table)
        num_saved, refs = table.num_saved, table.refs
        while num_saved < num_copied and refs[num_saved] not in self._saving:
            num_saved += 1
        table.num_saved = num_saved
        return num_saved

    def num_blocks_without_copy(self, request_id: RequestId, num_tokens: int) -> int:
        """Full blocks of the request's first ``num_tokens`` tokens that have no host copy and get none."""
        table = self._tables.get(request_id)
        return 0 if table is None else max(0, num_tokens // self.block_size - self._num_copied(table))

    def num_host_blocks_of(self, request_id: RequestId) -> int:
        """Host blocks that hold, or will, what this request has or had on the device."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table.host) or self._num_copied(table)

    def checkpoint(self, request_id: RequestId, num_tokens: int, at_most: int) -> int:
        """Begin to copy full blocks of a request on the device; returns how many, of each the first time.

        Args:
            num_tokens: tokens of the request whose KV is computed.
        """
        table = self._tables[request_id]
        assert not table.host, f"{request_id} is off the device"
        first = self._num_copied(table)
        last = min(num_tokens // self.block_size, first + at_most, first + len(self._free_host))
        for ref in table.refs[first:last]:
            self._copy_of[ref] = self._begin_save(ref)
        table.num_copied = max(first, last)
        return table.num_copied - first

    def reclaim(self, request_id: RequestId, num_tokens: int, *, needed: int = 0, may_save: int = 0) -> int:
        """Take the request's device blocks back, and keep of its KV what is, or can be, in host memory.

        Checkpointed blocks are free at once. Of the others so many are dropped, from the last one back, that
        ``needed`` are free; of what is left up to ``may_save`` are copied first and free after that. Where
        the step waits for these copies they are free at once too, and none is dropped.

        Args:
            num_tokens: tokens of the request whose KV is computed.
        Returns: of these, how many are kept: a prefix.
        """
        table = self._tables[request_id]
        assert not table.host, f"{request_id} is off the device"
        refs = table.refs
        num_copied = self._num_copied(table)
        num_written = self.blocks_for(num_tokens)
        host = self._move_copies(refs[:num_copied])
        free_before = len(self._free)
        self._release_refs(refs[:num_copied])
        self._release_refs(refs[num_written:])
        uncopied = refs[num_copied:num_written]
        num_dropped = 0
        if not self._saves_at_once:
            num_dropped = min(len(uncopied), max(0, needed - (len(self._free) - free_before)))
        num_saves = min(len(uncopied) - num_dropped, may_save, len(self._free_host))
        for ref in uncopied[:num_saves]:
            saved = self._begin_save(ref)
            host.append(saved)
            if ref in self._more_owners:  # others still use it, and now it has a copy
                self._copy_of[ref] = saved
                self._add_host_owner(saved)
        self._release_refs(uncopied)
        kept = min(num_tokens, len(host) * self.block_size)
        if host:
            self._tables[request_id] = _Table(host=tuple(host), num_host_tokens=kept)
        else:
            del self._tables[request_id]
        return kept

    def drop_copies(self, request_id: RequestId, at_most: int) -> int:
        """Give up host blocks of the request, from its last one back.

        On the device a copy that others share, or that is under way, stays, and those before it.

        Returns: tokens it then has in host memory if it is off the device, else 0.
        """
        table = self._tables[request_id]
        assert not (table.host and table.refs), f"{request_id} is being restored"
        if table.host:
            keep = max(0, len(table.host) - at_most)
            self._release_host(table.host[keep:])
            table.host = table.host[:keep]
            table.num_host_tokens = min(table.num_host_tokens, keep * self.block_size)
            if not keep:
                del self._tables[request_id]
            return table.num_host_tokens
        last = self._num_copied(table)
        first = max(0, last - at_most)
        busy = self._more_owners.keys() | self._saving.keys()
        while last > first and table.refs[last - 1] not in busy:
            last -= 1
            self._release_host((self._copy_of.pop(table.refs[last]),))
        table.num_copied = last
        table.num_saved = min(table.num_saved, last)
        return 0

    # The way back.

    def begin_restore(self, request_id: RequestId) -> None:
        """Give a request that is off the device the device blocks to restore it to; they must be free."""
        table = self._tables[request_id]
        assert table.host and not table.refs, f"{request_id} is not off the device"
        table.refs = self._take(len(table.host))

    def restore(self, request_id: RequestId, at_most: int) -> int:
        """Begin to copy the next host blocks to the device; returns how many.

        Fewer than ``at_most`` where no more are left, or the next one is still being written.
        """
        table = self._tables[request_id]
        begun = 0
        while begun < at_most and table.num_restored < len(table.host):
            ref, host = table.refs[table.num_restored], table.host[table.num_restored]
            if host in self._unwritten:
                break
            self._restore.append(BlockCopy(block_index(ref), host))
            self._restoring[ref] = host
            self._num_copies_on[host] = self._num_copies_on.get(host, 0) + 1
            table.num_restored += 1
            begun += 1
        return begun

    def is_saved(self, request_id: RequestId) -> bool:
        """All host blocks of a request that is off the device are whole."""
        return self._unwritten.isdisjoint(self._tables[request_id].host)

    def is_restored(self, request_id: RequestId) -> bool:
        """All its blocks are back."""
        table = self._tables[request_id]
        if table.num_restored < len(table.host):
            return False
        return self._restores_at_once or self._restoring.keys().isdisjoint(table.refs)

    def end_restore(self, request_id: RequestId) -> int:
        """Put a request that is restored on the device; returns its tokens there.

        The copies of its full blocks stay, so that they are checkpointed already. That of a last block that
        is not full is given up: the block will be written on.
        """
        table = self._tables[request_id]
        assert self.is_restored(request_id), f"copies to {request_id} are under way"
        num_full = table.num_host_tokens // self.block_size
        self._copy_of.update(zip(table.refs[:num_full], table.host, strict=False))
        self._release_host(table.host[num_full:])
        self._tables[request_id] = _Table(refs=table.refs, num_copied=num_full, num_saved=num_full)
        return table.num_host_tokens

    def cancel_restore(self, request_id: RequestId) -> None:
        """Take the device blocks back from a request that is being restored; its host copies stay."""
        table = self._tables[request_id]
        assert table.host, f"{request_id} is not being restored"
        self._release_refs(table.refs)
        table.refs, table.num_restored = (), 0

    # Copies.

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Copies begun since this was last called, to the host and to the device, for the next plan.

        A plan's copies to the host begin before those to the device. So a host block that is read at once may
        not be written on before the plan is made, though its copy will be complete when the step computes.
        """
        checkpoint, restore = tuple(self._checkpoint.values()), tuple(self._restore)
        self._checkpoint.clear()
        self._restore.clear()
        if self._restores_at_once:
            self.complete(restore)
        return checkpoint, restore

    def complete(self, copies: Iterable[BlockCopy]) -> None:
        """Copies of earlier plans are complete."""
        for device, host in copies:
            ref = pack_block_ref(device)
            under_way = self._saving if ref in self._saving else self._restoring
            known_host = under_way.pop(ref, None)
            assert known_host == host, f"no copy of {device} and host block {host} is under way"
            self._unwritten.discard(host)
            left = self._num_copies_on.pop(host) - 1
            if left:
                self._num_copies_on[host] = left
            elif host in self._unreferenced_host:
                self._unreferenced_host.remove(host)
                self._free_host.append(host)
            if ref in self._unreferenced:
                self._unreferenced.remove(ref)
                self._free.append(ref)

    # Parts.

    def _take(self, count: int) -> tuple[BlockRef, ...]:
        free = self._free
        assert count <= len(free)
        return tuple(free.pop() for _ in range(count))

    def _release_refs(self, refs: Sequence[BlockRef]) -> None:
        """Device blocks lose an owner; without one they are free, or will be when no copy uses them."""
        shared, saving, restoring = self._more_owners, self._saving, self._restoring
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
                self._checkpoint.pop(host, None)  # saved at once for an owner that did not last to the plan
                self._free_host.append(host)

    def _add_host_owner(self, host: int) -> None:
        self._more_host_owners[host] = self._more_host_owners.get(host, 0) + 1

    def _forget_copies(self, refs: Sequence[BlockRef]) -> None:
        """An owner of device blocks is about to go: their copies go too, where it is the last one."""
        for ref in refs:
            if ref not in self._more_owners:
                self._release_host((self._copy_of.pop(ref),))

    def _move_copies(self, refs: Sequence[BlockRef]) -> list[int]:
        """The copies of device blocks whose owner is about to go, now owned by that request."""
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

    def _num_copied(self, table: _Table) -> int:
        num_copied, refs = table.num_copied, table.refs
        while num_copied < len(refs) and refs[num_copied] in self._copy_of:
            num_copied += 1
        table.num_copied = num_copied
        return num_copied

    def _begin_save(self, ref: BlockRef) -> int:
        assert ref not in self._restoring, f"block {block_index(ref)} is not restored before the next plan"
        host = self._free_host.pop()
        self._checkpoint[host] = BlockCopy(block_index(ref), host)
        if not self._saves_at_once:
            self._saving[ref] = host
            self._num_copies_on[host] = 1
            self._unwritten.add(host)
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
        assert self._unreferenced <= self._saving.keys() | self._restoring.keys()
        assert not self._saving.keys() & self._restoring.keys()
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
        for host in [*self._saving.values(), *self._restoring.values()]:
            on[host] = on.get(host, 0) + 1
        assert on == self._num_copies_on, "copies under way are miscounted"
        assert self._unwritten == set(self._saving.values())
        assert self._copy_of.keys() <= owners.keys(), "a free block has a copy"


def _decrement(counts: dict[Key, int], key: Key) -> None:
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1
