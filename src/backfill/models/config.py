"""A model folder's ``config.json``, parsed and checked once."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from enum import StrEnum
from pathlib import Path

from backfill.core.block import KVLayout
from backfill.core.errors import CorruptModel
from backfill.models.fields import Fields
from backfill.models.quantization import stored_quantization
from backfill.models.resolve import told_what_to_delete
from backfill.models.rope import RopeConfig, rope_config

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "OPTForCausalLM",
)
_DTYPES = ("bfloat16", "float16", "float32")
_OPT_NORM_EPS = 1e-5  # fixed in the architecture, not in its config.json
OPT_POSITION_OFFSET = 2  # rows before position 0 in OPT's table of learned positions


class Architecture(StrEnum):
    """The decoder a model is built from; Mistral and Qwen are Llama with other flags."""

    LLAMA = "llama"
    OPT = "opt"


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
    sliding_window: int | None  # positions each layer attends to: the last ones, a token's own included
    dtype: str  # what config.json names: "bfloat16", "float16" or "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    # opt: width of the embedding table; if not hidden_size, there are project_in and project_out
    word_embed_proj_dim: int = 0
    do_layer_norm_before: bool = True  # opt
    final_layer_norm: bool = True  # opt: False for opt-350m

    @property
    def shape_key(self) -> str:
        """Readable shape and a digest of all fields: models with the same key have the same step times."""
        digest = hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:8]
        return f"{self.architecture}-{self.num_layers}x{self.hidden_size}-{digest}"

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Parse ``folder/config.json``.

        Raises:
            ModelNotFound: there is no config.json.
            CorruptModel: it is not JSON; or as ``from_fields``.
            UnsupportedModel: as ``from_fields``.
        """
        with told_what_to_delete(folder):
            return cls.from_fields(Fields.from_file(Path(folder) / "config.json"))

    @classmethod
    def from_fields(cls, fields: Fields) -> ModelConfig:
        """Parse the contents of a ``config.json``, transformers 4 or 5 style.

        Raises:
            CorruptModel: a value has the wrong type, sign or divisibility.
            UnsupportedModel: an architecture, activation, rope kind or quantization that is not implemented.
        """
        architecture = _supported_architecture(fields)
        is_opt = architecture == "OPTForCausalLM"
        config = _opt_config(fields) if is_opt else _llama_config(fields, architecture)
        _check_heads(fields.path, config)
        return config

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def embedding_size(self) -> int:
        """Width of the embedding table and of the output projection's input."""
        return self.word_embed_proj_dim or self.hidden_size

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of a token's keys and values, all layers together. Args: see ``KVLayout``."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, 1, dtype_bytes).block_bytes


def _supported_architecture(fields: Fields) -> str:
    """The first supported name in ``architectures``.

    Raises: UnsupportedModel, for a quantization too; CorruptModel.
    """
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fields.wrong("architectures", "a list of class names")
    found: str | None = next((name for name in names if name in SUPPORTED_ARCHITECTURES), None)
    if found is None:
        raise fields.unsupported("architecture", ", ".join(names), SUPPORTED_ARCHITECTURES)
    stored_quantization(fields)
    return found


def _llama_config(fields: Fields, architecture: str) -> ModelConfig:
    act = fields.text("hidden_act", "silu")
    if act != "silu":
        raise fields.unsupported("hidden_act", act, ("silu",))
    mistral, qwen2, qwen3 = (architecture == f"{name}ForCausalLM" for name in ("Mistral", "Qwen2", "Qwen3"))
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    head_dim = fields.size("head_dim", 128 if qwen3 else hidden_size // num_heads or 1)
    if fields.values.get("head_dim") is None and not qwen3 and hidden_size % num_heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
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
        norm_eps=fields.positive("rms_norm_eps", 1e-6, is_nullable=False),
        hidden_act=act,
        rope=rope_config(fields, positions),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        qk_norm=qwen3,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        sliding_window=_sliding_window(fields, architecture, num_layers, positions),
        dtype=_dtype(fields),
        bos_token_id=fields.token_id("bos_token_id", 1 if has_default_ids else None),
        eos_token_ids=fields.token_ids("eos_token_id", 2 if has_default_ids else None),
    )


def _opt_config(fields: Fields) -> ModelConfig:
    act = fields.text("activation_function", "relu")
    if act != "relu":
        raise fields.unsupported("activation_function", act, ("relu",))
    if not fields.flag("layer_norm_elementwise_affine", True):
        raise fields.unsupported("layer_norm_elementwise_affine", "false", ("true",))
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


def _dtype(fields: Fields) -> str:
    """The dtype the weights were saved in: transformers 5 calls it ``dtype``, 4 ``torch_dtype``."""
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.unsupported(key, name, _DTYPES)
    return name


def _sliding_window(fields: Fields, architecture: str, num_layers: int, positions: int) -> int | None:
    """The window if all layers have it and it is shorter than the context; None if no layer has it.

    Raises: UnsupportedModel if only some layers have a window.
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
        raise fields.unsupported("sliding_window", f"in {num_windowed} of {num_layers} layers", supported)
    return window


def _check_heads(path: Path, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CorruptModel(
            f"{path}: num_attention_heads ({config.num_heads}) must be a multiple of "
            f"num_key_value_heads ({config.num_kv_heads})"
        )
    if config.rope is not None and config.head_dim % 2:
        raise CorruptModel(f"{path}: head_dim must be even for rotary positions, got {config.head_dim}")
