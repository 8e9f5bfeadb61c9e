"""Hidden states from one stage to the next: through shared memory, or over TCP between nodes.

A message is a header and rows. ``torch_group.py`` has the link between CUDA devices.
"""

from __future__ import annotations

import math
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from backfill.execution.collectives import Handover, PeerFailed, Stop
from backfill.models.decoder import HiddenState
from backfill.parallel.shared_memory_group import CLOSED, Signals
from backfill.parallel.shared_state import RankProgress
from backfill.parallel.sockets import fill_from, receive_exactly

NUM_MESSAGES = 2  # queued at most: the stage before may be a step ahead while it computes another
NUM_VALUES = 6  # of a header
_HEADER = struct.Struct(f"<{NUM_VALUES}d")
_SENDER, _RECEIVER = 0, 1
_HEADER_BYTES = 64


class RowShape(NamedTuple):
    """Of the hidden states: ``num_rows`` at most, each of ``hidden_size`` values."""

    num_rows: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of residual and delta, in whole cache lines."""
        return -(-2 * self.num_rows * self.hidden_size * self.dtype.itemsize // 64) * 64

    def rows_of(self, handover: Handover | None) -> list[Tensor]:
        """Residual and perhaps delta; nothing without rows. Raises: ValueError if there are too many."""
        state = None if handover is None else handover.state
        if state is None or len(state.residual) == 0:
            return []
        if len(state.residual) > self.num_rows:
            raise ValueError(
                f"a step has {len(state.residual)} tokens, and at most {self.num_rows} fit the link"
            )
        return [state.residual] if state.delta is None else [state.residual, state.delta]


def pack_header(number: int, handover: Handover | None, rows: Sequence[Tensor]) -> tuple[float, ...]:
    """``NUM_VALUES`` float64 values: all but the rows, how many tensors they are, and the rows of each."""
    last_layer, stop, _ = handover or (math.nan, None, None)
    layers_done, stopped_at_s = stop or (math.nan, math.nan)
    return number, last_layer, layers_done, stopped_at_s, len(rows), len(rows[0]) if rows else 0


def unpack_header(values: Iterable[float]) -> tuple[int, Handover | None, int, int]:
    """What ``pack_header`` was given, without the rows; how many tensors follow, and the rows of each.

    Raises: PeerFailed if no stage has sent these values.
    """
    values = tuple(values)
    if any(map(math.isinf, values)) or any(map(math.isnan, (values[0], *values[-2:]))):
        raise PeerFailed(f"the previous stage has sent no header of a message: {values}")
    number, last_layer, layers_done, stopped_at_s, num_tensors, num_rows = values
    stop = None if math.isnan(layers_done) else Stop(int(layers_done), stopped_at_s)
    handover = None if math.isnan(last_layer) else Handover(int(last_layer), stop)
    return int(number), handover, int(num_tensors), int(num_rows)


def with_rows(handover: Handover | None, rows: Sequence[Tensor]) -> Handover | None:
    """The handover that ``RowShape.rows_of`` has returned the rows of."""
    if handover is None or not rows:
        return handover
    return handover._replace(state=HiddenState(rows[0], rows[1] if len(rows) > 1 else None))


class SharedMemoryLink:
    """See ``StageLink``. A ring of ``NUM_MESSAGES`` messages; each end creates one of these.

    Args:
        memory: ``num_bytes`` of zeros that both ends have mapped.
        progress: of the rank at this end.
    """

    def __init__(self, memory: memoryview, shape: RowShape, progress: RankProgress, *, sends: bool) -> None:
        self._shape = shape
        self._signals = Signals(memory, _SENDER if sends else _RECEIVER, 2, 0, progress)
        start = Signals.num_bytes(2, 0)
        end_of_headers = start + _HEADER_BYTES * NUM_MESSAGES
        self._headers = memory[start:end_of_headers].cast("d")
        rows = (2, shape.num_rows, shape.hidden_size)  # residual and delta
        self._data = [
            torch.frombuffer(memory, dtype=shape.dtype, offset=offset, count=math.prod(rows)).view(rows)
            for offset in range(end_of_headers, self.num_bytes(shape), shape.num_bytes)
        ]
        self._count = 0  # of messages sent or received

    @staticmethod
    def num_bytes(shape: RowShape) -> int:
        return Signals.num_bytes(2, 0) + NUM_MESSAGES * (_HEADER_BYTES + shape.num_bytes)

    def send(self, number: int, handover: Handover | None) -> None:
        rows = self._shape.rows_of(handover)
        self._wait_for(_RECEIVER, self._count + 1 - NUM_MESSAGES)
        slot = self._count % NUM_MESSAGES
        for index, value in enumerate(pack_header(number, handover, rows), 8 * slot):
            self._headers[index] = value
        for tensor, target in zip(rows, self._data[slot], strict=False):
            target[: len(tensor)].copy_(tensor)
        self._count += 1
        self._signals.raise_to(self._count)

    def receive(self) -> tuple[int, Handover | None]:
        self._wait_for(_SENDER, self._count + 1)
        slot = self._count % NUM_MESSAGES
        values = self._headers[8 * slot : 8 * slot + NUM_VALUES]
        number, handover, num_tensors, num_rows = unpack_header(values)
        rows = [each.clone() for each in self._data[slot][:num_tensors, :num_rows]]
        self._count += 1
        self._signals.raise_to(self._count)
        return number, with_rows(handover, rows)

    def close(self) -> None:
        self._signals.close()

    def _wait_for(self, end: int, count: int) -> None:
        self._signals.wait_for(end, count)
        if self._signals.count(end) >= CLOSED:
            raise PeerFailed(f"the {'next' if end == _RECEIVER else 'previous'} stage has ended")


class SocketLink:
    """See ``StageLink``. Each end has one of these.

    The sender gives the kernel what it takes at once, and a thread the rest: the stage goes on while the next
    one still computes and does not read.

    Args:
        connection: belongs to the link from now on.
        progress: of the rank at this end.
        clock_ahead_s: the driver's monotonic clock less this node's. Times travel on the driver's.
    """

    def __init__(
        self, connection: socket.socket, shape: RowShape, progress: RankProgress, clock_ahead_s: float
    ) -> None:
        self._connection = connection
        self._shape = shape
        self._progress = progress
        self._clock_ahead_s = clock_ahead_s
        self._sender = ThreadPoolExecutor(1, "stage-link")
        self._unsent: deque[Future[None]] = deque()

    def send(self, number: int, handover: Handover | None) -> None:
        data, unsent = memoryview(self._packed(number, handover)), self._unsent
        try:
            with self._progress.exchanging():
                while unsent and (unsent[0].done() or len(unsent) >= NUM_MESSAGES):
                    unsent.popleft().result()
            if not unsent:
                with suppress(BlockingIOError):
                    data = data[self._connection.send(data, socket.MSG_DONTWAIT) :]
            if data:
                unsent.append(self._sender.submit(self._connection.sendall, data))
        except OSError as error:
            raise PeerFailed(f"the next stage cannot be reached: {error}") from error

    def receive(self) -> tuple[int, Handover | None]:
        try:
            with self._progress.exchanging():
                data = receive_exactly(self._connection, _HEADER.size)
                number, handover, num_tensors, num_rows = unpack_header(_HEADER.unpack(data))
                if not (0 <= num_tensors <= 2 and 0 <= num_rows <= self._shape.num_rows):
                    raise PeerFailed(
                        f"the previous stage has sent {num_tensors} times {num_rows} rows, and at most "
                        f"2 times {self._shape.num_rows} fit the link"
                    )
                rows = [self._received_rows(num_rows) for _ in range(num_tensors)]
        except OSError as error:
            raise PeerFailed(f"the previous stage cannot be reached: {error}") from error
        return number, with_rows(_later(handover, -self._clock_ahead_s), rows)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that sends or receives
        self._sender.shutdown()
        self._connection.close()

    def _packed(self, number: int, handover: Handover | None) -> bytearray:
        rows = self._shape.rows_of(handover)
        data = bytearray(_HEADER.pack(*pack_header(number, _later(handover, self._clock_ahead_s), rows)))
        for tensor in rows:
            data += _bytes_of(tensor.contiguous())
        return data

    def _received_rows(self, num_rows: int) -> Tensor:
        rows = torch.empty(num_rows, self._shape.hidden_size, dtype=self._shape.dtype)
        fill_from(self._connection, _bytes_of(rows))
        return rows


def _later(handover: Handover | None, by_s: float) -> Handover | None:
    """On a clock that is ahead by so much."""
    if handover is None or handover.stop is None:
        return handover
    return handover._replace(stop=handover.stop._replace(at_s=handover.stop.at_s + by_s))


def _bytes_of(rows: Tensor) -> memoryview:
    return memoryview(rows.view(torch.uint8).numpy().reshape(-1).data)
