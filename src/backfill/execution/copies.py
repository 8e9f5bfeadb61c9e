"""Copies KV blocks between the device pool and the host pool, beside the steps."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from backfill.core.block import BlockCopy
from backfill.core.plan import CopyDirections

# Bytes in one group of copies: under a millisecond, and long beside the hand-over to the thread (11.0 GB/s
# at 4 MiB, 12.1 at 16 MiB, 12.1 for the copy alone).
_CHUNK_BYTES = 8 << 20
# Copies under one CUDA event: one event for each block costs more time than it saves.
_BLOCKS_PER_EVENT = 16
_POLL_S = 50e-6


class BlockCopier(Protocol):
    """Copies blocks in the order in which the copies begin, beside the steps.

    After a copy failed, or could not begin, every call raises: the contents of the pools are unknown then.
    """

    def begin(
        self, checkpoint: Sequence[BlockCopy], restore: Sequence[BlockCopy], blocking_copies: CopyDirections
    ) -> None:
        """Begin the copies to the host, and after them those to the device.

        Returns when the blocking copies are complete; ``take_completed`` does not report these.
        """

    def take_completed(self) -> tuple[BlockCopy, ...]:
        """Copies that have completed since the last call. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Block until ``take_completed`` has something to return, or no copy is in flight."""

    def close(self) -> None:
        """Stop copying; queued copies are dropped. No other call may follow."""


def create_copier(kv_pool: Tensor, num_host_blocks: int) -> BlockCopier:
    """A copier between the device pool ``[num_blocks, ...]`` and a host pool that it allocates.

    Raises: RuntimeError or MemoryError if the host pool cannot be allocated.
    """
    # Not initialized: on a CPU, the system then allocates memory only for blocks that are used.
    host_pool = torch.empty((num_host_blocks, *kv_pool.shape[1:]), dtype=kv_pool.dtype)
    return CudaBlockCopier(kv_pool, host_pool) if kv_pool.is_cuda else ThreadBlockCopier(kv_pool, host_pool)


class _CopyGroup(NamedTuple):
    """Copies of one direction that complete together."""

    kind: CopyDirections
    copies: tuple[BlockCopy, ...]
    is_reported: bool


def _copy_groups(
    checkpoint: Sequence[BlockCopy], restore: Sequence[BlockCopy], blocking_copies: CopyDirections, size: int
) -> Iterator[_CopyGroup]:
    for kind, copies in ((CopyDirections.CHECKPOINT, checkpoint), (CopyDirections.RESTORE, restore)):
        for first in range(0, len(copies), size):
            yield _CopyGroup(kind, tuple(copies[first : first + size]), kind not in blocking_copies)


class ThreadBlockCopier:
    """See ``BlockCopier``. Both pools are in host memory; a thread copies.

    The thread ends with the copier or with the process, whichever ends first.
    """

    def __init__(self, kv_pool: Tensor, host_pool: Tensor) -> None:
        self._blocks_per_group = max(1, _CHUNK_BYTES // kv_pool[:1].nbytes)
        # The thread refers to this and not to the copier, so that an unused copier can be collected.
        self._queue = _CopyQueue()
        thread = threading.Thread(
            target=_copy_all, args=(self._queue, kv_pool, host_pool), name="kv-copies", daemon=True
        )
        # Also at exit: a thread that returns from C++ after the interpreter's end crashes the process.
        self._finalizer = weakref.finalize(self, _end, self._queue, thread)
        thread.start()

    def begin(
        self, checkpoint: Sequence[BlockCopy], restore: Sequence[BlockCopy], blocking_copies: CopyDirections
    ) -> None:
        try:
            groups = list(_copy_groups(checkpoint, restore, blocking_copies, self._blocks_per_group))
            self._queue.put(groups)
        except Exception as error:  # the control plane counts these copies as in flight
            self._queue.fail(error)
            raise
        awaited = [index for index, group in enumerate(groups) if not group.is_reported]
        if awaited:
            self._queue.wait_until_left(len(groups) - 1 - awaited[-1])

    def take_completed(self) -> tuple[BlockCopy, ...]:
        return self._queue.take_completed()

    def wait(self, timeout_s: float) -> None:
        self._queue.wait_for_completed(timeout_s)

    def close(self) -> None:
        self._finalizer()


class _CopyQueue:
    """Queued and completed copies of the copy thread.

    A step without new or completed copies takes no lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: deque[_CopyGroup] = deque()  # the first one is being copied
        self._completed: list[BlockCopy] = []
        self._error: Exception | None = None
        self._is_closed = False

    def put(self, groups: Sequence[_CopyGroup]) -> None:
        self._raise_if_failed()
        if not groups:
            return
        with self._changed:
            self._groups.extend(groups)
            self._changed.notify_all()

    def first(self) -> _CopyGroup | None:
        """Block until there is something to copy. None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._groups or self._is_closed)
            return None if self._is_closed else self._groups[0]

    def complete_first(self) -> None:
        with self._changed:
            group = self._groups.popleft()
            if group.is_reported:
                self._completed += group.copies
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take_completed(self) -> tuple[BlockCopy, ...]:
        self._raise_if_failed()
        if not self._completed:
            return ()
        with self._changed:
            completed, self._completed = tuple(self._completed), []
            return completed

    def wait_until_left(self, num_groups: int) -> None:
        """Block until at most ``num_groups`` groups are left."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._groups) <= num_groups or self._error)
            self._raise_if_failed()

    def wait_for_completed(self, timeout_s: float) -> None:
        """Block until a completed copy can be taken, or no copy is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self._completed or not self._groups or self._error, timeout_s)
            self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError("a copy between device and host memory failed") from self._error


def _copy_all(queue: _CopyQueue, kv_pool: Tensor, host_pool: Tensor) -> None:
    """The copy thread: copies queued groups until the queue is closed or a copy fails."""
    from backfill.kernels import cpu

    try:
        while (group := queue.first()) is not None:
            devices, hosts = [copy.device for copy in group.copies], [copy.host for copy in group.copies]
            if group.kind is CopyDirections.CHECKPOINT:
                cpu.copy_blocks(host_pool, hosts, kv_pool, devices)
            else:
                cpu.copy_blocks(kv_pool, devices, host_pool, hosts)
            queue.complete_first()
    except Exception as error:
        queue.fail(error)


def _end(queue: _CopyQueue, thread: threading.Thread) -> None:
    queue.close()
    if thread is not threading.current_thread():  # the copy thread may be the one that collects the copier
        thread.join()


class CudaBlockCopier:
    """See ``BlockCopier``. Copies run on a CUDA stream of their own, beside the steps.

    Both directions share the stream: a plan's restores may read what its checkpoints write. The host pool is
    pinned until the copier ends.
    """

    def __init__(self, kv_pool: Tensor, host_pool: Tensor) -> None:
        pin(host_pool)
        self._kv_pool = kv_pool
        self._host_pool = host_pool
        self._stream = torch.cuda.Stream(kv_pool.device)  # type: ignore[no-untyped-call]
        self._finalizer = weakref.finalize(self, unpin, host_pool, self._stream)
        # The system unpins at the process's end, and CUDA may have ended before.
        self._finalizer.atexit = False
        self._in_flight: deque[tuple[torch.cuda.Event, _CopyGroup]] = deque()
        self._error: Exception | None = None

    def begin(
        self, checkpoint: Sequence[BlockCopy], restore: Sequence[BlockCopy], blocking_copies: CopyDirections
    ) -> None:
        self._raise_if_failed()
        awaited: torch.cuda.Event | None = None
        try:
            if checkpoint or restore:
                # Steps already queued write blocks that are read here, and read blocks that are written here.
                self._stream.wait_stream(torch.cuda.current_stream(self._kv_pool.device))
            for group in _copy_groups(checkpoint, restore, blocking_copies, _BLOCKS_PER_EVENT):
                event = self._queue(group)
                if group.is_reported:
                    self._in_flight.append((event, group))
                else:
                    awaited = event
            if awaited is not None:
                awaited.synchronize()
        except Exception as error:
            self._error = error
            raise

    def take_completed(self) -> tuple[BlockCopy, ...]:
        self._raise_if_failed()
        completed: list[BlockCopy] = []
        while self._in_flight and _is_complete(self._in_flight[0][0]):
            completed += self._in_flight.popleft()[1].copies
        return tuple(completed)

    def wait(self, timeout_s: float) -> None:
        self._raise_if_failed()
        until_s = time.monotonic() + timeout_s
        # CUDA has no wait with a timeout.
        while self._in_flight and not _is_complete(self._in_flight[0][0]) and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._finalizer()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError("a copy between device and host memory failed") from self._error

    def _queue(self, group: _CopyGroup) -> torch.cuda.Event:
        device_pool, host_pool = self._kv_pool, self._host_pool
        with torch.cuda.stream(self._stream):
            for device, host in group.copies:
                if group.kind is CopyDirections.CHECKPOINT:
                    host_pool[host].copy_(device_pool[device], non_blocking=True)
                else:
                    device_pool[device].copy_(host_pool[host], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event


def _is_complete(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def pin(host_pool: Tensor) -> None:
    """Pin allocated memory: torch's own pinned allocator rounds up to a power of two."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = int(cudart.cudaHostRegister(host_pool.data_ptr(), host_pool.nbytes, 0))
    if result != 0:
        raise RuntimeError(f"{host_pool.nbytes} bytes could not be pinned: CUDA error {result}")


def unpin(host_pool: Tensor, stream: torch.cuda.Stream) -> None:
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host_pool.data_ptr())  # type: ignore[no-untyped-call]
