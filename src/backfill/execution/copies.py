"""Copies KV blocks, and slots of blocks, between the device pool and the host pool, beside the steps."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from backfill.bus.throttle import BusThrottle
from backfill.core.block import BlockCopy, SlotCopy
from backfill.core.plan import BlockCopies
from backfill.execution.pool_pair import (
    CompletedCopies,
    CopyGroup,
    PoolPair,
    ThrottledPools,
    copy_groups,
    create_pool_pair,
)


class BlockCopier(Protocol):
    """Copies in the order in which the copies begin, beside the steps.

    After a copy failed, or could not begin, every call raises: the contents of the pools are unknown then.
    """

    def begin(self, copies: BlockCopies) -> None:
        """Begin the copies to the host, and after them those to the device.

        Returns when the blocking copies are complete; ``take_completed`` does not report these.
        """

    def take_completed(self) -> CompletedCopies:
        """Copies that have completed since the last call. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Block until ``take_completed`` has something to return, or no copy is in flight."""

    def close(self) -> None:
        """Stop copying; queued copies are dropped. No other call may follow."""


def create_copier(kv_pool: Tensor, num_host_blocks: int, throttle: BusThrottle | None = None) -> BlockCopier:
    """A copier between the device pool ``[num_blocks, ...]`` and a host pool that it allocates.

    Args:
        throttle: holds copies to the bandwidth of a bus.
    Raises: RuntimeError or MemoryError if the host pool cannot be allocated.
    """
    pools = create_pool_pair(kv_pool, num_host_blocks)
    if throttle is not None:
        pools = ThrottledPools(pools, throttle, kv_pool[:1].nbytes // pools.block_size)
    return ThreadBlockCopier(pools)


class ThreadBlockCopier:
    """See ``BlockCopier``. A thread copies, one group after another.

    So a copy may read what an earlier one wrote. The thread ends with the copier or with the process,
    whichever ends first.
    """

    def __init__(self, pools: PoolPair) -> None:
        self._pools = pools
        # The thread refers to this and not to the copier, so that an unused copier can be collected.
        self._queue = _CopyQueue()
        thread = threading.Thread(target=_copy_all, args=(self._queue, pools), name="kv-copies", daemon=True)
        # Also at exit: a thread that returns from C++ after the interpreter's end crashes the process.
        self._finalizer = weakref.finalize(self, _end, self._queue, thread)
        thread.start()

    def begin(self, copies: BlockCopies) -> None:
        pools = self._pools
        try:
            groups = list(copy_groups(copies, pools.max_group_slots, pools.block_size))
            self._queue.put(groups, pools.queued() if groups else None)
        except Exception as error:  # the control plane counts these copies as in flight
            self._queue.fail(error)
            raise
        awaited = [index for index, group in enumerate(groups) if not group.is_reported]
        if awaited:
            self._queue.wait_until_left(len(groups) - 1 - awaited[-1])

    def take_completed(self) -> CompletedCopies:
        return self._queue.take_completed()

    def wait(self, timeout_s: float) -> None:
        self._queue.wait_for_completed(timeout_s)

    def close(self) -> None:
        self._finalizer()
        self._pools.close()


class _QueuedGroup(NamedTuple):
    """A group of copies, and what the device has to do before them."""

    group: CopyGroup
    after: torch.cuda.Event | None


class _CopyQueue:
    """Queued and completed copies of the copy thread.

    A step without new or completed copies takes no lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued: deque[_QueuedGroup] = deque()  # the first one is being copied
        self._blocks: list[BlockCopy] = []  # completed
        self._slots: list[SlotCopy] = []  # completed
        self._error: Exception | None = None
        self._is_closed = False

    def put(self, groups: Sequence[CopyGroup], after: torch.cuda.Event | None) -> None:
        self._raise_if_failed()
        if not groups:
            return
        with self._changed:
            self._queued.extend(_QueuedGroup(group, after) for group in groups)
            self._changed.notify_all()

    def first(self) -> _QueuedGroup | None:
        """Block until there is something to copy. None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._is_closed)
            return None if self._is_closed else self._queued[0]

    def complete_first(self) -> None:
        with self._changed:
            group, _ = self._queued.popleft()
            if group.is_reported:
                self._blocks += group.blocks
                self._slots += group.slots
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take_completed(self) -> CompletedCopies:
        self._raise_if_failed()
        if not (self._blocks or self._slots):
            return CompletedCopies()
        with self._changed:
            completed = CompletedCopies(tuple(self._blocks), tuple(self._slots))
            self._blocks, self._slots = [], []
            return completed

    def wait_until_left(self, num_groups: int) -> None:
        """Block until at most ``num_groups`` groups are left."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queued) <= num_groups or self._error)
            self._raise_if_failed()

    def wait_for_completed(self, timeout_s: float) -> None:
        """Block until a completed copy can be taken, or no copy is in flight."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            self._raise_if_failed()

    def _has_news(self) -> bool:
        return bool(self._blocks or self._slots or not self._queued or self._error)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError("a copy between device and host memory failed") from self._error


def _copy_all(queue: _CopyQueue, pools: PoolPair) -> None:
    """The copy thread: copies queued groups until the queue is closed or a copy fails."""
    try:
        while (queued := queue.first()) is not None:
            pools.copy(queued.group, queued.after)
            queue.complete_first()
    except Exception as error:
        queue.fail(error)


def _end(queue: _CopyQueue, thread: threading.Thread) -> None:
    queue.close()
    if thread is not threading.current_thread():  # the copy thread may be the one that collects the copier
        thread.join()
