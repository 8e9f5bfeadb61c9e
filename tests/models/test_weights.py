"""Weights: read, rounded when a model is loaded, or refused by the name of their quantization."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from backfill.core.errors import CorruptModel, ModelNotFound, UnsupportedModel
from backfill.kernels.cpu import CpuKernels
from backfill.kernels.cpu_linear import CpuLinear
from backfill.kernels.linears import ConcatenatedLinear
from backfill.kernels.quantized import QuantizedWeight, quantize
from backfill.models import weights
from backfill.models.checkpoint import RoundedCheckpoint, open_checkpoint
from backfill.models.config import ModelConfig
from backfill.models.fields import Fields
from backfill.models.quantization import StoredQuantization, stored_quantization
from backfill.models.safetensors_files import SafetensorsFiles
from backfill.models.shard import ShardSizes, Span
from backfill.models.shard_loader import ShardLoader
from backfill.models.weights import Checkpoint, DummyCheckpoint, Part
from tests.models.quantized import Case
from tests.models.test_placement import SMOLLM2
from tests.models.tiny import save_tiny_llama_config


def make_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "model.a.weight": torch.randn(4, 6, generator=generator),
        "model.b.weight": torch.randn(3, generator=generator),
        "lm_head.weight": torch.randn(5, 4, generator=generator),
    }


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{i:05}.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_reads_and_casts(sharded: bool, tmp_path: Path) -> None:
    tensors = make_tensors()
    if sharded:
        write_shards(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.get(name, tensor.shape), tensor.bfloat16())


def parts_of(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dim: int) -> Tensor:
    """Three parts of different sizes, put together."""
    size = shape[dim]
    stops = (0, size // 4, size // 2 + 1, size)
    parts = [checkpoint.get(name, shape, Part(dim, *each)) for each in pairwise(stops)]
    assert all(part.is_contiguous() for part in parts)
    return torch.cat(parts, dim)


def test_parts_of_stored_tensors(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        for dim in range(tensor.dim()):
            assert torch.equal(parts_of(checkpoint, name, tuple(tensor.shape), dim), tensor.bfloat16())
    with pytest.raises(CorruptModel, match=r"model\.a\.weight has shape \[4, 6\], expected \[2, 6\]"):
        checkpoint.get("model.a.weight", (2, 6), Part(0, 0, 1))


@pytest.mark.parametrize("chunk", [1, 7, 999, 1 << 22])
def test_parts_of_dummy_tensors(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_DUMMY_CHUNK", chunk)
    checkpoint = open_checkpoint("nowhere", dtype=torch.float32, load_format="dummy")
    for name, shape in (("a.bias", (30,)), ("a.weight", (20, 30)), ("a.norm.weight", (30,))):
        for dim in range(len(shape)):
            assert torch.equal(parts_of(checkpoint, name, shape, dim), checkpoint.get(name, shape))


def test_bare_decoder_names(tmp_path: Path) -> None:
    save_file({"layers.0.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, dtype=torch.float32)
    assert torch.equal(checkpoint.get("model.layers.0.weight", (2,)), torch.ones(2))


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_file(make_tensors() | {"ids": torch.arange(3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, dtype=torch.float32)
    with pytest.raises(CorruptModel, match=r"tensor model\.c\.weight \[2, 3\] is missing"):
        checkpoint.get("model.c.weight", (2, 3))
    with pytest.raises(CorruptModel, match=r"model\.a\.weight has shape \[4, 6\], expected \[6, 4\]"):
        checkpoint.get("model.a.weight", (6, 4))
    with pytest.raises(UnsupportedModel, match=r"ids is I64.*; supported: bfloat16.* awq \(4 bits.* gptq"):
        checkpoint.get("ids", (3,))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    huge = torch.full((4, 8), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    damaged = torch.randn(4, 8)
    damaged[2, 5] = value
    save_file({"huge.weight": huge, "damaged.weight": damaged}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, dtype=torch.bfloat16, quantization="none")
    assert torch.equal(checkpoint.get("huge.weight", (4, 8)), huge)
    with pytest.raises(CorruptModel, match=r"safetensors: tensor damaged\.weight holds values .* not finite"):
        checkpoint.get("damaged.weight", (4, 8))


def test_every_truncation_is_found_when_opening(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(make_tensors(), path)
    whole = path.read_bytes()
    for size in [*range(0, 64), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptModel, match=r"model\.safetensors is damaged or truncated"):
            open_checkpoint(tmp_path, dtype=torch.float32)


def test_damaged_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(make_tensors(), path)
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])
    with pytest.raises(CorruptModel, match=r"model\.safetensors"):
        open_checkpoint(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"dtype": "F16"}, r"tensor a of shape \[2, 2\] has bytes 0 to 16"),
        ({"data_offsets": [16, 0]}, r"tensor a of shape \[2, 2\] has bytes 16 to 0"),
        ({"shape": [2, 3], "data_offsets": [0, 24]}, "its tensors take 24 bytes, and it has 16 for them"),
        ({"shape": [1], "data_offsets": [0, 4]}, "its tensors take 4 bytes, and it has 16 for them"),
        ({"shape": "2"}, r"its header cannot be read: Expected array, got str"),
    ],
)
def test_a_header_that_does_not_fit_its_file(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **change}
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CorruptModel, match=rf"model\.safetensors is damaged or truncated: {part}"):
        SafetensorsFiles(tmp_path)


def test_shards_must_fit_the_index(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, make_tensors())
    write_index(tmp_path, weight_map | {"model.c.weight": weight_map["model.a.weight"]})
    with pytest.raises(CorruptModel, match=r"tensor model\.c\.weight is missing"):
        open_checkpoint(tmp_path, dtype=torch.float32)
    write_index(tmp_path, weight_map | {"model.c.weight": "model-9.safetensors"})
    with pytest.raises(CorruptModel, match=r"model-9\.safetensors does not exist"):
        open_checkpoint(tmp_path, dtype=torch.float32)
    (tmp_path / "model-9.safetensors").symlink_to("gone")
    with pytest.raises(CorruptModel, match=r"model-9\.safetensors is a link to .*gone, which is not there"):
        open_checkpoint(tmp_path, dtype=torch.float32)


def test_a_folder_in_place_of_a_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").mkdir()
    with pytest.raises(ModelNotFound, match=r"model\.gguf is not a file"):
        open_checkpoint(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    "weight_map", [None, {"a": 1}, {"a": "../model.safetensors"}, {"a": ".."}, {"a": ""}]
)
def test_malformed_index(weight_map: object, tmp_path: Path) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CorruptModel, match=r"index\.json"):
        open_checkpoint(tmp_path, dtype=torch.float32)


def test_an_index_of_too_many_levels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[" * 200_000)
    with pytest.raises(CorruptModel, match="is not a safetensors index"):
        open_checkpoint(tmp_path, dtype=torch.float32)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="holds no weights"):
        open_checkpoint(tmp_path, dtype=torch.float32)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="convert it to safetensors"):
        open_checkpoint(tmp_path, dtype=torch.float32)


def test_dummy_weights_depend_on_name_and_seed_alone() -> None:
    first = open_checkpoint("nowhere", dtype=torch.float32, load_format="dummy")
    again = open_checkpoint("nowhere", dtype=torch.bfloat16, load_format="dummy")
    other = open_checkpoint("nowhere", dtype=torch.float32, load_format="dummy", seed=1)
    name, shape = "model.layers.0.mlp.up_proj.weight", (300, 200)
    again.get("model.other.weight", (7,))
    weight = first.get(name, shape)
    assert torch.equal(weight.bfloat16(), again.get(name, shape))
    assert not torch.equal(weight, other.get(name, shape))
    assert not torch.equal(weight, first.get(name.replace("0", "1"), shape))
    assert weight.std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    "name", ["model.layers.0.input_layernorm", "model.norm", "model.decoder.final_layer_norm"]
)
def test_dummy_norms_are_the_identity(name: str) -> None:
    checkpoint = open_checkpoint("nowhere", dtype=torch.float32, load_format="dummy")
    assert torch.equal(checkpoint.get(f"{name}.weight", (4,)), torch.ones(4))
    assert torch.equal(checkpoint.get(f"{name}.bias", (4,)), torch.zeros(4))


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


def test_every_rank_has_a_quantized_and_gated_mlp() -> None:
    """29568 / 8, as in Qwen2-72B, is no multiple of 32."""
    config = replace(SMOLLM2, intermediate_size=29568, hidden_size=64, num_heads=8, num_kv_heads=8)
    checkpoint = open_checkpoint("nowhere", dtype=torch.bfloat16, load_format="dummy", quantization="int8")
    kernels, num_bytes, num_weights = CpuKernels("generic"), 0, 0
    for rank in (0, 7):
        sizes = ShardSizes(config, range(1), rank, 8)
        loader = ShardLoader(checkpoint, kernels, CPU, sizes, "layers.0.")
        inputs = {"gate_proj": sizes.inner, "up_proj": sizes.inner}
        gated = kernels.gated(loader.column_linear(inputs, 64, has_bias=False))
        assert isinstance(gated, CpuLinear) and gated.is_gated
        down = loader.row_linear("down_proj", 64, sizes.inner, has_bias=False)
        num_bytes += sum(part.nbytes for each in (gated, down) for part in each.memory)
        num_weights += 3 * 64 * sizes.inner.length
    assert num_bytes == num_weights * checkpoint.layer_width


def test_what_cannot_be_rounded_is_named() -> None:
    class Huge(DummyCheckpoint):
        def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
            return torch.full(tuple(shape), 1e9)

    rounded = RoundedCheckpoint(Huge(dtype=torch.float32), 4)
    for name, bits in (("layers.0.x.weight", 4), ("lm_head.weight", 8)):
        with pytest.raises(CorruptModel, match=f"tensor {name} cannot be rounded to int{bits}: it has"):
            rounded.weight(name, (4, 64))


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
    loader = ShardLoader(
        checkpoint, CpuKernels("generic"), CPU, ShardSizes(config, range(config.num_layers)), "layers.0."
    )
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


AWQ, GPTQ = Case("awq").config, Case("gptq").config
PACKED, INTEGERS = Case("pack-quantized").config, Case("int-quantized", 8, None, True).config


def with_group(config: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**config, "config_groups": {"group_0": {**config["config_groups"]["group_0"], **changed}}}


def with_weights(config: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return with_group(config, weights={**config["config_groups"]["group_0"]["weights"], **changed})


def parsed(config: dict[str, Any] | None) -> StoredQuantization | None:
    return stored_quantization(Fields(Path("config.json"), {"quantization_config": config}))


def test_none() -> None:
    assert parsed(None) is None


def test_what_is_supported() -> None:
    assert parsed({"quant_method": "awq"}) == StoredQuantization("awq", "awq", 4, 128, True)
    assert parsed({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}) == StoredQuantization(
        "gptq", "gptq", 8, None, False
    )
    packed = StoredQuantization("compressed-tensors", "pack-quantized", 4, 32, True)
    assert parsed(PACKED) == packed
    both = {"a": PACKED["config_groups"]["group_0"], "b": PACKED["config_groups"]["group_0"]}
    assert parsed({**PACKED, "config_groups": both}) == packed
    integers = with_group(INTEGERS, input_activations={"num_bits": 8, "dynamic": True})
    expected = StoredQuantization("compressed-tensors", "int-quantized", 8, None, False, has_activations=True)
    assert parsed(integers) == parsed({**integers, "format": "naive-quantized"}) == expected
    of_rounded, of_floats = (each["config_groups"]["group_0"] for each in (integers, INTEGERS))
    for pair in ((of_rounded, of_floats), (of_floats, of_rounded)):
        assert parsed({**INTEGERS, "config_groups": dict(zip("ab", pair, strict=True))}) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantization bitsandbytes .* gptq .4 and 8",
        ),
        ({"quant_method": "fp8"}, "quantization fp8 is not supported"),
        ({**AWQ, "bits": 3}, r"quantization_config\.bits 3 is not supported; supported: 4$"),
        ({**AWQ, "version": "GEMV"}, "version gemv is not supported; supported: gemm"),
        ({**GPTQ, "bits": 2}, "bits 2 is not supported; supported: 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format marlin .* gptq, gptq_v2"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic with other settings"),
        ({**PACKED, "format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized .* pack-quantized"),
        ({**PACKED, "format": "float-quantized"}, "format float-quantized"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format sparse-24"),
        ({**PACKED, "transform_config": {"config_groups": {}}}, "transform_config config_groups .* none$"),
        ({**PACKED, "config_groups": {}}, "config_groups with 0 schemes"),
        (
            {
                **PACKED,
                "config_groups": PACKED["config_groups"] | {"b": INTEGERS["config_groups"]["group_0"]},
            },
            "config_groups with 2 schemes",
        ),
        (with_weights(PACKED, type="float"), r"group_0\.weights\.type float .* supported: int"),
        (with_weights(PACKED, num_bits=3), r"weights\.num_bits 3 .* supported: 4, 8"),
        (with_weights(INTEGERS, strategy="block"), r"weights\.strategy block .* supported: group, channel"),
        (with_weights(PACKED, actorder="group"), r"weights\.actorder group .* static"),
    ],
)
def test_what_is_not_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny_llama_config(tmp_path, quantization_config=config)
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "quant_method must be one of awq, gptq, compressed-tensors, got None"),
        ({**GPTQ, "bits": "four"}, r"quantization_config\.bits must be a positive integer"),
        ({**GPTQ, "group_size": 0}, "group_size must be a positive integer, got 0"),
        (with_weights(PACKED, group_size=-2), "group_size must be a positive integer, got -2"),
        ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, r"config_groups\.W4A16 must be an object"),
    ],
)
def test_wrong_values_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptModel, match=message):
        parsed(config)
