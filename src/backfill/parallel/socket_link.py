"""Hidden states from one stage to the next over TCP, for stages on different nodes."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from backfill.execution.collectives import PeerFailed, StageHeader
from backfill.models.decoder import HiddenState
from backfill.parallel.sockets import receive_exactly
from backfill.parallel.stage_message import NUM_MESSAGES, NUM_VALUES, RowShape, pack_header, unpack_header

_HEADER = struct.Struct(f"<{NUM_VALUES}d")


class SocketLink:
    """See ``StageLink``. Each end has one of these.

    The sender gives the kernel what it takes at once, and a thread the rest: the stage goes on while the next
    one still computes and does not read.

    Args:
        connection: belongs to the link from now on.
        clock_ahead_s: the driver's monotonic clock less this node's. Times travel on the driver's.
    """

    def __init__(
        self, connection: socket.socket, shape: RowShape, clock_ahead_s: float, *, sends: bool
    ) -> None:
        self._connection = connection
        self._shape = shape
        self._clock_ahead_s = clock_ahead_s
        self._unsent: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._error: str | None = None
        self._sender = threading.Thread(target=self._send_rest, name="stage-link", daemon=True)
        if sends:
            self._sender.start()

    def send(self, header: StageHeader, state: HiddenState | None) -> None:
        data = memoryview(self._packed(header, state))
        with self._changed:
            while len(self._unsent) >= NUM_MESSAGES and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise PeerFailed(self._error)
            if not self._unsent:
                data = data[self._send_now(data) :]
            if data:
                self._unsent.append(data)
                self._changed.notify_all()

    def receive(self) -> tuple[StageHeader, HiddenState | None]:
        data = bytearray(_HEADER.size)
        try:
            receive_exactly(self._connection, memoryview(data))
            header, num_tensors, num_rows = unpack_header(_HEADER.unpack(data))
            assert num_rows <= self._shape.num_rows, f"{num_rows} rows, at most {self._shape.num_rows} fit"
            rows = [self._received_rows(num_rows) for _ in range(num_tensors)]
        except OSError as error:
            raise PeerFailed(f"the previous stage cannot be reached: {error}") from error
        header = header._replace(stopped_at_s=header.stopped_at_s - self._clock_ahead_s)
        return header, HiddenState(rows[0], rows[1] if num_tensors > 1 else None) if rows else None

    def close(self) -> None:
        with self._changed:
            self._fail("the link was closed")
        if self._sender.is_alive():
            self._sender.join()
        self._connection.close()

    def _packed(self, header: StageHeader, state: HiddenState | None) -> bytearray:
        rows = self._shape.rows_of(state)
        header = header._replace(stopped_at_s=header.stopped_at_s + self._clock_ahead_s)
        data = bytearray(_HEADER.pack(*pack_header(header, rows)))
        for tensor in rows:
            data += _bytes_of(tensor.contiguous())
        return data

    def _received_rows(self, num_rows: int) -> Tensor:
        rows = torch.empty(num_rows, self._shape.hidden_size, dtype=self._shape.dtype)
        receive_exactly(self._connection, _bytes_of(rows))
        return rows

    def _send_now(self, data: memoryview) -> int:
        """Bytes that were sent without waiting."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._fail(f"the next stage cannot be reached: {error}")
            raise PeerFailed(self._error) from error

    def _send_rest(self) -> None:
        while True:
            with self._changed:
                while not self._unsent and self._error is None:
                    self._changed.wait()
                if self._error is not None:
                    return
                data = self._unsent[0]
            try:
                self._connection.sendall(data)
            except OSError as error:
                with self._changed:
                    self._fail(f"the next stage cannot be reached: {error}")
                return
            with self._changed:
                self._unsent.popleft()
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        """End the connection; everyone who waits learns why."""
        if self._error is None:
            self._error = reason
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that sends or receives
        self._changed.notify_all()


def _bytes_of(rows: Tensor) -> memoryview:
    return memoryview(rows.view(torch.uint8).numpy().reshape(-1).data)
