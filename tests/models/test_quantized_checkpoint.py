"""AWQ, GPTQ and compressed-tensors: values are those of the formats' descriptions and libraries, exactly."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backfill.core.config import Quantization
from backfill.core.errors import CorruptModel, UnsupportedModel
from backfill.execution.create import create_torch_executor
from backfill.kernels.cpu import CpuKernels
from backfill.kernels.quantized import QuantizedFormat, QuantizedWeight
from backfill.models.checkpoint import open_checkpoint
from backfill.models.config import ModelConfig
from backfill.models.folder_check import check_weights
from backfill.models.placement import ModelPlacement
from backfill.models.weights import Checkpoint, Part
from tests.execution.tiny import tiny_config
from tests.models.quantized import Case, save_quantized_model, stored_matrix, write_config
from tests.models.test_shards import logits_of
from tests.parallel.test_rank_tokens import tokens

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Of each, how a matrix is kept; None: dequantized.
CASES = {
    "awq": (Case("awq"), QuantizedFormat(4, 32, FLOAT, True)),
    "awq-sym": (Case("awq", is_symmetric=True), QuantizedFormat(4, 32, HALF, False)),
    "gptq": (Case("gptq", group=64), QuantizedFormat(4, 64, FLOAT, True)),
    "gptq-sym": (Case("gptq", is_symmetric=True), QuantizedFormat(4, 32, HALF, False)),
    "gptq-channel": (Case("gptq", group=None), QuantizedFormat(4, 64, FLOAT, True)),
    "gptq-8": (Case("gptq", 8), QuantizedFormat(8, 32, FLOAT, True)),
    "gptq-v2-8-sym": (Case("gptq_v2", 8, is_symmetric=True), QuantizedFormat(8, 32, HALF, False)),
    "gptq-v2": (Case("gptq_v2", group=16), QuantizedFormat(4, 16, FLOAT, True)),
    "packed": (Case("pack-quantized", scale_type=BFLOAT), QuantizedFormat(4, 32, FLOAT, True)),
    "packed-sym": (
        Case("pack-quantized", is_symmetric=True, scale_type=BFLOAT),
        QuantizedFormat(4, 32, FLOAT, False),
    ),
    "packed-float": (Case("pack-quantized", scale_type=FLOAT), QuantizedFormat(8, 32, FLOAT, False)),
    "packed-8": (Case("pack-quantized", 8, scale_type=BFLOAT), QuantizedFormat(8, 32, FLOAT, True)),
    "packed-8-float": (Case("pack-quantized", 8, scale_type=FLOAT), None),
    "packed-8-channel": (
        Case("pack-quantized", 8, None, is_symmetric=True, scale_type=FLOAT),
        QuantizedFormat(8, 64, FLOAT, False),
    ),
    "packed-48": (Case("pack-quantized", group=48, is_symmetric=True), None),
    "int-channel": (
        Case("int-quantized", 8, None, is_symmetric=True, scale_type=BFLOAT),
        QuantizedFormat(8, 64, FLOAT, False),
    ),
    "int": (Case("int-quantized", 8), QuantizedFormat(8, 32, FLOAT, True)),
    "int-4": (Case("int-quantized", 4, is_symmetric=True), QuantizedFormat(4, 32, HALF, False)),
}
NAME = "model.layers.1.self_attn.q_proj"  # [64, 64]


def dequantized(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight


def write_matrix(folder: Path, case: Case, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """A checkpoint of one matrix. Returns: its tensors and values."""
    tensors, values = stored_matrix(case, NAME, shape, seed=3)
    save_file(tensors, folder / "model.safetensors")
    write_config(folder, {"quantization_config": case.config})
    return tensors, values


def change_stored(folder: Path, end: str, changed: Callable[[Tensor], Tensor | None]) -> None:
    """Of the first tensor whose name ends so; None: it is left out."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(end))
    tensor = changed(tensors.pop(name))
    if tensor is not None:
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")


def without(tensor: Tensor) -> None:
    pass


def without_last(tensor: Tensor) -> Tensor:
    return tensor[:-1]


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_matrices_and_parts(label: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case, form = CASES[label]
    shape = 72, 64 if case.group != 48 else 96
    _, values = write_matrix(tmp_path, case, shape)
    kept, plain = (open_checkpoint(tmp_path, dtype=dtype, quantization=each) for each in ("auto", "none"))
    whole = kept.weight(f"{NAME}.weight", shape)
    assert (whole.format if isinstance(whole, QuantizedWeight) else None) == form
    assert torch.equal(dequantized(whole), values.to(dtype))
    assert torch.equal(plain.get(f"{NAME}.weight", shape), values.to(dtype))
    assert isinstance(plain.weight(f"{NAME}.weight", shape), Tensor)
    for part in (Part(0, 5, 42), Part(0, 42, 72), Part(1, 32, 64), Part(1, 0, 32), Part(1, 7, 51)):
        index = (slice(part.start, part.stop), slice(None))[:: 1 if part.dim == 0 else -1]
        found = kept.weight(f"{NAME}.weight", shape, part)
        assert torch.equal(dequantized(found), values[index].to(dtype))
        if form is not None and part.stop != 51:
            assert isinstance(found, QuantizedWeight), "a part at 32 inputs is not widened"


@pytest.mark.parametrize(
    "label",
    [
        "awq",
        "int-channel",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("gptq-sym", "packed", "packed-float")),
    ],
)
def test_logits_are_those_of_the_dequantized_model(label: str, tmp_path: Path) -> None:
    case, _ = CASES[label]
    plain = save_quantized_model(case, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    for size in (1, 2, 4):
        placement = ModelPlacement.of(config, size)
        kept = open_checkpoint(tmp_path, dtype=torch.float32, quantization="auto")
        expected = logits_of(open_checkpoint(plain, dtype=torch.float32), placement, CpuKernels)
        rounded = logits_of(kept, placement, CpuKernels)
        assert (rounded - expected).norm() <= 0.1 * expected.norm()
        if size == 2:  # generic rounds no rows
            found, expected = (
                logits_of(checkpoint, placement, lambda: CpuKernels("generic"))
                for checkpoint in (kept, open_checkpoint(plain, dtype=torch.float32))
            )
            assert torch.equal(found, expected)


def test_tokens_are_those_of_the_dequantized_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKFILL_CPU_ISA", "generic")  # rounds no rows
    plain = save_quantized_model(Case("awq"), tmp_path)
    stored, expected = (tokens(create_torch_executor(tiny_config(each))) for each in (tmp_path, plain))
    assert stored == expected


def decompressed(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    """By compressed-tensors."""
    library = importlib.import_module("compressed_tensors")
    scheme = library.quantization.QuantizationScheme(**case.config["config_groups"]["group_0"])
    compressor = library.compressors.BaseCompressor.get_value_from_registry(case.layout)
    found: Tensor = compressor.decompress(
        {name.removeprefix(f"{NAME}."): tensor for name, tensor in tensors.items()}, scheme
    )["weight"]
    return found


@pytest.mark.parametrize("label", [label for label, (case, _) in CASES.items() if "quantized" in case.layout])
def test_values_are_those_of_compressed_tensors(label: str, tmp_path: Path) -> None:
    case, _ = CASES[label]
    shape = 72, 64 if case.group != 48 else 96
    tensors, _ = write_matrix(tmp_path, case, shape)
    checkpoint = open_checkpoint(tmp_path, dtype=case.scale_type, quantization="auto")
    found = dequantized(checkpoint.weight(f"{NAME}.weight", shape))
    assert torch.equal(found, decompressed(case, tensors))


def test_values_of_awq_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    tensors, _ = write_matrix(tmp_path, Case("awq"), (72, 64))
    converted = AutoAWQConverter(group_size=32).process(dict(tensors))
    checkpoint = open_checkpoint(tmp_path, dtype=HALF, quantization="auto")
    found = dequantized(checkpoint.weight(f"{NAME}.weight", (72, 64)))
    assert torch.equal(found, decompressed(Case("pack-quantized"), converted))


@pytest.mark.parametrize("label", CASES)
def test_what_is_seen_before_an_engine_starts(label: str, tmp_path: Path) -> None:
    """A matrix of codes has other tensors than one of floats; of the rest, all that a layer lacks."""
    save_quantized_model(CASES[label][0], tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    check_weights(tmp_path, "auto", config)
    with pytest.raises(CorruptModel, match=r"tensor model\.layers\.3\.input_layernorm\.weight .* is missing"):
        check_weights(tmp_path, "auto", replace(config, num_layers=4))


@pytest.mark.parametrize(
    ("layout", "kind", "changed", "message"),
    [
        (
            "awq",
            "qweight",
            lambda codes: codes.float(),
            r"qweight is F32 .* expected I32 .* for awq of 4 bits",
        ),
        ("awq", "scales", lambda scales: scales.int(), r"scales is I32 .* expected F16 or BF16 or F32"),
        ("gptq", "qweight", without_last, r"gptq of 4 bits in groups of 32 \(quantization_config"),
        ("gptq", "qzeros", without, r"qzeros \[.*\] is missing"),
        ("pack-quantized", "weight_scale", lambda scales: scales[:, :1], "weight_scale is .* expected"),
        ("int-quantized", "weight_scale", without, r"weight_scale \[.*\] is missing"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_refused_before_an_engine_starts(
    layout: str, kind: str, changed: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    save_quantized_model(Case(layout), tmp_path)
    change_stored(tmp_path, f"down_proj.{kind}", changed)
    with pytest.raises(CorruptModel, match=message):
        check_weights(tmp_path, "auto", ModelConfig.from_folder(tmp_path))


def test_codes_without_a_configuration_name_what_is_missing(tmp_path: Path) -> None:
    save_quantized_model(Case("awq"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptModel, match=r"is missing .*; its qweight needs a quantization_config"):
        check_weights(tmp_path, "auto", ModelConfig.from_folder(tmp_path))


def test_sizes_and_keys(tmp_path: Path) -> None:
    save_quantized_model(Case("gptq", is_symmetric=True), tmp_path)

    def opened(quantization: Quantization) -> Checkpoint:
        return open_checkpoint(tmp_path, dtype=torch.bfloat16, quantization=quantization)

    kept, widened, rounded = opened("auto"), opened("none"), opened("int8")
    assert (kept.stored_in, widened.stored_in, rounded.stored_in) == ("gptq-int4", "", "int8")
    assert (kept.layer_width, kept.table_width) == (4.5 / 8, 2)
    assert (widened.layer_width, widened.table_width) == (2, 2)
    assert len({each.digest for each in (kept, widened, rounded)}) == 3
    weight = rounded.weight(f"{NAME}.weight", (64, 64))
    assert isinstance(weight, QuantizedWeight) and weight.format.bits == 8


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_symmetric_codes_with_other_zero_points_keep_them(layout: str, tmp_path: Path) -> None:
    _, values = write_matrix(tmp_path, Case(layout), (72, 64))
    symmetric = Case(layout, is_symmetric=True)
    write_config(tmp_path, {"quantization_config": symmetric.config})
    checkpoint = open_checkpoint(tmp_path, dtype=torch.float32, quantization="auto")
    assert torch.equal(dequantized(checkpoint.weight(f"{NAME}.weight", (72, 64))), values)


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_symmetric_codes_need_no_zero_points(layout: str, tmp_path: Path) -> None:
    _, values = write_matrix(tmp_path, Case(layout, is_symmetric=True), (72, 64))
    change_stored(tmp_path, "qzeros", without)
    checkpoint = open_checkpoint(tmp_path, dtype=torch.float32, quantization="auto")
    assert torch.equal(dequantized(checkpoint.weight(f"{NAME}.weight", (72, 64))), values)


def test_reordered_inputs_are_refused_when_opening(tmp_path: Path) -> None:
    write_matrix(tmp_path, Case("gptq"), (72, 64))
    change_stored(tmp_path, "g_idx", lambda groups: groups.flip(0))
    with pytest.raises(UnsupportedModel, match=r"q_proj\.g_idx has groups .*desc_act.* neighbouring inputs"):
        open_checkpoint(tmp_path, dtype=torch.float32, quantization="auto")


@pytest.mark.parametrize(
    ("layout", "kind", "changed", "message"),
    [
        ("gptq", "qweight", without_last, r"q_proj\.qweight has shape \[7, 72\], expected \[8, 72\]"),
        ("gptq", "scales", without_last, r"q_proj\.scales has shape \[1, 72\], expected \[2, 72\]"),
        ("awq", "qzeros", without_last, r"q_proj\.qzeros has shape \[1, 9\], expected \[2, 9\]"),
        ("pack-quantized", "weight_shape", without_last, r"q_proj\.weight_shape has shape \[1\]"),
        (
            "pack-quantized",
            "weight_zero_point",
            without_last,
            r"weight_zero_point has shape \[8, 2\], expected \[9, 2\]",
        ),
        ("awq", "scales", without, r"tensor .*q_proj\.scales \[2, 72\] is missing"),
        ("awq", "qzeros", without, r"qzeros \[2, 9\] is missing"),
        ("awq", "scales", lambda scales: scales * torch.inf, r"tensor .* has scales .*finite"),
        ("awq", "scales", lambda scales: scales.int(), r"scales is torch\.int32, expected floats"),
        (
            "pack-quantized",
            "weight_shape",
            lambda shape: torch.tensor([72, 60]),
            r"has shape \[72, 60\], expected",
        ),
        ("int-quantized", "weight", lambda codes: torch.full_like(codes, 9), "more than 4 bits"),
    ],
)
def test_damaged_matrices_are_named(
    layout: str, kind: str, changed: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    write_matrix(tmp_path, Case(layout), (72, 64))
    change_stored(tmp_path, f"{NAME}.{kind}", changed)
    checkpoint = open_checkpoint(tmp_path, dtype=torch.float32, quantization="auto")
    with pytest.raises(CorruptModel, match=message):
        checkpoint.weight(f"{NAME}.weight", (72, 64))
