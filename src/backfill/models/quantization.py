"""The ``quantization_config`` of a ``config.json``: which matrices of codes its safetensors hold.

The keys are those of AutoAWQ, of AutoGPTQ and GPTQModel, and of compressed-tensors (``QuantizationConfig``).
That package needs torch, and the HTTP process, which has none, refuses models too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from backfill.models.fields import Fields

SUPPORTED_METHODS = (
    "awq (4 bits, version gemm), gptq (4 and 8 bits), compressed-tensors (integers of 4 and 8 bits)"
)
_SCALE_TYPES = ("F16", "BF16", "F32")
OUT, IN = 0, 1  # dimensions of a matrix


class CodeTensors(NamedTuple):
    """The tensors of a matrix ``[out, in]``, by what stands for ``weight`` in its name.

    Layouts are those of AutoAWQ's ``WQLinear_GEMM``, AutoGPTQ's ``QuantLinear`` and compressed-tensors'
    ``pack_to_int32``.

    Attributes:
        packed: the dimension along which words of 32 bits have neighbouring codes; None: int8, a code each.
        has_inputs_first: tensors are ``[in, out]``.
        order: the places of codes in a word.
        is_zero_less_one: of what is stored of a zero point.
    """

    codes: str
    scales: str
    zeros: str
    packed: int | None
    has_inputs_first: bool = False
    order: tuple[int, ...] | None = None
    is_zero_less_one: bool = False


_GPTQ = CodeTensors("qweight", "scales", "qzeros", IN, has_inputs_first=True)
_LAYOUTS = {
    "awq": _GPTQ._replace(packed=OUT, order=(0, 4, 1, 5, 2, 6, 3, 7)),
    "gptq": _GPTQ._replace(is_zero_less_one=True),
    "gptq_v2": _GPTQ,
    "pack-quantized": CodeTensors("weight_packed", "weight_scale", "weight_zero_point", IN),
    "int-quantized": CodeTensors("weight", "weight_scale", "weight_zero_point", None),
}


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

    @property
    def tensors(self) -> CodeTensors:
        return _LAYOUTS[self.layout]

    @property
    def code_type(self) -> str:
        """Of codes and zero points, as safetensors name it."""
        return "I8" if self.tensors.packed is None else "I32"

    def stored_shapes(
        self, num_outputs: int, num_inputs: int
    ) -> Iterator[tuple[str, tuple[str, ...], list[int]]]:
        """What stands for ``weight`` in a name, types and shape of the tensors that a matrix must have."""
        layout, num_groups = self.tensors, -(-num_inputs // (self.group or num_inputs))

        def shape(sizes: list[int], packed: int | None) -> list[int]:
            if packed is not None:
                sizes[packed] = -(-sizes[packed] // (32 // self.bits))
            return sizes[::-1] if layout.has_inputs_first else sizes

        yield layout.codes, (self.code_type,), shape([num_outputs, num_inputs], layout.packed)
        yield layout.scales, _SCALE_TYPES, shape([num_outputs, num_groups], None)
        if self.has_zero_points:
            along = None if layout.packed is None else OUT
            yield layout.zeros, (self.code_type,), shape([num_outputs, num_groups], along)


def stored_quantization(config: Fields) -> StoredQuantization | None:
    """Of a ``config.json``; None: weights are floats.

    Raises:
        CorruptModel: a value has the wrong type.
        UnsupportedModel: a method, or a variant of one, that is not read here.
    """
    section = config.section("quantization_config")
    if section is None:
        return None
    readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}
    method = section.text("quant_method", "")
    if not method:
        raise section.wrong("quant_method", f"one of {', '.join(readers)}")
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
    found, has_activations = set[StoredQuantization](), False
    for group in () if groups is None else map(groups.section, groups.values):
        if group is not None and (weights := group.section("weights")) is not None:
            keys = (group, "input_activations"), (group, "output_activations"), (section, "kv_cache_scheme")
            has_activations |= any(place.section(key) is not None for place, key in keys)
            found.add(_scheme(weights, layout.replace("naive", "int")))
    if len(found) != 1:
        raise section.unsupported("quantization_config.config_groups", f"with {len(found)} schemes", ("1",))
    return replace(found.pop(), has_activations=has_activations)


def _scheme(weights: Fields, layout: str) -> StoredQuantization:
    """The weights of one of the ``config_groups`` of compressed-tensors."""
    bits, size = weights.size("num_bits", 8), weights.optional_integer("group_size")
    _check(weights, "type", weights.text("type", "int"), ("int",))
    _check(weights, "num_bits", bits, (4, 8))
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text("strategy", implied).lower()
    _check(weights, "strategy", strategy, ("group", "channel"))
    _check(weights, "actorder", weights.values.get("actorder"), (None, False, "static", "weight"))
    group = None if strategy == "channel" else weights.size("group_size")
    has_zeros = not weights.flag("symmetric", True)
    return StoredQuantization("compressed-tensors", layout, bits, group, has_zeros)


def _group(section: Fields) -> int | None:
    return None if section.optional_integer("group_size") == -1 else section.size("group_size", 128)


def _check(section: Fields, key: str, found: Any, supported: Sequence[Any]) -> None:
    """Raises: UnsupportedModel."""
    if found not in supported:
        names = dict.fromkeys(str(each or "none") for each in supported)
        raise section.unsupported(f"{section.prefix}{key}", str(found or "none"), names)
