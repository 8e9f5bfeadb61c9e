"""Quantized types of GGUF as codes: the values are those of the ``gguf`` package, exactly."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf.constants import GGML_QUANT_SIZES
from transformers import LlamaConfig

from backfill.core.errors import CorruptModel
from backfill.kernels.quantized import QuantizedWeight
from backfill.models.checkpoint import open_checkpoint
from backfill.models.gguf.file import GgufTensor
from backfill.models.gguf.quantized import packed_format, quantized
from backfill.models.weights import Part
from tests.models.gguf.builders import SIZES, folder_of_gguf, make_model, stored_tensors, write_gguf

# Where a block has its scale and its offset, of half precision.
HALVES = {
    Quant.Q4_0: (0,), Quant.Q4_1: (0, 2), Quant.Q5_0: (0,), Quant.Q5_1: (0, 2), Quant.Q8_0: (0,),
    Quant.Q4_K: (0, 2), Quant.Q5_K: (0, 2), Quant.Q6_K: (208,),
}  # fmt: skip
ROWS, COLUMNS = 6, 512


def random_tensor(kind: Quant, shape: tuple[int, int] = (ROWS, COLUMNS)) -> GgufTensor:
    """The same one for the same shape."""
    random = np.random.default_rng(kind)
    num_inputs, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (math.prod(shape) // num_inputs, num_bytes), dtype=np.uint8)
    for start in HALVES[kind]:
        values = random.normal(0, 0.1, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = values.view(np.uint8).reshape(-1, 2)
    return GgufTensor(Path("m.gguf"), "t", shape, kind, blocks.reshape(shape[0], -1))


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_values_are_those_of_gguf(kind: Quant) -> None:
    tensor = random_tensor(kind)
    expected = torch.from_numpy(gguf.quants.dequantize(tensor.rows, kind))
    whole = quantized(tensor, slice(0, ROWS), slice(0, COLUMNS), torch.float32)
    assert torch.equal(whole.dequantized(), expected)
    assert whole.format == packed_format(kind)
    order = np.array([5, 0, 3])
    part = quantized(tensor, order, slice(256, 512), torch.bfloat16)
    assert torch.equal(part.dequantized(), expected[order, 256:].bfloat16())


def test_scales_that_are_no_numbers_are_refused() -> None:
    tensor = random_tensor(Quant.Q4_1)
    tensor.rows[2, 20:22] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(CorruptModel, match=r"^m\.gguf is damaged: tensor t holds values that are not finite"):
        quantized(tensor, slice(0, ROWS), slice(0, COLUMNS), torch.float32)


def test_types_of_two_and_three_bits_are_widened() -> None:
    assert packed_format(Quant.Q3_K) is None
    assert packed_format(Quant.F16) is None


@pytest.mark.parametrize("kind", [Quant.Q4_K, Quant.Q6_K], ids=lambda kind: kind.name)
def test_a_part_within_a_block(kind: Quant) -> None:
    tensor = random_tensor(kind)
    expected = torch.from_numpy(gguf.quants.dequantize(tensor.rows, kind))
    whole = quantized(tensor, slice(0, ROWS), slice(0, COLUMNS), torch.float32)
    for start, stop in ((0, 256), (96, 448), (256, 288)):
        part = whole.columns(start, stop)
        part.check()
        assert torch.equal(part.dequantized(), expected[:, start:stop])
    assert whole.columns(0, 256).format.has_units


@pytest.mark.parametrize("kind", [Quant.Q4_K, Quant.Q5_K, Quant.Q6_K], ids=lambda kind: kind.name)
def test_matrices_and_parts_of_a_file(kind: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def random_blocks(values: np.ndarray, kind: Quant) -> np.ndarray:
        return random_tensor(kind, (values.shape[0], values.shape[1])).rows

    monkeypatch.setattr(gguf.quants, "quantize", random_blocks)  # it makes no K-quants
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    config = LlamaConfig(**SIZES | wide, tie_word_embeddings=True)
    source = write_gguf(tmp_path / "m.gguf", "llama", config, stored_tensors(make_model(config)), quant=kind)
    folder = folder_of_gguf(source, tmp_path / "out")
    checkpoint = open_checkpoint(folder, dtype=torch.bfloat16, quantization="auto")
    for name, shape in {
        "self_attn.q_proj": (256, 256),
        "self_attn.k_proj": (128, 256),
        "mlp.down_proj": (256, 512),
    }.items():
        values = gguf.quants.dequantize(random_tensor(kind, shape).rows, kind)
        if "self_attn" in name:  # a head of 64 rows has its pairs side by side
            values = values.reshape(-1, 32, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        whole = torch.from_numpy(values).bfloat16()
        for part, expected in (
            (None, whole),
            (Part(0, 3, 77), whole[3:77]),
            (Part(1, 32, 96), whole[:, 32:96]),
            (Part(1, 96, 256), whole[:, 96:256]),
        ):
            found = checkpoint.weight(f"model.layers.0.{name}.weight", shape, part)
            assert isinstance(found, QuantizedWeight)
            found.check()
            assert torch.equal(found.dequantized(), expected), (name, part)
