"""What every link sends from one stage to the next: a header, and rows of hidden states."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from backfill.execution.collectives import StageHeader
from backfill.models.decoder import HiddenState

NUM_MESSAGES = 2  # queued at most: the stage before may be a step ahead while it computes another
NUM_VALUES = 7  # of a header


class RowShape(NamedTuple):
    """Of the hidden states: ``num_rows`` at most, each of ``hidden_size`` values."""

    num_rows: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of residual and delta, in whole cache lines."""
        return -(-2 * self.num_rows * self.hidden_size * self.dtype.itemsize // 64) * 64

    def rows_of(self, state: HiddenState | None) -> list[Tensor]:
        """Residual and perhaps delta; nothing without rows. Raises: ValueError if there are too many."""
        if state is None or len(state.residual) == 0:
            return []
        if len(state.residual) > self.num_rows:
            raise ValueError(
                f"a step has {len(state.residual)} tokens, and at most {self.num_rows} fit the link"
            )
        return [state.residual] if state.delta is None else [state.residual, state.delta]


def pack_header(header: StageHeader, rows: list[Tensor]) -> tuple[float, ...]:
    """``NUM_VALUES`` float64 values: the header, how many tensors follow it, and the rows of each."""
    number, last_layer, stopped_layers, stopped_at_s, failed = header
    stopped = math.nan if stopped_layers is None else stopped_layers
    return number, last_layer, stopped, stopped_at_s, failed, len(rows), len(rows[0]) if rows else 0


def unpack_header(values: Iterable[float]) -> tuple[StageHeader, int, int]:
    """The header, how many tensors follow it, and the rows of each."""
    number, last_layer, stopped, stopped_at_s, failed, num_tensors, num_rows = values
    stopped_layers = None if math.isnan(stopped) else int(stopped)
    header = StageHeader(int(number), int(last_layer), stopped_layers, stopped_at_s, bool(failed))
    return header, int(num_tensors), int(num_rows)
