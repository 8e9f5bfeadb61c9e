"""A forward pass between two layers: which slices it has, their batch, and their hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from backfill.core.plan import ScheduledSlice
from backfill.core.request import RequestId
from backfill.execution.batch import FlatBatch
from backfill.execution.decode_graphs import DecodeGraphs
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.kernels.stop_signal import StopSignal
from backfill.models.decoder import DecoderModel, HiddenState

BatchOf: TypeAlias = Callable[[Sequence[ScheduledSlice]], FlatBatch]


@dataclass(slots=True)
class MicroBatch:
    """Slices that are computed together, at least one, and their state between two layers.

    Its tensors are allocated, used and freed on its stream, see ``MicroBatchStreams``.

    Attributes:
        graphs: that compute it, in memory of their own; None for none.
    """

    slices: tuple[ScheduledSlice, ...]
    batch: FlatBatch
    state: HiddenState
    stream: int
    graphs: DecodeGraphs | None = None

    def run_layers(self, layers: range, model: DecoderModel, kv_pool: Tensor, stop: StopSignal | None) -> int:
        """Returns how many were run. See ``DecoderModel.run_layers``."""
        if self.graphs is None:
            self.state, done = model.run_layers(layers, self.state, kv_pool, self.batch.attention, stop)
            return done
        for layer in layers:
            self.state = self.graphs.run_layer(layer, self.batch)
        return len(layers)


@dataclass(slots=True)
class LayerPass:
    """A forward pass between two layers; all its micro-batches have passed the same layers."""

    micro_batches: list[MicroBatch]
    layers_done: int

    @property
    def slices(self) -> list[ScheduledSlice]:
        return [scheduled for each in self.micro_batches for scheduled in each.slices]

    @property
    def state(self) -> HiddenState | None:
        """Rows of one micro-batch after another; None without any."""
        states = [each.state for each in self.micro_batches]
        if len(states) < 2:
            return states[0] if states else None
        return HiddenState.concatenated(states)

    def with_only(self, kept: Set[RequestId], batch_of: BatchOf, streams: MicroBatchStreams) -> LayerPass:
        """The slices of these requests only.

        A micro-batch with all its slices is itself, one with some of them, or in the memory of graphs, has a
        copy of their rows, one with none is left out.
        """
        found: list[MicroBatch] = []
        for each in self.micro_batches:
            keep = [scheduled.request_id in kept for scheduled in each.slices]
            if all(keep) and each.graphs is None:
                found.append(each)
            elif any(keep):
                with streams.of(each.stream):
                    found.append(_split(each, keep, batch_of))
        return LayerPass(found, self.layers_done)


def _split(whole: MicroBatch, keep: Sequence[bool], batch_of: BatchOf) -> MicroBatch:
    """A micro-batch of the kept slices only, with a copy of their rows."""
    slices = tuple(scheduled for scheduled, kept in zip(whole.slices, keep, strict=True) if kept)
    counts = torch.tensor([scheduled.num_tokens for scheduled in whole.slices])
    rows = torch.repeat_interleave(torch.tensor(keep), counts).nonzero().squeeze(1)
    state = whole.state.rows(rows.to(whole.state.residual.device))
    return MicroBatch(slices, batch_of(slices), state, whole.stream)


def rows_of(state: HiddenState, start: int, stop: int) -> HiddenState:
    """Rows ``[start, stop)``: a copy, unless these are all rows."""
    residual, delta = state
    if stop - start == len(residual):
        return state
    return HiddenState(residual[start:stop].clone(), None if delta is None else delta[start:stop].clone())


def sampled_rows(micro_batches: Sequence[MicroBatch]) -> tuple[HiddenState, Tensor]:
    """Hidden states, and the indices of their rows that are sampled, one micro-batch after another.

    At least one is: the output projection reads its weights once for all.
    """
    sampling = [each for each in micro_batches if any(scheduled.samples for scheduled in each.slices)]
    if len(sampling) == 1:
        return sampling[0].state, sampling[0].batch.sampled_rows
    state = HiddenState.concatenated([each.state.rows(each.batch.sampled_rows) for each in sampling])
    return state, torch.arange(len(state.residual), device=state.residual.device)
