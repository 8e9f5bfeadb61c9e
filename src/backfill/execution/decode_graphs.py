"""CUDA graphs of a model's layers, for steps of decodes alone.

A layer of such a step has ten short kernels, and the host takes longer to launch them one by one than the
device to run them. A graph launches them at once. Each holds one layer, so that a step can still stop between
any two, for one number of rows, to which smaller batches are padded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backfill.core.plan import ScheduledSlice
from backfill.execution.batch import FlatBatch, HostBatch, PackedArrays, flat_batch
from backfill.execution.micro_batches import is_decode
from backfill.models.decoder import DecoderModel, HiddenState

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512)


class DecodeGraphs:
    """Graphs of all layers for batches of several sizes, which share the memory that they compute in.

    Graphs read and write at fixed addresses. So a batch and its hidden states are valid until the next batch
    is begun: who keeps them longer copies them.

    Args:
        model: with all its layers on the device, at addresses that never change.
        kv_pool: that the model writes to; slot 0 is written to now.
        max_num_seqs: of a step.
        max_model_len: of a sequence.
    """

    @torch.inference_mode()
    def __init__(self, model: DecoderModel, kv_pool: Tensor, max_num_seqs: int, max_model_len: int) -> None:
        began_s = time.perf_counter()
        self._model = model
        self._kv_pool = kv_pool
        most = min(max_num_seqs, _SIZES[-1])
        self._sizes = [*(size for size in _SIZES if size < most), most]
        max_blocks = -(-max_model_len // kv_pool.shape[4])
        layouts = {
            size: PackedArrays.of(HostBatch.of_padding(size, size * max_blocks)) for size in self._sizes
        }
        self._memory = torch.zeros(layouts[most].num_bytes, dtype=torch.uint8, device=kv_pool.device)
        self._batches = {
            size: flat_batch(layout.views(self._memory), 1, max_model_len) for size, layout in layouts.items()
        }
        self._residual = model.embed(self._batches[most].token_ids, self._batches[most].attention).residual
        self._delta = torch.empty_like(self._residual)
        self._after: dict[int, HiddenState] = {}  # a layer, by size
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):  # what the others need is in the memory of the largest
            self._capture(size, pool)
        logger.info(
            "captured %d CUDA graphs, for up to %d decodes, in %.1f s",
            len(self._sizes) * model.num_layers,
            most,
            time.perf_counter() - began_s,
        )

    def holds(self, slices: Sequence[ScheduledSlice]) -> bool:
        """Whether there is a graph for a step of these slices: all are decodes, and not too many."""
        return len(slices) <= self._sizes[-1] and all(map(is_decode, slices))

    def begin(self, host: HostBatch) -> tuple[FlatBatch, HiddenState]:
        """Place a batch of decodes; returns it, padded, and the input of the first layer."""
        size = next(each for each in self._sizes if each >= len(host.token_ids))
        pinned = PackedArrays.of(host.padded(size)).pinned()
        self._memory[: len(pinned)].copy_(pinned, non_blocking=True)
        batch = self._batches[size]
        residual = self._residual[:size].copy_(self._model.embed(batch.token_ids, batch.attention).residual)
        sampled_rows = batch.sampled_rows[: len(host.sampled_rows)]
        return replace(batch, sampled_rows=sampled_rows), HiddenState(residual, None)

    def run_layer(self, layer: int, batch: FlatBatch) -> HiddenState:
        """The state of the batch that was begun last, after its next layer."""
        size = len(batch.token_ids)
        self._graphs[size][layer].replay()
        return self._after[size]

    def _capture(self, size: int, pool: Any) -> None:
        state = HiddenState(self._residual[:size], None)
        graphs = []
        for layer in range(self._model.num_layers):
            if layer < 2:  # of each form: libraries and Triton do what cannot be captured on their first use
                self._run(layer, state, size)
                torch.cuda.synchronize(self._kv_pool.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                state = self._run(layer, state, size)
            graphs.append(graph)
        self._graphs[size], self._after[size] = graphs, state

    def _run(self, layer: int, state: HiddenState, size: int) -> HiddenState:
        """Run a layer, and copy what follows from it to where the next one finds it."""
        attention = self._batches[size].attention
        after, _ = self._model.run_layers(range(layer, layer + 1), state, self._kv_pool, attention)
        residual, delta = self._residual[:size], None
        if after.residual.data_ptr() != residual.data_ptr():
            residual.copy_(after.residual)
        if after.delta is not None:
            delta = self._delta[:size].copy_(after.delta)
        return HiddenState(residual, delta)
