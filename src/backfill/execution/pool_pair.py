"""The device pool and the host pool, and how copies go between them, in groups that complete together."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from backfill.bus.throttle import BusThrottle
from backfill.core.block import BlockCopy, SlotCopy
from backfill.core.plan import BlockCopies, CopyDirections
from backfill.execution.host_memory import pin, unpin
from backfill.kernels import cpu_copies
from backfill.kernels.slots import SlotRange, num_packed

# Under a millisecond, and long beside the hand-over to the thread (11.0 GB/s at 4 MiB, 12.1 at 16 MiB, 12.1
# for the copy alone).
_CPU_GROUP_BYTES = 8 << 20
# As long at the speed of a PCIe link: about a millisecond.
_CUDA_GROUP_BYTES = 32 << 20

_Copy = TypeVar("_Copy", BlockCopy, SlotCopy)


class CompletedCopies(NamedTuple):
    blocks: tuple[BlockCopy, ...] = ()
    slots: tuple[SlotCopy, ...] = ()


class CopyGroup(NamedTuple):
    """Copies of one direction that complete together: of blocks, or of slots."""

    direction: CopyDirections
    blocks: tuple[BlockCopy, ...]
    slots: tuple[SlotCopy, ...]
    is_reported: bool


def copy_groups(copies: BlockCopies, num_slots: int, block_size: int) -> Iterator[CopyGroup]:
    """The groups in the order in which they begin.

    Args:
        num_slots: the most slots in a group; at least ``block_size``.
    """
    for direction, of_blocks, of_slots in (
        (CopyDirections.CHECKPOINT, copies.checkpoint, copies.slot_checkpoint),
        (CopyDirections.RESTORE, copies.restore, copies.slot_restore),
    ):
        is_reported = direction not in copies.blocking
        for blocks in _split(of_blocks, [block_size] * len(of_blocks), num_slots):
            yield CopyGroup(direction, blocks, (), is_reported)
        for slots in _split(of_slots, [copy.num for copy in of_slots], num_slots):
            yield CopyGroup(direction, (), slots, is_reported)


def _split(copies: Sequence[_Copy], sizes: Sequence[int], limit: int) -> Iterator[tuple[_Copy, ...]]:
    """Consecutive copies whose sizes add up to ``limit`` at most."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if total + size > limit:
            yield tuple(copies[first:index])
            first, total = index, 0
        total += size
    if copies:
        yield tuple(copies[first:])


class PoolPair(ABC):
    """Both pools are ``[num_blocks, num_layers, 2, num_kv_heads, block_size, row_size]``.

    Attributes:
        max_group_slots: a group of copies has at most so many slots.
    """

    def __init__(self, kv_pool: Tensor, host_pool: Tensor, group_bytes: int) -> None:
        self.block_size = kv_pool.shape[4]
        self.max_group_slots = max(1, group_bytes // kv_pool[:1].nbytes) * self.block_size
        self._device, self._host = kv_pool, host_pool

    @abstractmethod
    def queued(self) -> torch.cuda.Event | None:
        """What the device has to do before copies that begin now; None if nothing."""

    @abstractmethod
    def copy(self, group: CopyGroup, after: torch.cuda.Event | None) -> None:
        """Wait for ``after``, then copy; returns when the copies are complete."""

    @abstractmethod
    def close(self) -> None:
        """Free what the pools hold beside their memory. No other call may follow."""


class CpuPools(PoolPair):
    """See ``PoolPair``. Both pools are in host memory.

    Args:
        throttle: copies take the time that they need on its bus.
    """

    def __init__(self, kv_pool: Tensor, host_pool: Tensor, throttle: BusThrottle | None = None) -> None:
        super().__init__(kv_pool, host_pool, _CPU_GROUP_BYTES)
        self._throttle = throttle

    def queued(self) -> None:
        return None

    def copy(self, group: CopyGroup, after: torch.cuda.Event | None) -> None:
        if self._throttle is None:
            self._copy(group)
            return

        def copy(start: int, stop: int) -> None:
            if start == 0:  # a group is one copy
                self._copy(group)

        slot_bytes = self._device[:1].nbytes // self.block_size
        num_slots = self.block_size * len(group.blocks) + sum(each.num for each in group.slots)
        self._throttle.transfer(num_slots * slot_bytes, copy)

    def close(self) -> None:
        pass

    def _copy(self, group: CopyGroup) -> None:
        devices = [copy.device for copy in group.blocks or group.slots]
        hosts = [copy.host for copy in group.blocks or group.slots]
        source, sources, target, targets = self._device, devices, self._host, hosts
        if group.direction is CopyDirections.RESTORE:
            source, sources, target, targets = self._host, hosts, self._device, devices
        if group.blocks:
            cpu_copies.copy_blocks(target, targets, source, sources)
        else:
            cpu_copies.copy_slots(target, targets, source, _ranges(sources, group.slots))


class CudaPools(PoolPair):
    """See ``PoolPair``. Copies run on a CUDA stream of their own, beside the steps.

    The host pool is pinned until the pools are closed or collected. Slots go through two dense buffers, one
    on the device and one pinned: a copy for each run of memory would take longer to begin than to end.
    """

    def __init__(self, kv_pool: Tensor, host_pool: Tensor) -> None:
        super().__init__(kv_pool, host_pool, _CUDA_GROUP_BYTES)
        pin(host_pool)
        self._stream = torch.cuda.Stream(kv_pool.device)  # type: ignore[no-untyped-call]
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._finalizer = weakref.finalize(self, unpin, host_pool, self._stream)
        # The system unpins at the process's end, and CUDA may have ended before.
        self._finalizer.atexit = False

    def queued(self) -> torch.cuda.Event:
        # Steps already queued write slots that are read here, and read slots that are written here.
        event: torch.cuda.Event = torch.cuda.current_stream(self._device.device).record_event()
        return event

    def copy(self, group: CopyGroup, after: torch.cuda.Event | None) -> None:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            to_host = group.direction is CopyDirections.CHECKPOINT
            if group.slots:
                self._copy_slots(group.slots, to_host)
                return
            for device, host in group.blocks:
                on_device, on_host = self._device[device], self._host[host]
                target, source = (on_host, on_device) if to_host else (on_device, on_host)
                target.copy_(source, non_blocking=True)
            self._wait()

    def close(self) -> None:
        self._finalizer()

    def _copy_slots(self, copies: Sequence[SlotCopy], to_host: bool) -> None:
        from backfill.kernels.triton_ops import slots

        of_device = _ranges([copy.device for copy in copies], copies)
        of_host = _ranges([copy.host for copy in copies], copies)
        size = num_packed(self._device, of_device)
        dense, pinned = self._dense_buffers()
        if to_host:
            slots.gather_slots(self._device, of_device, dense)
            pinned[:size].copy_(dense[:size], non_blocking=True)
            self._wait()
            cpu_copies.scatter_slots(pinned, self._host, of_host)
        else:
            cpu_copies.gather_slots(self._host, of_host, pinned)
            dense[:size].copy_(pinned[:size], non_blocking=True)
            slots.scatter_slots(dense, self._device, of_device)
            self._wait()

    def _dense_buffers(self) -> tuple[Tensor, Tensor]:
        """On the device and in pinned memory. Every group waits for its end, so all share them."""
        if self._buffers is None:
            size = self._device[:1].numel() // self.block_size * self.max_group_slots
            self._buffers = (
                self._device.new_empty(size),
                torch.empty(size, dtype=self._device.dtype, pin_memory=True),
            )
        return self._buffers

    def _wait(self) -> None:
        # An event that sleeps: waiting for the stream itself would keep a core busy.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        event.synchronize()


def _ranges(blocks: Sequence[int], copies: Sequence[SlotCopy]) -> list[SlotRange]:
    """The slots of the copies in these blocks."""
    return [SlotRange(block, copy.first, copy.num) for block, copy in zip(blocks, copies, strict=True)]
