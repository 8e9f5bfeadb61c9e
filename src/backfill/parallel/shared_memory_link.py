"""Hidden states from one stage to the next through shared memory."""

from __future__ import annotations

import math

import torch

from backfill.execution.collectives import PeerFailed, StageHeader
from backfill.models.decoder import HiddenState
from backfill.parallel.shared_memory import CLOSED, Signals
from backfill.parallel.stage_message import NUM_MESSAGES, NUM_VALUES, RowShape, pack_header, unpack_header

_SENDER, _RECEIVER = 0, 1
_HEADER_BYTES = 64


class SharedMemoryLink:
    """See ``StageLink``. A ring of ``NUM_MESSAGES`` messages; each end creates one of these.

    Args:
        memory: ``num_bytes`` of zeros that both ends have mapped.
    """

    def __init__(self, memory: memoryview, shape: RowShape, *, sends: bool) -> None:
        self._shape = shape
        self._signals = Signals(memory, _SENDER if sends else _RECEIVER, 2, num_words=0)
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

    def send(self, header: StageHeader, state: HiddenState | None) -> None:
        rows = self._shape.rows_of(state)
        self._wait_for(_RECEIVER, self._count + 1 - NUM_MESSAGES)
        place = self._count % NUM_MESSAGES
        for index, value in enumerate(pack_header(header, rows), 8 * place):
            self._headers[index] = value
        for tensor, place_of in zip(rows, self._data[place], strict=False):
            place_of[: len(tensor)].copy_(tensor)
        self._count += 1
        self._signals.raise_to(self._count)

    def receive(self) -> tuple[StageHeader, HiddenState | None]:
        self._wait_for(_SENDER, self._count + 1)
        place = self._count % NUM_MESSAGES
        header, num_tensors, num_rows = unpack_header(self._headers[8 * place : 8 * place + NUM_VALUES])
        state = None
        if num_tensors:
            residual, delta = self._data[place][:, :num_rows]
            state = HiddenState(residual.clone(), delta.clone() if num_tensors > 1 else None)
        self._count += 1
        self._signals.raise_to(self._count)
        return header, state

    def close(self) -> None:
        self._signals.close()

    def _wait_for(self, end: int, count: int) -> None:
        self._signals.wait_for(end, count)
        if self._signals.count(end) >= CLOSED:
            raise PeerFailed(f"the {'next' if end == _RECEIVER else 'previous'} stage has ended")
