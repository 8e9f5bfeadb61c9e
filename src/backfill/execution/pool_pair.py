"""The device pool and the host pool, and how copies go between them, in groups that complete together."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

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


class PoolPair(Protocol):
    """Both pools are ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``.

    Attributes:
        max_group_slots: a group of copies has at most so many slots.
    """

    block_size: int
    max_group_slots: int

    def queued(self) -> torch.cuda.Event | None:
        """What the device has to do before copies that begin now; None if nothing."""

    def copy(self, group: CopyGroup, after: torch.cuda.Event | None) -> None:
        """Wait for ``after``, then copy; returns when the copies are complete."""

    def close(self) -> None:
        """Free what the pools hold beside their memory. No other call may follow."""


def create_pool_pair(kv_pool: Tensor, num_host_blocks: int) -> PoolPair:
    """Allocates the host pool. Raises: RuntimeError or MemoryError if that fails."""
    # Not initialized: on a CPU, the system then allocates memory only for blocks that are used.
    host_pool = torch.empty((num_host_blocks, *kv_pool.shape[1:]), dtype=kv_pool.dtype)
    return CudaPools(kv_pool, host_pool) if kv_pool.is_cuda else CpuPools(kv_pool, host_pool)


class CpuPools:
    """See ``PoolPair``. Both pools are in host memory."""

    def __init__(self, kv_pool: Tensor, host_pool: Tensor) -> None:
        self.block_size = kv_pool.shape[4]
        self.max_group_slots = _max_group_slots(kv_pool, _CPU_GROUP_BYTES)
        self._device, self._host = kv_pool, host_pool

    def queued(self) -> None:
        return None

    def copy(self, group: CopyGroup, after: torch.cuda.Event | None) -> None:
        if group.blocks:
            devices, hosts = [copy.device for copy in group.blocks], [copy.host for copy in group.blocks]
            if group.direction is CopyDirections.CHECKPOINT:
                cpu_copies.copy_blocks(self._host, hosts, self._device, devices)
            else:
                cpu_copies.copy_blocks(self._device, devices, self._host, hosts)
        if group.slots:
            if group.direction is CopyDirections.CHECKPOINT:
                hosts = [copy.host for copy in group.slots]
                cpu_copies.copy_slots(self._host, hosts, self._device, _on_device(group.slots))
            else:
                devices = [copy.device for copy in group.slots]
                cpu_copies.copy_slots(self._device, devices, self._host, _on_host(group.slots))

    def close(self) -> None:
        pass


class CudaPools:
    """See ``PoolPair``. Copies run on a CUDA stream of their own, beside the steps.

    The host pool is pinned until the pools are closed or collected. Slots go through two dense buffers, one
    on the device and one pinned: a copy for each run of memory would take longer to begin than to end.
    """

    def __init__(self, kv_pool: Tensor, host_pool: Tensor) -> None:
        pin(host_pool)
        self.block_size = kv_pool.shape[4]
        self.max_group_slots = _max_group_slots(kv_pool, _CUDA_GROUP_BYTES)
        self._device, self._host = kv_pool, host_pool
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
            if group.direction is CopyDirections.CHECKPOINT:
                self._checkpoint(group.blocks)
                self._checkpoint_slots(group.slots)
            else:
                self._restore(group.blocks)
                self._restore_slots(group.slots)

    def close(self) -> None:
        self._finalizer()

    def _checkpoint(self, copies: Sequence[BlockCopy]) -> None:
        for device, host in copies:
            self._host[host].copy_(self._device[device], non_blocking=True)
        self._wait()

    def _restore(self, copies: Sequence[BlockCopy]) -> None:
        for device, host in copies:
            self._device[device].copy_(self._host[host], non_blocking=True)
        self._wait()

    def _checkpoint_slots(self, copies: Sequence[SlotCopy]) -> None:
        if not copies:
            return
        from backfill.kernels.triton_ops import slots

        ranges = _on_device(copies)
        size = num_packed(self._device, ranges)
        on_device, pinned = self._dense_buffers()
        slots.gather_slots(self._device, ranges, on_device)
        pinned[:size].copy_(on_device[:size], non_blocking=True)
        self._wait()
        cpu_copies.scatter_slots(pinned, self._host, _on_host(copies))

    def _restore_slots(self, copies: Sequence[SlotCopy]) -> None:
        if not copies:
            return
        from backfill.kernels.triton_ops import slots

        ranges = _on_host(copies)
        size = num_packed(self._host, ranges)
        on_device, pinned = self._dense_buffers()
        cpu_copies.gather_slots(self._host, ranges, pinned)
        on_device[:size].copy_(pinned[:size], non_blocking=True)
        slots.scatter_slots(on_device, self._device, _on_device(copies))
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


def _max_group_slots(kv_pool: Tensor, group_bytes: int) -> int:
    return max(1, group_bytes // kv_pool[:1].nbytes) * kv_pool.shape[4]


def _on_device(copies: Sequence[SlotCopy]) -> list[SlotRange]:
    return [SlotRange(copy.device, copy.first, copy.num) for copy in copies]


def _on_host(copies: Sequence[SlotCopy]) -> list[SlotRange]:
    return [SlotRange(copy.host, copy.first, copy.num) for copy in copies]


class ThrottledPools:
    """See ``PoolPair``. Copies also take the time that they need on a bus.

    Args:
        slot_bytes: of one token.
    """

    def __init__(self, pools: PoolPair, throttle: BusThrottle, slot_bytes: int) -> None:
        self.block_size = pools.block_size
        self.max_group_slots = pools.max_group_slots
        self._pools = pools
        self._throttle = throttle
        self._slot_bytes = slot_bytes

    def queued(self) -> torch.cuda.Event | None:
        return self._pools.queued()

    def copy(self, group: CopyGroup, after: torch.cuda.Event | None) -> None:
        num_slots = self.block_size * len(group.blocks) + sum(copy.num for copy in group.slots)

        def copy(start: int, stop: int) -> None:
            if start == 0:  # a group is one copy
                self._pools.copy(group, after)

        self._throttle.transfer(num_slots * self._slot_bytes, copy)

    def close(self) -> None:
        self._pools.close()
