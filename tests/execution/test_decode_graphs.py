"""Batches in the memory of graphs. Without a GPU their layers are launched there, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backfill.core.block import KVLayout, pack_block_ref
from backfill.core.plan import ScheduledSlice
from backfill.core.request import RequestId
from backfill.execution import decode_graphs, shared_keys
from backfill.execution.batch import FlatBatch, PackedArrays, build_batch, host_batch
from backfill.execution.decode_graphs import DecodeGraphs
from backfill.kernels.triton_ops import TritonKernels
from backfill.models.build import build_model
from backfill.models.checkpoint import open_checkpoint
from backfill.models.config import ModelConfig
from backfill.models.decoder import DecoderModel, HiddenState
from backfill.models.shard import ModelShard, SoleRank
from tests.kernels.test_triton import DEVICES
from tests.models.tiny import save_tiny_model

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 90, 512


class Launched(DecodeGraphs):
    """Its layers are not captured, but computed when they are run."""

    def _capture(self, form: Any, pool: Any) -> None:
        self._after[form] = HiddenState(self._residual[: form.num_rows], None)

    def run_layer(self, layer: int, batch: FlatBatch) -> HiddenState:
        form = next(form for form, each in self._batches.items() if each.attention is batch.attention)
        state = HiddenState(self._residual[: form.num_rows], None) if layer == 0 else self._after[form]
        self._after[form] = self._run(layer, state, form)
        return self._after[form]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def model(tmp_path: Path, device: torch.device) -> DecoderModel:
    save_tiny_model("llama", tmp_path, max_position_embeddings=MAX_LEN)
    config, checkpoint = ModelConfig.from_folder(tmp_path), open_checkpoint(tmp_path, dtype=torch.float32)
    shard = ModelShard(SoleRank(), range(config.num_layers), config.num_layers)
    kernels = TritonKernels(device, decode_programs=100)
    return build_model(config, checkpoint, kernels, max_positions=MAX_LEN, device=device, shard=shard)


@pytest.fixture
def pool(model: DecoderModel, device: torch.device) -> Tensor:
    config = model.config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, 4)
    return torch.randn(layout.shape(NUM_BLOCKS)).to(device)


@pytest.fixture
def graphs_type(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> type[DecodeGraphs]:
    """Batches share 256 keys or more."""

    def packed(arrays: PackedArrays) -> Tensor:
        memory = torch.zeros(arrays.num_bytes, dtype=torch.uint8)
        for view, array in zip(arrays.views(memory), arrays.arrays, strict=True):
            view.copy_(torch.from_numpy(array))
        return memory

    set_fewest(256, monkeypatch)
    if device.type == "cuda":
        return DecodeGraphs
    monkeypatch.setattr(PackedArrays, "pinned", packed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return Launched


def set_fewest(num_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shared_keys, decode_graphs):
        monkeypatch.setattr(module, "MIN_SAVED_KEYS", num_keys)


def decodes(lens: list[int], num_shared: int) -> tuple[list[ScheduledSlice], list[np.ndarray[Any, Any]]]:
    """Of so many tokens, whose first blocks are the same."""
    unused = iter(range(num_shared, NUM_BLOCKS))
    slices = []
    for index, length in enumerate(lens):
        num_own = -(-length // BLOCK_SIZE) - num_shared
        blocks = [*range(num_shared), *(next(unused) for _ in range(num_own))][: -(-length // BLOCK_SIZE)]
        refs = tuple(map(pack_block_ref, blocks))
        slices.append(ScheduledSlice(RequestId(str(index)), length - 1, 1, refs, samples=True))
    return slices, [np.array([3 + index]) for index in range(len(lens))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lens", "num_shared", "form"),
    [
        pytest.param([300, 290, 340, 275], 17, (6, True), id="shared"),
        pytest.param([300, 290], 0, (2, False), id="not shared"),
        pytest.param([300, 8, 30], 0, (4, False), id="padded"),
    ],
)
@torch.inference_mode()
def test_layers_in_the_memory_of_graphs(
    lens: list[int],
    num_shared: int,
    form: tuple[int, bool],
    graphs_type: type[DecodeGraphs],
    model: DecoderModel,
    pool: Tensor,
) -> None:
    slices, tokens = decodes(lens, num_shared)
    plain = build_batch(slices, tokens, BLOCK_SIZE, pool.device)
    alone = replace(plain.attention, shared=None)
    state = model.embed(plain.token_ids, alone)
    expected, _ = model.run_layers(range(model.num_layers), state, pool.clone(), alone)

    graphs = graphs_type(model, pool, 6, MAX_LEN)
    assert graphs.holds(slices)
    batch, state = graphs.begin(host_batch(slices, tokens, BLOCK_SIZE))
    assert (len(batch.token_ids), batch.attention.shared is not None) == form
    for layer in range(model.num_layers):
        state = graphs.run_layer(layer, batch)
    num_rows = len(lens)
    torch.testing.assert_close(state.residual[:num_rows], expected.residual, rtol=1e-4, atol=1e-4)
    assert state.delta is not None
    assert expected.delta is not None
    torch.testing.assert_close(state.delta[:num_rows], expected.delta, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_batches_that_cannot_share_have_no_graphs_for_it(
    graphs_type: type[DecodeGraphs], model: DecoderModel, pool: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fewest(5 * MAX_LEN, monkeypatch)
    batch, _ = graphs_type(model, pool, 6, MAX_LEN).begin(
        host_batch(*decodes([300, 290, 340, 275], 17), BLOCK_SIZE)
    )
    assert (len(batch.token_ids), batch.attention.shared) == (4, None)
