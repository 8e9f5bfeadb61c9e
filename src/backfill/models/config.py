"""What a model folder says about its model, checked once, so that the rest of the house need not doubt it.

Reads ``config.json`` and ``generation_config.json`` by hand: transformers' own configuration classes
import torch, which the HTTP process must not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from backfill.core.errors import CorruptModel, ModelNotFound, UnsupportedModel

RopeKind = Literal["default", "linear", "llama3", "yarn"]

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "OPTForCausalLM",
)
_DTYPES = ("bfloat16", "float16", "float32")
_OPT_NORM_EPS = 1e-5  # fixed in the architecture, not in its config.json
OPT_POSITION_OFFSET = 2  # rows of OPT's learned position table before that of position 0


class Architecture(StrEnum):
    """Which decoder a model is built from; Mistral and Qwen are Llama with other flags."""

    LLAMA = "llama"
    OPT = "opt"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding over the whole head; a field after ``kind`` belongs to the kinds named.

    ``attention_factor`` None means "as YaRN derives it from ``factor``".
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    attention_factor: float | None = None  # yarn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dimensions and switches of one decoder-only model.

    Llama family: RMS norm before each half, rotary positions, gated SiLU. OPT: layer norm, learned
    positions (``OPT_POSITION_OFFSET`` rows more than ``max_position_embeddings``), plain ReLU.
    """

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str  # "silu" (llama), "relu" (opt)
    rope: RopeConfig | None  # None: learned positions
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm of each head of q and k, before the rotation
    tie_word_embeddings: bool
    sliding_window: (
        int | None
    )  # a token attends to this many last positions, its own included, in every layer
    dtype: str  # what config.json names: "bfloat16", "float16" or "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    word_embed_proj_dim: int = 0  # opt: width of the embedding table; project_in/out exist if != hidden_size
    do_layer_norm_before: bool = True  # opt
    final_layer_norm: bool = True  # opt: False for opt-350m

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Parse ``folder/config.json``, transformers 4 or 5 style.

        Raises:
            ModelNotFound: there is no config.json.
            CorruptModel: it is not JSON, or a value has the wrong type, sign or divisibility.
            UnsupportedModel: an architecture, activation, rope kind or quantization not implemented.
        """
        path = Path(folder) / "config.json"
        fields = _Fields(path, _read_object(path))
        architecture = _supported_architecture(fields)
        config = (
            _opt_config(fields) if architecture == "OPTForCausalLM" else _llama_config(fields, architecture)
        )
        _check_heads(fields.path, config)
        return config

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def num_parameters(self) -> int:
        """Weights as stored, a tied output projection counted once."""
        if self.architecture is Architecture.OPT:
            return _opt_parameters(self)
        return _llama_parameters(self)

    def weight_bytes(self, dtype_bytes: int) -> int:
        return self.num_parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values one token keeps over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters the model's authors recommend; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: str | Path) -> GenerationDefaults:
        """Parse ``folder/generation_config.json``; all None when there is none.

        Raises: CorruptModel if the file is not JSON or a value is out of range.
        """
        path = Path(folder) / "generation_config.json"
        if not path.is_file():
            return cls()
        fields = _Fields(path, _read_object(path))
        return cls(
            temperature=fields.optional_number("temperature", minimum=0.0),
            top_p=fields.optional_number("top_p", minimum=0.0, maximum=1.0),
            top_k=fields.optional_integer("top_k"),
            min_p=fields.optional_number("min_p", minimum=0.0, maximum=1.0),
            repetition_penalty=fields.optional_number("repetition_penalty", minimum=0.0),
            eos_token_ids=fields.token_ids("eos_token_id"),
        )


def end_token_ids(
    config: ModelConfig, generation: GenerationDefaults, tokenizer_eos_id: int | None = None
) -> tuple[int, ...]:
    """Every id that ends a sequence, ascending: the union of what the three files say.

    They disagree in practice: chat models end a turn with a token only one of them names.
    """
    ids = {*config.eos_token_ids, *generation.eos_token_ids}
    if tokenizer_eos_id is not None:
        ids.add(tokenizer_eos_id)
    return tuple(sorted(ids))


def rope_inverse_frequencies(config: ModelConfig) -> tuple[npt.NDArray[np.float32], float]:
    """``inverse_frequencies`` of a model; it must have rotary positions."""
    assert config.rope is not None, "a model with learned positions has no rotary frequencies"
    return inverse_frequencies(config.rope, config.head_dim)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[npt.NDArray[np.float32], float]:
    """Angle per position of each rotated pair, and the factor on cosine and sine.

    Returns: float32 ``[head_dim / 2]``, and 1.0 but for YaRN. Pair i is elements (i, i + head_dim / 2).
    Computed in float32 step by step as transformers does: a difference in the last bit is multiplied by
    the position, so a more precise result would be a different model at long contexts.
    Source: transformers ``modeling_rope_utils.ROPE_INIT_FUNCTIONS``.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.power(np.float32(rope.theta), exponents)
    frequencies = (np.float32(1.0) / periods).astype(np.float32)
    match rope.kind:
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / np.float32(rope.factor), 1.0
        case "llama3":
            return _llama3_frequencies(frequencies, rope), 1.0
        case "yarn":
            return _yarn_frequencies(periods, rope, head_dim), _yarn_attention_factor(rope)


def _llama3_frequencies(frequencies: npt.NDArray[np.float32], rope: RopeConfig) -> npt.NDArray[np.float32]:
    """Long wavelengths divided by ``factor``, short ones kept, those between interpolated."""
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / frequencies
    scaled = frequencies / np.float32(rope.factor)
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled + smooth * frequencies
    result = np.where(wavelengths > context / low, scaled, blended)
    return np.where(wavelengths < context / high, frequencies, result).astype(np.float32)


def _yarn_frequencies(
    periods: npt.NDArray[np.float32], rope: RopeConfig, dim: int
) -> npt.NDArray[np.float32]:
    """Blend of kept and stretched frequencies over the range of dimensions YaRN's betas span."""

    def dimension_turning(rotations: float) -> float:
        context = rope.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    kept = np.float32(1) - ramp
    stretched = np.float32(1) / (np.float32(rope.factor) * periods)
    blended: npt.NDArray[np.float32] = stretched * (1 - kept) + (np.float32(1) / periods) * kept
    return blended.astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _llama_parameters(config: ModelConfig) -> int:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = (
        hidden * (2 * query + 2 * kv)
        + config.qkv_bias * (query + 2 * kv)
        + config.o_bias * hidden
        + config.qk_norm * 2 * config.head_dim
        + 3 * hidden * inner
        + config.mlp_bias * (2 * inner + hidden)
        + 2 * hidden
    )
    tables = 1 if config.tie_word_embeddings else 2
    return tables * config.vocab_size * hidden + config.num_layers * layer + hidden


def _opt_parameters(config: ModelConfig) -> int:
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.word_embed_proj_dim
    layer = (
        4 * hidden * hidden
        + config.qkv_bias * 3 * hidden
        + config.o_bias * hidden
        + 2 * hidden * inner
        + config.mlp_bias * (inner + hidden)
        + 4 * hidden
    )
    tables = 1 if config.tie_word_embeddings else 2
    return (
        tables * config.vocab_size * width
        + (config.max_position_embeddings + OPT_POSITION_OFFSET) * hidden
        + (2 * width * hidden if width != hidden else 0)
        + config.num_layers * layer
        + (2 * hidden if config.final_layer_norm else 0)
    )


class _Fields:
    """A JSON object whose values are checked as they are read; an error names the file, key and value."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    def wrong(self, key: str, expected: str) -> CorruptModel:
        return CorruptModel(
            f"{self.path}: {self._prefix}{key} must be {expected}, got {self.values.get(key)!r}"
        )

    def section(self, key: str) -> _Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return _Fields(self.path, value, f"{self._prefix}{key}.")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a default it must be there."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.wrong(key, "an integer")
        return value

    def optional_number(
        self, key: str, *, minimum: float = -math.inf, maximum: float = math.inf
    ) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not minimum <= value <= maximum:
            bounds = f" in [{minimum:g}, {maximum:g}]" if math.isfinite(minimum) else ""
            raise self.wrong(key, f"a number{bounds}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.optional_number(key)
        if value is None and default is not None:
            return default
        if value is None or not 0 < value < math.inf:
            raise self.wrong(key, "a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """One id, a list of ids, or none; the default stands in for an absent key, not for null."""
        value = self.values.get(key, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise self.wrong(key, "a token id or a list of them")
        # Older configurations write -1 for "none".
        return tuple(i for i in ids if i >= 0)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        return next(iter(self.token_ids(key, default)), None)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not valid JSON: {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFound(f"{path} does not exist") from None
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} must hold a JSON object")
    return value


def _supported_architecture(fields: _Fields) -> str:
    """The one supported name in ``architectures``. Raises: UnsupportedModel, CorruptModel."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fields.wrong("architectures", "a list of class names")
    found: str | None = next((name for name in names if name in SUPPORTED_ARCHITECTURES), None)
    if found is None:
        _refuse(fields, "architecture", ", ".join(names), SUPPORTED_ARCHITECTURES)
    if fields.values.get("quantization_config") is not None:
        section = fields.section("quantization_config")
        method = section.values.get("quant_method", "unknown") if section else "unknown"
        _refuse(fields, "quantization", str(method), ("none (float weights in safetensors)",))
    return found


def _refuse(fields: _Fields, feature: str, found: str, supported: Iterable[str]) -> NoReturn:
    raise UnsupportedModel(
        f"{fields.path}: {feature} {found} is not supported; supported: {', '.join(supported)}"
    )


def _llama_config(fields: _Fields, architecture: str) -> ModelConfig:
    act = fields.text("hidden_act", "silu")
    if act != "silu":
        _refuse(fields, "hidden_act", act, ("silu",))
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    head_dim = fields.size(
        "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads or 1
    )
    if (
        fields.values.get("head_dim") is None
        and architecture != "Qwen3ForCausalLM"
        and hidden_size % num_heads
    ):
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    qwen2, mistral = architecture == "Qwen2ForCausalLM", architecture == "MistralForCausalLM"
    attention_bias = fields.flag("attention_bias", False) and not (qwen2 or mistral)
    has_default_ids = architecture in ("LlamaForCausalLM", "MistralForCausalLM")
    num_layers, positions = fields.size("num_hidden_layers"), fields.size("max_position_embeddings")
    return ModelConfig(
        architecture=Architecture.LLAMA,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", 8 if mistral else num_heads),
        head_dim=head_dim,
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=positions,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        hidden_act=act,
        rope=_rope_config(fields, positions),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        sliding_window=_sliding_window(fields, architecture, num_layers, positions),
        dtype=_dtype(fields),
        bos_token_id=fields.token_id("bos_token_id", 1 if has_default_ids else None),
        eos_token_ids=fields.token_ids("eos_token_id", 2 if has_default_ids else None),
    )


def _opt_config(fields: _Fields) -> ModelConfig:
    act = fields.text("activation_function", "relu")
    if act != "relu":
        _refuse(fields, "activation_function", act, ("relu",))
    if not fields.flag("layer_norm_elementwise_affine", True):
        _refuse(fields, "layer_norm_elementwise_affine", "false", ("true",))
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    if hidden_size % num_heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    biased = fields.flag("enable_bias", True)
    norm_first = fields.flag("do_layer_norm_before", True)
    return ModelConfig(
        architecture=Architecture.OPT,
        hidden_size=hidden_size,
        intermediate_size=fields.size("ffn_dim"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        norm_eps=_OPT_NORM_EPS,
        hidden_act=act,
        rope=None,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        qk_norm=False,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        sliding_window=None,
        dtype=_dtype(fields),
        bos_token_id=fields.token_id("bos_token_id", 2),
        eos_token_ids=fields.token_ids("eos_token_id", 2),
        word_embed_proj_dim=fields.size("word_embed_proj_dim", hidden_size),
        do_layer_norm_before=norm_first,
        final_layer_norm=norm_first and not fields.flag("_remove_final_layer_norm", False),
    )


def _dtype(fields: _Fields) -> str:
    """The dtype the weights were saved in: transformers 5 calls it ``dtype``, 4 ``torch_dtype``."""
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        _refuse(fields, key, name, _DTYPES)
    return name


def _sliding_window(fields: _Fields, architecture: str, num_layers: int, positions: int) -> int | None:
    """The window if every layer has it and it is shorter than the context; None if no layer does.

    Raises: UnsupportedModel where only some layers have one.
    """
    if architecture == "LlamaForCausalLM":
        return None
    window = fields.size("sliding_window") if fields.values.get("sliding_window") is not None else None
    num_windowed = num_layers
    if architecture != "MistralForCausalLM":
        if not fields.flag("use_sliding_window", False):
            return None
        first = fields.optional_integer("max_window_layers")
        num_windowed = num_layers - min(28 if first is None else first, num_layers)
        layer_types = fields.values.get("layer_types")
        if isinstance(layer_types, list):
            num_windowed = layer_types.count("sliding_attention")
    if window is None or window >= positions or num_windowed == 0:
        return None
    if num_windowed < num_layers:
        supported = ("a window in all layers or in none",)
        _refuse(fields, "sliding_window", f"in {num_windowed} of {num_layers} layers", supported)
    return window


def _rope_config(fields: _Fields, positions: int) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5), or ``rope_scaling`` and ``rope_theta`` (4)."""
    rope = fields.section("rope_scaling") or fields.section("rope_parameters")
    rope = rope or _Fields(fields.path, {})
    theta = rope.positive("rope_theta", fields.positive("rope_theta", 10_000.0))
    for holder in (fields, rope):
        if holder.positive("partial_rotary_factor", 1.0) != 1.0:
            _refuse(fields, "partial_rotary_factor", str(holder.values["partial_rotary_factor"]), ("1.0",))
    if any(isinstance(value, dict) for value in rope.values.values()):
        _refuse(fields, "a rope for each layer type,", ", ".join(rope.values), ("one for all layers",))
    if theta <= 1:
        raise fields.wrong("rope_theta", "above 1")
    kind = rope.text("rope_type", rope.text("type", "default"))
    original = fields.size("original_max_position_embeddings", positions)
    if fields.values.get("original_max_position_embeddings") is None:
        original = rope.size("original_max_position_embeddings", positions)
    match kind:
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=rope.positive("factor"))
        case "llama3":
            low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
            if high <= low:
                raise rope.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
            return RopeConfig(
                theta=theta,
                kind="llama3",
                factor=rope.positive("factor"),
                original_max_position_embeddings=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=rope.positive("factor", positions / original),
                original_max_position_embeddings=original,
                beta_fast=rope.positive("beta_fast", 32.0),
                beta_slow=rope.positive("beta_slow", 1.0),
                truncate=rope.flag("truncate", True),
                mscale=rope.optional_number("mscale") or 0.0,
                mscale_all_dim=rope.optional_number("mscale_all_dim") or 0.0,
                attention_factor=rope.optional_number("attention_factor"),
            )
    raise UnsupportedModel(
        f"{fields.path}: rope type {kind} is not supported; supported: default, linear, llama3, yarn"
    )


def _check_heads(path: Path, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CorruptModel(
            f"{path}: num_attention_heads ({config.num_heads}) must be a multiple of "
            f"num_key_value_heads ({config.num_kv_heads})"
        )
    if config.rope is not None and config.head_dim % 2:
        raise CorruptModel(f"{path}: head_dim must be even for rotary positions, got {config.head_dim}")
