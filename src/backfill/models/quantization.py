"""The ``quantization_config`` of a ``config.json``: which matrices of codes its safetensors hold.

The keys are those of AutoAWQ, of AutoGPTQ and GPTQModel, and of compressed-tensors (``QuantizationConfig``).
That package needs torch, and the HTTP process, which has none, refuses models too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backfill.models.fields import Fields

SUPPORTED_METHODS = (
    "awq (4 bits, version gemm), gptq (4 and 8 bits), compressed-tensors (integers of 4 and 8 bits)"
)


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How a checkpoint's quantized matrices are stored; others stand beside them as floats.

    Attributes:
        method: ``quant_method``.
        layout: of the tensors: awq, gptq, gptq_v2, pack-quantized or int-quantized.
        bits: of a code, 4 or 8.
        group: inputs that share a scale; None: all of an output.
        has_zero_points: else the middle code stands for 0.
        has_activations: the method rounds activations or KV too, which is not done here.
    """

    method: str
    layout: str
    bits: int
    group: int | None
    has_zero_points: bool
    has_activations: bool = False


def stored_quantization(config: Fields) -> StoredQuantization | None:
    """Of a ``config.json``; None: weights are floats.

    Raises:
        CorruptModel: a value has the wrong type.
        UnsupportedModel: a method, or a variant of one, that is not read here.
    """
    section = config.section("quantization_config")
    if section is None:
        return None
    method = section.text("quant_method", "unknown")
    readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}
    if method not in readers:
        raise config.unsupported("quantization", method, (SUPPORTED_METHODS, "float weights", "GGUF files"))
    return readers[method](section)


def _awq(section: Fields) -> StoredQuantization:
    bits = section.size("bits", 4)
    _check(section, "bits", bits, (4,))
    _check(section, "version", section.text("version", "gemm").lower(), ("gemm",))
    return StoredQuantization("awq", "awq", bits, _group(section), section.flag("zero_point", True))


def _gptq(section: Fields) -> StoredQuantization:
    bits, layout = section.size("bits"), section.text("checkpoint_format", "gptq")
    _check(section, "bits", bits, (4, 8))
    _check(section, "checkpoint_format", layout, ("gptq", "gptq_v2"))
    dynamic = section.section("dynamic")
    if dynamic is not None and not all(pattern.startswith("-:") for pattern in dynamic.values):
        raise section.unsupported("quantization_config.dynamic", "with other settings", ("exclusions (-:)",))
    return StoredQuantization("gptq", layout, bits, _group(section), not section.flag("sym", False))


def _compressed_tensors(section: Fields) -> StoredQuantization:
    layout = section.text("format", "")
    _check(section, "format", layout, ("pack-quantized", "int-quantized", "naive-quantized"))
    if (sparsity := section.section("sparsity_config")) is not None:
        _check(sparsity, "format", sparsity.text("format", "dense"), ("dense",))
    if (transforms := section.section("transform_config")) is not None:
        _check(section, "transform_config", ", ".join(transforms.values), ("",))
    groups = section.section("config_groups")
    found = set[StoredQuantization]()
    for group in () if groups is None else map(groups.section, groups.values):
        if group is not None and (weights := group.section("weights")) is not None:
            keys = (group, "input_activations"), (group, "output_activations"), (section, "kv_cache_scheme")
            has_others = any(place.section(key) is not None for place, key in keys)
            found.add(_scheme(weights, layout.replace("naive", "int"), has_others))
    if len(found) != 1:
        raise section.unsupported("quantization_config.config_groups", f"with {len(found)} schemes", ("1",))
    return found.pop()


def _scheme(weights: Fields, layout: str, has_activations: bool) -> StoredQuantization:
    """One of the ``config_groups`` of compressed-tensors."""
    bits, size = weights.size("num_bits", 8), weights.optional_integer("group_size")
    _check(weights, "type", weights.text("type", "int"), ("int",))
    _check(weights, "num_bits", bits, (4, 8))
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text("strategy", implied).lower()
    _check(weights, "strategy", strategy, ("group", "channel"))
    _check(weights, "actorder", weights.values.get("actorder"), (None, False, "static", "weight"))
    group = None if strategy == "channel" else weights.size("group_size")
    has_zeros = not weights.flag("symmetric", True)
    return StoredQuantization("compressed-tensors", layout, bits, group, has_zeros, has_activations)


def _group(section: Fields) -> int | None:
    return None if section.optional_integer("group_size") == -1 else section.size("group_size", 128)


def _check(section: Fields, key: str, found: Any, supported: Sequence[Any]) -> None:
    """Raises: UnsupportedModel."""
    if found not in supported:
        names = (str(each) or "none" for each in supported)
        raise section.unsupported(f"{section.prefix}{key}", str(found) or "none", names)
