"""Weights rounded when a model is loaded, and matrices of several formats in one layer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from backfill.core.errors import CorruptModel
from backfill.kernels.cpu import CpuKernels
from backfill.kernels.linears import ConcatenatedLinear
from backfill.kernels.quantized import QuantizedWeight, quantize
from backfill.models.checkpoint import RoundedCheckpoint, open_checkpoint
from backfill.models.config import ModelConfig
from backfill.models.shard import Span, whole_model
from backfill.models.shard_loader import ShardLoader
from backfill.models.weights import Checkpoint, DummyCheckpoint, Part
from tests.models.test_placement import SMOLLM2

CPU = torch.device("cpu")


def test_tables_have_8_bits_and_odd_inputs_stay_as_they_are() -> None:
    checkpoint = open_checkpoint("nowhere", dtype=torch.bfloat16, load_format="dummy", quantization="int4")
    layer = checkpoint.weight("model.layers.0.mlp.up_proj.weight", (8, 64))
    table = checkpoint.weight("model.embed_tokens.weight", (8, 64))
    assert isinstance(layer, QuantizedWeight) and isinstance(table, QuantizedWeight)
    assert (layer.format.bits, table.format.bits) == (4, 8)
    assert (checkpoint.layer_width, checkpoint.table_width) == (5 / 8, 8.5 / 8)
    for shape, part in (((8, 40), None), ((8, 96), Part(1, 16, 48)), ((8, 96), Part(1, 32, 80))):
        assert isinstance(checkpoint.weight("model.layers.0.mlp.up_proj.weight", shape, part), Tensor)


def test_what_cannot_be_rounded_is_named() -> None:
    class Huge(DummyCheckpoint):
        def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
            return torch.full(tuple(shape), 1e9)

    with pytest.raises(CorruptModel, match=r"tensor layers\.0\.x\.weight cannot be rounded"):
        RoundedCheckpoint(Huge(dtype=torch.float32), 8).weight("layers.0.x.weight", (4, 64))


class Mixed(DummyCheckpoint):
    """v in 8 bits, k in 4, q not in codes."""

    def weight(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor | QuantizedWeight:
        found = self.get(name, shape, part)
        if "q_proj" in name:
            return found
        return quantize(found, 8 if "v_proj" in name else 4)


def test_projections_of_several_formats() -> None:
    config: ModelConfig = SMOLLM2
    checkpoint: Checkpoint = Mixed(dtype=torch.float32)
    loader = ShardLoader(checkpoint, CpuKernels("generic"), CPU, whole_model(config), "layers.0.")
    spans = {name: Span(size, 0, size) for name, size in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))}
    linear = loader.column_linear(spans, 96, has_bias=True)
    assert isinstance(linear, ConcatenatedLinear)
    x = torch.randn(3, 96)
    expected = []
    for name, span in spans.items():
        weight = checkpoint.weight(f"layers.0.{name}.weight", (span.size, 96))
        values = weight.dequantized() if isinstance(weight, QuantizedWeight) else weight
        bias = checkpoint.get(f"layers.0.{name}.bias", (span.size,))
        expected.append(torch.nn.functional.linear(x, values, bias))
    torch.testing.assert_close(linear(x), torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)
