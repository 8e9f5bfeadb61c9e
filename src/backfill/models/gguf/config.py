"""A GGUF file's metadata as ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backfill.core.errors import CorruptModel, UnsupportedModel
from backfill.models.frequencies import inverse_frequencies
from backfill.models.gguf.file import GgufFile, GgufTensor
from backfill.models.rope import RopeConfig

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# original_max_position_embeddings, low_freq_factor and high_freq_factor of every published Llama 3.
_LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def hf_config(file: GgufFile) -> dict[str, Any]:
    """``config.json`` of the model.

    Raises: UnsupportedModel for features without an equivalent; CorruptModel for missing or mistyped keys.
    """
    arch = file.need("general.architecture", str)
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {arch[:60]!r} is not supported; supported: {known}"
        )
    _refuse_unmapped(file, arch)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptModel(f"{file.path}: tensor token_embd.weight is missing")
    num_heads = _uniform(file, f"{arch}.attention.head_count")
    hidden_size = file.need(f"{arch}.embedding_length", int)
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden_size // max(num_heads, 1))
    if f"{arch}.attention.key_length" not in file.fields and hidden_size % max(num_heads, 1):
        raise CorruptModel(
            f"{file.path}: {arch}.embedding_length ({hidden_size}) must be a multiple of "
            f"{arch}.attention.head_count ({num_heads})"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(f"{arch}.{key}", int, head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: {arch}.{key} must equal the head size {head_dim}")
    return {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _uniform(file, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _num_layers(file, arch),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _uniform(file, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": file.need(f"{arch}.context_length", int),
        "rms_norm_eps": file.need(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": False,
        "use_sliding_window": False,
        **_rope_fields(file, arch, head_dim),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int),
        "torch_dtype": "bfloat16",
    }


def _num_layers(file: GgufFile, arch: str) -> int:
    """The model's number of layers. Raises: CorruptModel if the file has fewer tensors than layers."""
    count = file.need(f"{arch}.block_count", int)
    if count > len(file.tensors):
        raise CorruptModel(
            f"{file.path}: {arch}.block_count is {count}, but there are {len(file.tensors)} tensors"
        )
    return count


def _refuse_unmapped(file: GgufFile, arch: str) -> None:
    """Raise UnsupportedModel for metadata that would change the model's output and is not implemented."""
    if file.get("split.count", int, 1) > 1:
        raise UnsupportedModel(f"{file.path} is one of several split files; merge them with gguf-split first")
    for key in (
        "expert_count",
        "attention.sliding_window",
        "attention.scale",
        "logit_scale",
        "residual_scale",
    ):
        if file.fields.get(f"{arch}.{key}"):
            raise UnsupportedModel(f"{file.path}: {arch}.{key} is set, which is not supported")


def _uniform(file: GgufFile, key: str, default: int | None = None) -> int:
    """A size that GGUF may give per layer; only one size for all layers is supported.

    Raises: UnsupportedModel if it differs between layers; CorruptModel if it is missing or no integer.
    """
    value = file.fields.get(key, default)
    if isinstance(value, list) and value:
        if len(set(value)) > 1:
            raise UnsupportedModel(f"{file.path}: {key} differs between layers, which is not supported")
        value = value[0]
    if not isinstance(value, int):
        raise CorruptModel(f"{file.path}: {key} must be an integer, got {value!r}")
    return value


def _rope_fields(file: GgufFile, arch: str, head_dim: int) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of ``config.json``. Raises: UnsupportedModel, CorruptModel."""
    theta = file.get(f"{arch}.rope.freq_base", float, 10_000.0)
    prefix = f"{arch}.rope.scaling."
    kind = file.get(prefix + "type", str, "none")
    factor = file.get(prefix + "factor", float, file.get(f"{arch}.rope.scale_linear", float, 1.0))
    original = file.get(prefix + "original_context_length", int, file.need(f"{arch}.context_length", int))
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        return {"rope_theta": theta, "rope_scaling": _llama3_scaling(file, factors, theta, head_dim)}
    if kind == "yarn":
        return {"rope_theta": theta, "rope_scaling": _yarn_scaling(file, prefix, factor, original)}
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{file.path}: rope scaling {kind[:60]!r} is not supported; supported: none, linear, yarn"
        )
    linear = {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None
    return {"rope_theta": theta, "rope_scaling": linear}


def _yarn_scaling(file: GgufFile, prefix: str, factor: float, original: int) -> dict[str, Any]:
    """YaRN's ``rope_scaling``; ``original`` is the context before stretching, in tokens.

    Raises: UnsupportedModel if a parameter that only llama.cpp has is not neutral.
    """
    for key, neutral in (
        ("yarn_ext_factor", 1.0),
        ("yarn_attn_factor", 1.0),
        ("attn_factor", 1.0),
        ("yarn_log_multiplier", 0.0),
    ):
        if file.get(prefix + key, float, neutral) != neutral:
            raise UnsupportedModel(f"{file.path}: {prefix}{key} other than {neutral:g} is not supported")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        value = file.get(f"{prefix}yarn_{key}", float)
        if value is not None:
            scaling[key] = value
    return scaling


def _llama3_scaling(file: GgufFile, factors: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's rope parameters, recovered from the divisors of the frequencies that GGUF stores.

    All published Llama 3 models share three of the four parameters, and the largest divisor is the fourth.
    These parameters must reproduce every divisor.

    Raises: UnsupportedModel if they do not.
    """
    stored = factors.dequantized(0, 1).ravel()
    factor = float(stored.max())
    rope = RopeConfig(theta, "llama3", factor, _LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH)
    plain, _ = inverse_frequencies(RopeConfig(theta), head_dim)
    scaled, _ = inverse_frequencies(rope, head_dim)
    if stored.shape != plain.shape or not np.allclose(plain / scaled, stored, rtol=1e-4):
        raise UnsupportedModel(f"{file.path}: rope_freqs.weight is not that of a Llama 3 model")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def generation_config(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """``generation_config.json``; GGUF has one key for the end of text and one for the end of a turn."""
    ends = [config["eos_token_id"], file.get("tokenizer.ggml.eot_token_id", int)]
    known = {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"]}
    ids = sorted({i for i in ends if i is not None})
    return {key: value for key, value in known.items() if value is not None} | (
        {"eos_token_id": ids} if ids else {}
    )
