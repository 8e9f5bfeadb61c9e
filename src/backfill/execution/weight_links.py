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

from backfill.execution.host_memory import pin, unpin
from backfill.execution.layer_buffers import Fetch
from backfill.execution.micro_batches import MicroBatchStreams

_NUM_TIMES = 4096  # of the last transfers, that are kept


class WeightLink(Protocol):
    """Fills buffers with the weights of layers, one transfer after another.

    After a transfer failed, every wait raises.

    Attributes:
        num_bytes: of all transfers that were waited for.
        stall_s: time for which layers waited.
        times_s: of each of the last transfers, the newest last; without what it waited for.
    """

    num_bytes: int
    stall_s: float
    times_s: deque[float]

    def begin(self, fetch: Fetch) -> None:
        """Queue a transfer. What was computed with the buffer until now comes first."""

    def wait(self, buffer: int) -> None:
        """What is computed from now on finds the buffer's last transfer complete."""

    def drop(self, buffer: int) -> None:
        """Forget the buffer's last transfer. Nothing writes to the buffer when this returns."""

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
        self.times_s: deque[float] = deque(maxlen=_NUM_TIMES)
        self._layer_bytes = buffers[0].nbytes
        self._unused: set[int] = set()  # buffers whose last transfer was not waited for
        # The thread refers to this and not to the link, so that an unused link can be collected.
        self._queue = _FetchQueue()
        thread = threading.Thread(
            target=_read_all, args=(self._queue, buffers, read, self.times_s), name="weights", daemon=True
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

    def drop(self, buffer: int) -> None:
        self._unused.discard(buffer)
        self._queue.drop(buffer)

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
        self._reading: int | None = None  # buffer of the transfer that is being made
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
            if self._is_closed:
                return None
            fetch = self._queued.popleft()
            self._reading = fetch.buffer
            return fetch

    def complete(self, fetch: Fetch) -> None:
        with self._changed:
            self._reading = None
            if self._wanted.get(fetch.buffer) is fetch:
                del self._wanted[fetch.buffer]
            self._changed.notify_all()

    def is_complete(self, buffer: int) -> bool:
        return buffer not in self._wanted

    def wait(self, buffer: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: buffer not in self._wanted or self._error)
        self.raise_if_failed()

    def drop(self, buffer: int) -> None:
        """Take a buffer's transfer out of the queue, or wait until it is complete or has failed."""
        with self._changed:
            if any(each.buffer == buffer for each in self._queued):
                self._queued = deque(each for each in self._queued if each.buffer != buffer)
                self._wanted.pop(buffer, None)
            self._changed.wait_for(lambda: self._reading != buffer or self._error)

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


def _read_all(
    queue: _FetchQueue,
    buffers: Sequence[Tensor],
    read: Callable[[int, Tensor], None],
    times_s: deque[float],
) -> None:
    """The thread: makes queued transfers until the queue is closed or one fails."""
    try:
        while (fetch := queue.next()) is not None:
            began_s = time.perf_counter()
            read(fetch.layer, buffers[fetch.buffer])
            times_s.append(time.perf_counter() - began_s)
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
        self.times_s: deque[float] = deque(maxlen=_NUM_TIMES)
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
        self._transfers: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, fetch: Fetch) -> None:
        self._streams.precede(self._stream)
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            began.record(self._stream)
            self._buffers[fetch.buffer].copy_(self._host_layers[fetch.layer], non_blocking=True)
            event.record(self._stream)
        self._transfers.append((began, event))
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

    def drop(self, buffer: int) -> None:
        event = self._copied.pop(buffer, None)
        if event is not None:
            event.synchronize()

    def collect(self) -> None:
        passed_s, self._stalls = _elapsed_s(self._stalls)
        self.stall_s += sum(passed_s)
        transfers_s, self._transfers = _elapsed_s(self._transfers)
        self.times_s.extend(transfers_s)

    def close(self) -> None:
        self._finalizer()


_Events = tuple[torch.cuda.Event, torch.cuda.Event]


def _elapsed_s(pairs: Sequence[_Events]) -> tuple[list[float], list[_Events]]:
    """Seconds between the events of each pair that has passed, and the other pairs."""
    elapsed_s, waiting = [], []
    for begin, end in pairs:
        if end.query():  # type: ignore[no-untyped-call]
            elapsed_s.append(begin.elapsed_time(end) / 1000.0)
        else:
            waiting.append((begin, end))
    return elapsed_s, waiting
