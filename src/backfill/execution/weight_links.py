"""Links over which the weights of offloaded layers reach device memory, beside the steps."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future

import torch
from torch import Tensor

from backfill.execution.background_thread import BackgroundThread
from backfill.execution.host_memory import pin, unpin
from backfill.execution.layer_buffers import Fetch
from backfill.execution.micro_batches import MicroBatchStreams

_NUM_TIMES = 4096  # of the last transfers, that are kept


class WeightLink(ABC):
    """Fills buffers with the weights of layers, one transfer after another.

    After a wait for a transfer that failed, every wait raises.

    Attributes:
        num_bytes: of all transfers that were waited for.
        stall_s: time for which layers waited.
        times_s: of each of the last transfers, the newest last; without what it waited for.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.num_bytes = 0
        self.stall_s = 0.0
        self.times_s: deque[float] = deque(maxlen=_NUM_TIMES)
        self._buffers = buffers

    @abstractmethod
    def begin(self, fetch: Fetch) -> None:
        """Queue a transfer. What was computed with the buffer until now comes first."""

    @abstractmethod
    def wait(self, buffer: int) -> None:
        """What is computed from now on finds the buffer's last transfer complete."""

    @abstractmethod
    def drop(self, buffer: int) -> None:
        """Forget the buffer's last transfer. Nothing writes to the buffer when this returns."""

    @abstractmethod
    def collect(self) -> None:
        """Bring the totals up to date, after the device has computed a step."""

    @abstractmethod
    def close(self) -> None:
        """Stop transferring. No other call may follow."""


class ThreadLink(WeightLink):
    """See ``WeightLink``. A thread reads layers into buffers in RAM.

    Args:
        read: fills a buffer with a layer; called on the thread.
        close: called after the last read.
    """

    def __init__(
        self, buffers: Sequence[Tensor], read: Callable[[int, Tensor], None], close: Callable[[], None]
    ) -> None:
        super().__init__(buffers)
        self._read = read
        self._thread = BackgroundThread("weights", close)
        # Of each buffer the last, if it was not waited for, behind those that could not be cancelled.
        self._transfers: dict[int, list[Future[None]]] = {}
        self._error: BaseException | None = None

    def begin(self, fetch: Fetch) -> None:
        buffer = self._buffers[fetch.buffer]
        transfer = self._thread.submit(_timed_read, self._read, fetch.layer, buffer, self.times_s)
        running = [each for each in self._transfers.get(fetch.buffer, ()) if not each.cancel()]
        self._transfers[fetch.buffer] = [*running, transfer]

    def wait(self, buffer: int) -> None:
        if buffer in self._transfers and self._error is None:
            transfer = self._transfers.pop(buffer)[-1]
            if not transfer.done():
                began_s = time.perf_counter()
                futures.wait([transfer])
                self.stall_s += time.perf_counter() - began_s
            self.num_bytes += self._buffers[buffer].nbytes
            self._error = transfer.exception()
        if self._error is not None:
            raise RuntimeError("the weights of an offloaded layer could not be read") from self._error

    def drop(self, buffer: int) -> None:
        futures.wait([each for each in self._transfers.pop(buffer, ()) if not each.cancel()])

    def collect(self) -> None:
        pass

    def close(self) -> None:
        self._thread.close()


def _timed_read(
    read: Callable[[int, Tensor], None], layer: int, buffer: Tensor, times_s: deque[float]
) -> None:
    began_s = time.perf_counter()
    read(layer, buffer)
    times_s.append(time.perf_counter() - began_s)


class CudaLink(WeightLink):
    """See ``WeightLink``. Layers are copied from pinned memory on a CUDA stream of their own.

    Args:
        host_layers: uint8 ``[num_layers, layer bytes]``, pinned here until the link ends.
        streams: those on which layers are computed.
    """

    def __init__(self, buffers: Sequence[Tensor], host_layers: Tensor, streams: MicroBatchStreams) -> None:
        super().__init__(buffers)
        pin(host_layers)
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
