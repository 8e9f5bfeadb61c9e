"""The copies between the two tiers, from their request to their completion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from backfill.core.block import BlockCopy, SlotCopy, is_reversed, pack_block_ref
from backfill.core.plan import BlockCopies, CopyDirections
from backfill.kvcache.content import Block
from backfill.kvcache.pool import BlockPool

Copy: TypeAlias = BlockCopy | SlotCopy
Slots: TypeAlias = tuple[int, int]  # the first one, and how many


class CopyLimits(NamedTuple):
    """Most copies that may be in flight while copies of a kind begin.

    Attributes:
        online: restores for online requests, for whose KV an objective waits.
        background: restores for offline requests, and checkpoints; at most as many.
    """

    online: int
    background: int


class CopyLedger:
    """Every copy between the device's pool and the host's, from its request to its completion.

    A block in a copy is pinned: its memory is not taken before the copy completes, whatever becomes of its
    content (ConServe, sections 4.4 and 5).

    Args:
        blocking: copies of these directions complete before their step computes. They count as complete when
            they begin, and pin only what another copy of the same plan could overwrite.
    """

    def __init__(self, device: BlockPool, host: BlockPool, blocking: CopyDirections) -> None:
        self._device, self._host = device, host
        self._blocking = blocking
        self._none = BlockCopies(blocking=blocking)
        self.checkpoints_block = CopyDirections.CHECKPOINT in blocking
        self.restores_block = CopyDirections.RESTORE in blocking
        # Restores that wait: device block; host block and, unless it is the whole block, which slots of it.
        # Those of online requests begin first.
        self._online: dict[Block, tuple[Block, Slots | None]] = {}
        self._offline: dict[Block, tuple[Block, Slots | None]] = {}
        self._in_flight: dict[Copy, tuple[Block, Block]] = {}
        self._checkpoint: list[Copy] = []  # begin with the next plan
        self._restore: list[Copy] = []
        self._pinned_until_plan: list[tuple[BlockPool, Block]] = []

    @property
    def num_in_flight(self) -> int:
        """Copies that an outcome will report. Restores that wait to begin do not count."""
        return len(self._in_flight)

    @property
    def has_begun(self) -> bool:
        """Copies begin with the next plan."""
        return bool(self._checkpoint or self._restore)

    def checkpoint(self, device: Block, host: Block, slots: Slots | None = None) -> None:
        """Begin a copy to the host, of the whole block or of some slots, with the next plan."""
        host.ref = pack_block_ref(host.index, is_reversed(device.ref))
        copy = _copy(device, host, slots)
        self._checkpoint.append(copy)
        if self.checkpoints_block:
            self._pin_until_plan(self._host, host)
        else:
            self._pin(device, host)
            host.is_valid = False
            self._in_flight[copy] = device, host
        self._update(device, host)

    def restore(self, device: Block, host: Block, is_online: bool, slots: Slots | None = None) -> None:
        """Queue a copy to the device for a request, behind those of its class that wait already."""
        assert host.is_valid, "content that a checkpoint still writes is on the device"
        assert slots is None or is_reversed(device.ref) is is_reversed(host.ref), "slots in two directions"
        device.ref = pack_block_ref(device.index, is_reversed(host.ref))
        if self.restores_block:
            self._restore.append(_copy(device, host, slots))
            self._pin_until_plan(self._device, device)
            self._pin_until_plan(self._host, host)
        else:
            self._pin(device, host)
            device.is_valid = False
            (self._online if is_online else self._offline)[device] = host, slots
        self._update(device, host)

    def keep_host(self, host: Block) -> None:
        """The block is not taken for other copies of the next plan."""
        self._pin_until_plan(self._host, host)
        self._host.update(host)

    def begin_restores(self, max_online: int, max_offline: int) -> None:
        """Begin queued restores with the next plan while fewer copies are in flight.

        Those of online requests begin first, each class in its order.
        """
        self._begin_restores(self._online, max_online)
        self._begin_restores(self._offline, max_offline)

    def _begin_restores(self, queue: dict[Block, tuple[Block, Slots | None]], max_in_flight: int) -> None:
        while queue and len(self._in_flight) < max_in_flight:
            device = next(iter(queue))
            host, slots = queue.pop(device)
            copy = _copy(device, host, slots)
            self._restore.append(copy)
            self._in_flight[copy] = device, host

    def prioritize(self, device: Block) -> None:
        """An online request waits for the block too."""
        queued = self._offline.pop(device, None)
        if queued is not None:
            self._online[device] = queued

    def cancel_restore(self, device: Block) -> bool:
        """Forget a restore that has not begun; False if it has, or there is none."""
        queued = self._online.pop(device, None) or self._offline.pop(device, None)
        if queued is None:
            return False
        device.is_valid = True
        self._unpin(device, queued[0])
        return True

    def take(self) -> BlockCopies:
        """The next plan's copies: those begun since the last call.

        A plan's checkpoint copies begin before its restore copies.
        """
        if not (self._checkpoint or self._restore or self._pinned_until_plan):
            return self._none
        copies = BlockCopies(
            tuple(copy for copy in self._checkpoint if isinstance(copy, BlockCopy)),
            tuple(copy for copy in self._restore if isinstance(copy, BlockCopy)),
            self._blocking,
            tuple(copy for copy in self._checkpoint if isinstance(copy, SlotCopy)),
            tuple(copy for copy in self._restore if isinstance(copy, SlotCopy)),
        )
        self._checkpoint.clear()
        self._restore.clear()
        for pool, block in self._pinned_until_plan:
            block.num_copies -= 1
            pool.update(block)
        self._pinned_until_plan.clear()
        return copies

    def complete(self, copies: Iterable[Copy]) -> list[Block]:
        """Copies of earlier plans have completed. Returns the device blocks that were restored."""
        restored = []
        for copy in copies:
            device, host = self._in_flight.pop(copy)
            if not device.is_valid:
                restored.append(device)
            device.is_valid = True
            host.is_valid = host.is_valid or host.num_copies == 1  # else other slots of it are being copied
            self._unpin(device, host)
        return restored

    def _pin(self, device: Block, host: Block) -> None:
        device.num_copies += 1
        host.num_copies += 1

    def _unpin(self, device: Block, host: Block) -> None:
        device.num_copies -= 1
        host.num_copies -= 1
        self._update(device, host)

    def _pin_until_plan(self, pool: BlockPool, block: Block) -> None:
        block.num_copies += 1
        self._pinned_until_plan.append((pool, block))

    def _update(self, device: Block, host: Block) -> None:
        self._device.update(device)
        self._host.update(host)


def _copy(device: Block, host: Block, slots: Slots | None) -> Copy:
    if slots is None:
        return BlockCopy(device.index, host.index)
    return SlotCopy(device.index, host.index, *slots)
