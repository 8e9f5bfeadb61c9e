"""Quantizations that are not read are refused by name, from the configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backfill.core.errors import CorruptModel, UnsupportedModel
from backfill.models.config import ModelConfig
from backfill.models.fields import Fields
from backfill.models.quantization import StoredQuantization, stored_quantization
from tests.models.quantized import Case
from tests.models.tiny import save_tiny_llama_config

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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantization bitsandbytes .* gptq .4 and 8",
        ),
        ({"quant_method": "fp8"}, "quantization fp8 is not supported"),
        ({}, "quantization unknown is not supported"),
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
    save_tiny_llama_config(tmp_path, quantization_config=config or {"bits": 4})
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "bits": "four"}, r"quantization_config\.bits must be a positive integer"),
        ({**GPTQ, "group_size": 0}, "group_size must be a positive integer, got 0"),
        (with_weights(PACKED, group_size=-2), "group_size must be a positive integer, got -2"),
        ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, r"config_groups\.W4A16 must be an object"),
    ],
)
def test_wrong_values_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptModel, match=message):
        parsed(config)
