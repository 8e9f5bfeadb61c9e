"""Links over which the weights of offloaded layers reach device memory, beside the steps."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from backfill.execution.layer_buffers import Fetch
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.pinned_memory import pin, unpin


class WeightLink(Protocol):
    """Fills buffers with the weights of layers, one transfer after another.

    After a transfer failed, every wait raises.

    Attributes:
        num_bytes: of all transfers that were waited for.
        stall_s: time for which layers waited.
    """

    num_bytes: int
    stall_s: float

    def begin(self, fetch: Fetch) -> None:
        """Queue a transfer. What was computed with the buffer until now comes first."""

    def wait(self, buffer: int) -> None:
        """What is computed from now on finds the buffer's last transfer complete."""

    def collect(self) -> None:
        """Bring the totals up to date, after the device has computed a step."""

    def close(self) -> None:
        """Stop transferring. No other call may follow."""


class ThreadLink:
    """See ``WeightLink``. A thread reads layers into buffers in RAM.

    The thread ends with the link or with the process, whichever ends first.

    Args:
        read: fills a buffer with a layer; called on the thread.
        close: called after the last read.
    """

    def __init__(
        self, buffers: Sequence[Tensor], read: Callable[[int, Tensor], None], close: Callable[[], None]
    ) -> None:
        self.num_bytes = 0
        self.stall_s = 0.0
        self._layer_bytes = buffers[0].nbytes
        self._unused: set[int] = set()  # buffers whose last transfer was not waited for
        # The thread refers to this and not to the link, so that an unused link can be collected.
        self._queue = _FetchQueue()
        thread = threading.Thread(
            target=_read_all, args=(self._queue, buffers, read), name="weights", daemon=True
        )
        # Also at exit: torch must not be used by a thread after the interpreter's end.
        self._finalizer = weakref.finalize(self, _end, self._queue, thread, close)
        thread.start()

    def begin(self, fetch: Fetch) -> None:
        self._unused.add(fetch.buffer)
        self._queue.put(fetch)

    def wait(self, buffer: int) -> None:
        self._queue.raise_if_failed()
        if buffer not in self._unused:
            return
        if not self._queue.is_complete(buffer):
            began_s = time.perf_counter()
            self._queue.wait(buffer)
            self.stall_s += time.perf_counter() - began_s
        self._unused.remove(buffer)
        self.num_bytes += self._layer_bytes

    def collect(self) -> None:
        pass

    def close(self) -> None:
        self._finalizer()


class _FetchQueue:
    """Queued transfers of the thread; a buffer's later transfer replaces an earlier one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued: deque[Fetch] = deque()
        self._wanted: dict[int, Fetch] = {}  # the last transfer of each buffer, until it is complete
        self._error: Exception | None = None
        self._is_closed = False

    def put(self, fetch: Fetch) -> None:
        with self._changed:
            self._queued = deque(each for each in self._queued if each.buffer != fetch.buffer)
            self._queued.append(fetch)
            self._wanted[fetch.buffer] = fetch
            self._changed.notify_all()

    def next(self) -> Fetch | None:
        """Block until there is a transfer to make. None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._is_closed)
            return None if self._is_closed else self._queued.popleft()

    def complete(self, fetch: Fetch) -> None:
        with self._changed:
            if self._wanted.get(fetch.buffer) is fetch:
                del self._wanted[fetch.buffer]
                self._changed.notify_all()

    def is_complete(self, buffer: int) -> bool:
        return buffer not in self._wanted

    def wait(self, buffer: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: buffer not in self._wanted or self._error)
        self.raise_if_failed()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError("the weights of an offloaded layer could not be read") from self._error


def _read_all(queue: _FetchQueue, buffers: Sequence[Tensor], read: Callable[[int, Tensor], None]) -> None:
    """The thread: makes queued transfers until the queue is closed or one fails."""
    try:
        while (fetch := queue.next()) is not None:
            read(fetch.layer, buffers[fetch.buffer])
            queue.complete(fetch)
    except Exception as error:
        queue.fail(error)


def _end(queue: _FetchQueue, thread: threading.Thread, close: Callable[[], None]) -> None:
    queue.close()
    if thread is not threading.current_thread():  # which may be the one that collects the link
        thread.join()
    close()


class CudaLink:
    """See ``WeightLink``. Layers are copied from pinned memory on a CUDA stream of their own.

    Args:
        host_layers: uint8 ``[num_layers, layer bytes]``, pinned here until the link ends.
        streams: those on which layers are computed.
    """

    def __init__(self, buffers: Sequence[Tensor], host_layers: Tensor, streams: MicroBatchStreams) -> None:
        self.num_bytes = 0
        self.stall_s = 0.0
        pin(host_layers)
        self._buffers = buffers
        self._host_layers = host_layers
        self._streams = streams
        self._device = buffers[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._finalizer = weakref.finalize(self, unpin, host_layers, self._stream)
        # The system unpins at the process's end, and CUDA may have ended before.
        self._finalizer.atexit = False
        self._copied: dict[int, torch.cuda.Event] = {}  # last copies that were not waited for
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, fetch: Fetch) -> None:
        self._streams.precede(self._stream)
        with torch.cuda.stream(self._stream):
            self._buffers[fetch.buffer].copy_(self._host_layers[fetch.layer], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copied[fetch.buffer] = event

    def wait(self, buffer: int) -> None:
        event = self._copied.pop(buffer, None)
        if event is None:
            return
        # Whether a layer waits is known only when the stream gets there: the host runs ahead of it.
        reached = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        passed = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        reached.record(current)
        self._streams.wait_for(event)
        passed.record(current)
        self._stalls.append((reached, passed))
        self.num_bytes += self._buffers[buffer].nbytes

    def collect(self) -> None:
        waiting = []
        for reached, passed in self._stalls:
            if passed.query():  # type: ignore[no-untyped-call]
                self.stall_s += reached.elapsed_time(passed) / 1000.0
            else:
                waiting.append((reached, passed))
        self._stalls = waiting

    def close(self) -> None:
        self._finalizer()
