"""Copies KV blocks, and slots of blocks, between the device pool and the host pool, beside the steps."""

from __future__ import annotations

from collections import deque
from concurrent import futures
from concurrent.futures import Future

import torch
from torch import Tensor

from backfill.bus.throttle import BusThrottle
from backfill.core.block import BlockCopy, SlotCopy
from backfill.core.plan import BlockCopies
from backfill.execution.background_thread import BackgroundThread
from backfill.execution.pool_pair import (
    CompletedCopies,
    CopyGroup,
    CpuPools,
    CudaPools,
    PoolPair,
    copy_groups,
)


def create_copier(kv_pool: Tensor, num_host_blocks: int, throttle: BusThrottle | None = None) -> BlockCopier:
    """A copier between the device pool ``[num_blocks, ...]`` and a host pool that it allocates.

    Args:
        throttle: holds copies to the bandwidth of a bus; on a CPU only.
    Raises: RuntimeError or MemoryError if the host pool cannot be allocated.
    """
    # Not initialized: on a CPU, the system then allocates memory only for blocks that are used.
    host_pool = torch.empty((num_host_blocks, *kv_pool.shape[1:]), dtype=kv_pool.dtype)
    pools = CudaPools(kv_pool, host_pool) if kv_pool.is_cuda else CpuPools(kv_pool, host_pool, throttle)
    return BlockCopier(pools)


class BlockCopier:
    """Copies in the order in which the copies begin, beside the steps.

    A thread copies one group after another: a copy may read what one before wrote. After a copy failed, or
    could not begin, every call raises: the contents of the pools are unknown then. A step without copies in
    flight takes no lock.
    """

    def __init__(self, pools: PoolPair) -> None:
        self._pools = pools
        self._thread = BackgroundThread("kv-copies")
        self._in_flight: deque[tuple[CopyGroup, Future[None]]] = deque()
        self._blocks: list[BlockCopy] = []  # completed
        self._slots: list[SlotCopy] = []  # completed
        self._error: BaseException | None = None

    def begin(self, copies: BlockCopies) -> None:
        """Begin the copies to the host, and after them those to the device.

        Returns when the blocking copies are complete; ``take_completed`` does not report these.
        """
        self._collect()
        pools = self._pools
        try:
            groups = list(copy_groups(copies, pools.max_group_slots, pools.block_size))
            after = pools.queued() if groups else None
        except Exception as error:  # the control plane counts these copies as in flight
            self._error = error
            raise
        begun = [(group, self._thread.submit(pools.copy, group, after)) for group in groups]
        self._in_flight += begun
        awaited = [future for group, future in begun if not group.is_reported]
        if awaited:
            futures.wait(awaited)
            self._collect()

    def take_completed(self) -> CompletedCopies:
        """Copies that have completed since the last call. Never blocks."""
        self._collect()
        if not (self._blocks or self._slots):
            return CompletedCopies()
        completed = CompletedCopies(tuple(self._blocks), tuple(self._slots))
        self._blocks, self._slots = [], []
        return completed

    def wait(self, timeout_s: float) -> None:
        """Block until ``take_completed`` has something to return, or no copy is in flight."""
        self._collect()
        if self._in_flight and not (self._blocks or self._slots):
            # It is reported: ``begin`` has waited for those that are not.
            futures.wait([self._in_flight[0][1]], timeout_s)
            self._collect()

    def close(self) -> None:
        """Stop copying; queued copies are dropped. No other call may follow."""
        self._thread.close()
        self._pools.close()

    def _collect(self) -> None:
        """Note which copies have completed. Raises: RuntimeError if one has failed."""
        while self._error is None and self._in_flight and self._in_flight[0][1].done():
            group, future = self._in_flight.popleft()
            self._error = future.exception()
            if self._error is None and group.is_reported:
                self._blocks += group.blocks
                self._slots += group.slots
        if self._error is not None:
            raise RuntimeError("a copy between device and host memory failed") from self._error
