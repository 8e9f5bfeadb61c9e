"""Hidden states from one stage to the next through shared memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from backfill.execution.collectives import PeerFailed, StageHeader
from backfill.models.decoder import HiddenState
from backfill.parallel.signals import CLOSED, Signals

_SENDER, _RECEIVER = 0, 1
_NOT_STOPPED = -1
_HEADER_BYTES = 64
NUM_MESSAGES = 2  # queued at most: the stage before may be a step ahead while it computes another


class RowShape(NamedTuple):
    """Of the hidden states: ``num_rows`` at most, each of ``hidden_size`` values."""

    num_rows: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of residual and delta, in whole cache lines."""
        return -(-2 * self.num_rows * self.hidden_size * self.dtype.itemsize // 64) * 64


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
        num_rows = 0 if state is None else len(state.residual)
        if num_rows > self._shape.num_rows:
            raise ValueError(f"a step has {num_rows} tokens, and at most {self._shape.num_rows} fit the link")
        self._wait_for(_RECEIVER, self._count + 1 - NUM_MESSAGES)
        place = self._count % NUM_MESSAGES
        has_delta = state is not None and state.delta is not None
        stopped = _NOT_STOPPED if header.stopped_layers is None else header.stopped_layers
        values = (
            header.number,
            header.last_layer,
            stopped,
            header.stopped_at_s,
            header.failed,
            num_rows,
            has_delta,
        )
        for index, value in enumerate(values, 8 * place):
            self._headers[index] = value
        if state is not None:
            residual, delta = self._data[place][:, :num_rows]
            residual.copy_(state.residual)
            if state.delta is not None:
                delta.copy_(state.delta)
        self._count += 1
        self._signals.raise_to(self._count)

    def receive(self) -> tuple[StageHeader, HiddenState | None]:
        self._wait_for(_SENDER, self._count + 1)
        place = self._count % NUM_MESSAGES
        number, last_layer, stopped, stopped_at_s, failed, rows, has_delta, _ = self._headers[
            8 * place : 8 * place + 8
        ]
        header = StageHeader(
            int(number),
            int(last_layer),
            None if stopped == _NOT_STOPPED else int(stopped),
            stopped_at_s,
            bool(failed),
        )
        state = None
        if rows:
            residual, delta = self._data[place][:, : int(rows)]
            state = HiddenState(residual.clone(), delta.clone() if has_delta else None)
        self._count += 1
        self._signals.raise_to(self._count)
        return header, state

    def close(self) -> None:
        self._signals.close()

    def _wait_for(self, end: int, count: int) -> None:
        self._signals.wait_for(end, count)
        if self._signals.count(end) >= CLOSED:
            raise PeerFailed(f"the {'next' if end == _RECEIVER else 'previous'} stage has ended")
