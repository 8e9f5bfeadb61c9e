"""CUDA graphs of a model's layers, for steps of decodes alone.

A layer of such a step has ten short kernels, and the host takes longer to launch them one by one than the
device to run them. A graph launches them at once. Each holds one layer, so that a step can still stop between
any two, for one number of rows, to which smaller batches are padded. Batches whose decodes share keys have
graphs of their own, so that others do not launch the kernels for these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backfill.core.plan import ScheduledSlice
from backfill.execution.batch import FlatBatch, HostBatch, PackedArrays, flat_batch
from backfill.execution.micro_batches import is_decode
from backfill.execution.shared_keys import MIN_SAVED_KEYS
from backfill.models.decoder import DecoderModel, HiddenState

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512)
# Where keys are shared. Fewer: each size takes time and memory when an engine starts.
_SHARING_SIZES = (16, 32, 64, 128, 256, 512)


class _Form(NamedTuple):
    """Of the batches of a graph: how many rows, and whether decodes share keys."""

    num_rows: int
    shares: bool


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
        self._forms = _forms(most, max_model_len)
        max_blocks = -(-max_model_len // kv_pool.shape[4])
        layouts = {
            form: PackedArrays.of(HostBatch.of_padding(*form, max_blocks=max_blocks)) for form in self._forms
        }
        num_bytes = max(layout.num_bytes for layout in layouts.values())
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=kv_pool.device)
        self._batches = {
            form: flat_batch(layout.views(self._memory), 1, max_model_len, max_model_len * form.shares)
            for form, layout in layouts.items()
        }
        largest = self._batches[self._forms[-1]]
        self._residual = model.embed(largest.token_ids, largest.attention).residual
        self._delta = torch.empty_like(self._residual)
        self._after: dict[_Form, HiddenState] = {}  # a layer
        self._graphs: dict[_Form, list[torch.cuda.CUDAGraph]] = {}
        pool = torch.cuda.graph_pool_handle()
        for form in reversed(self._forms):  # what the others need is in the memory of the largest
            self._capture(form, pool)
        logger.info(
            "captured %d CUDA graphs, for up to %d decodes, in %.1f s",
            len(self._forms) * model.num_layers,
            most,
            time.perf_counter() - began_s,
        )

    def holds(self, slices: Sequence[ScheduledSlice]) -> bool:
        """Whether there is a graph for a step of these slices: all are decodes, and not too many."""
        return len(slices) <= self._forms[-1].num_rows and all(map(is_decode, slices))

    def begin(self, host: HostBatch) -> tuple[FlatBatch, HiddenState]:
        """Place a batch of decodes; returns it, padded, and the input of the first layer."""
        host = host.with_shared_keys(self._kv_pool.shape[4])
        form = _form_of(host, self._forms)
        size = form.num_rows
        pinned = PackedArrays.of(host.padded(size)).pinned()
        self._memory[: len(pinned)].copy_(pinned, non_blocking=True)
        batch = self._batches[form]
        residual = self._residual[:size].copy_(self._model.embed(batch.token_ids, batch.attention).residual)
        sampled_rows = batch.sampled_rows[: len(host.sampled_rows)]
        return replace(batch, sampled_rows=sampled_rows), HiddenState(residual, None)

    def run_layer(self, layer: int, batch: FlatBatch) -> HiddenState:
        """The state of the batch that was begun last, after its next layer."""
        form = _Form(len(batch.token_ids), batch.attention.shared is not None)
        self._graphs[form][layer].replay()
        return self._after[form]

    def _capture(self, form: _Form, pool: Any) -> None:
        state = HiddenState(self._residual[: form.num_rows], None)
        graphs = []
        for layer in range(self._model.num_layers):
            if layer < 2:  # of each form: libraries and Triton do what cannot be captured on their first use
                self._run(layer, state, form)
                torch.cuda.synchronize(self._kv_pool.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                state = self._run(layer, state, form)
            graphs.append(graph)
        self._graphs[form], self._after[form] = graphs, state

    def _run(self, layer: int, state: HiddenState, form: _Form) -> HiddenState:
        """Run a layer, and copy what follows from it to where the next one finds it."""
        attention, size = self._batches[form].attention, form.num_rows
        after, _ = self._model.run_layers(range(layer, layer + 1), state, self._kv_pool, attention)
        residual, delta = self._residual[:size], None
        if after.residual.data_ptr() != residual.data_ptr():
            residual.copy_(after.residual)
        if after.delta is not None:
            delta = self._delta[:size].copy_(after.delta)
        return HiddenState(residual, delta)


def _forms(most: int, max_model_len: int) -> list[_Form]:
    """Of batches of up to ``most`` decodes; in order of size, without sharing first."""
    forms = [_Form(size, False) for size in _SIZES if size < most] + [_Form(most, False)]
    if (most - 1) * (max_model_len - 1) >= MIN_SAVED_KEYS:
        forms += [_Form(size, True) for size in _SHARING_SIZES if size < most] + [_Form(most, True)]
    return sorted(forms)


def _form_of(host: HostBatch, forms: Sequence[_Form]) -> _Form:
    """The smallest that holds the batch."""
    shares = len(host.sharers) > 0
    return next(each for each in forms if each.shares == shares and each.num_rows >= len(host.token_ids))
