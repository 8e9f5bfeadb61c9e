"""Convert a GGUF file to a model folder: bf16 safetensors, configuration, tokenizer, chat template.

Everything downstream then reads one format. The ``gguf`` package supplies the format's constants and
the dequantisers; the header is parsed here, because its reader takes seconds for a large vocabulary
and follows the lengths of a damaged file out of bounds.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, TokenType
from gguf.quants import dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from backfill.core.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from backfill.models.config import ModelConfig, RopeConfig, inverse_frequencies

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, units done and units in all (bytes)."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CHUNK_ELEMENTS = 1 << 23  # dequantised at once: 32 MiB of float32, a few times that within the dequantiser
_MAX_DIMS = 4
_LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0

# The regular expressions are those of the tokenizer.json of Llama 3 and Qwen 2.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def convert_gguf(
    source: str | Path,
    folder: str | Path,
    *,
    extra_files: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the model in ``source`` as the folder ``folder``, which must not exist.

    The folder appears complete or not at all: it is written beside its place, synced, and renamed.
    Peak memory is some 0.2 GB beyond the vocabulary, whatever the model's size.

    Args:
        extra_files: texts by file name that go into the folder too, for a cache to recognise its work.
    Returns: ``folder``.
    Raises:
        ModelNotFound: no such file.
        CorruptModel: not a GGUF file, truncated, or its parts contradict each other.
        UnsupportedModel: architecture, tokenizer, rope scaling or tensor type that is not implemented.
        ModelError: the folder cannot be written.
    """
    source, folder = Path(source), Path(folder)
    file = GgufFile(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        try:
            _write_folder(file, staging, progress)
            for name, text in (extra_files or {}).items():
                _write_text(staging / name, text)
            _sync(staging)
            staging.chmod(0o755)
            staging.rename(folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write the converted model to {folder}: {error.strerror or error}") from None
    return folder


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as stored; ``rows``, a view of the file, is uint8 ``[product of shape[:-1], row bytes]``."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in torch
    kind: GGMLQuantizationType
    rows: npt.NDArray[np.uint8]

    def dequantized(
        self, start: int, stop: int, order: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[Any]:
        """Rows ``[start, stop)`` as float32 ``[stop - start, shape[-1]]``, after reordering by ``order``."""
        rows = self.rows[start:stop] if order is None else self.rows[order[start:stop]]
        values: npt.NDArray[Any] = dequantize(np.ascontiguousarray(rows), self.kind)
        return values.reshape(stop - start, self.shape[-1])


class GgufFile:
    """Metadata and tensors of a GGUF file (versions 2 and 3, little-endian), bounds checked.

    Raises: ModelNotFound, CorruptModel, UnsupportedModel.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFound(f"{path} does not exist") from None
        except (OSError, ValueError) as error:
            raise CorruptModel(f"{path} cannot be read: {error}") from None
        cursor = _Cursor(path, mapped)
        num_tensors, num_fields = _read_preamble(cursor)
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.text()
            self.fields[key] = cursor.value(cursor.number("I"))
        self.tensors = {t.name: t for t in _read_tensors(cursor, num_tensors, self.fields)}

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A metadata value of type ``kind``, or ``default``. Raises: CorruptModel on another type."""
        value = self.fields.get(key, default)
        if kind is float and isinstance(value, int):
            value = float(value)
        if value is not None and not isinstance(value, kind):
            raise CorruptModel(f"{self.path}: {key} must be {kind.__name__}, got {str(value)[:60]!r}")
        return value

    def need(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise CorruptModel(f"{self.path}: {key} is missing from the metadata")
        return value


class _Cursor:
    """Reads forward through a mapped GGUF file; nothing is read or allocated beyond its end."""

    _SCALARS: ClassVar = {
        GGUFValueType.UINT8: "B",
        GGUFValueType.INT8: "b",
        GGUFValueType.UINT16: "H",
        GGUFValueType.INT16: "h",
        GGUFValueType.UINT32: "I",
        GGUFValueType.INT32: "i",
        GGUFValueType.FLOAT32: "f",
        GGUFValueType.BOOL: "?",
        GGUFValueType.UINT64: "Q",
        GGUFValueType.INT64: "q",
        GGUFValueType.FLOAT64: "d",
    }

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def take(self, size: int) -> int:
        """Move past ``size`` bytes and return where they began. Raises: CorruptModel beyond the end."""
        start = self.offset
        if size > len(self.data) - start:
            raise CorruptModel(f"{self.path} is damaged or truncated: it ends within its header")
        self.offset = start + size
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self.take(size)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            raise CorruptModel(f"{self.path} is damaged: a string at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self.number(self._code(kind))

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == GGUFValueType.STRING:
            return [self.text() for _ in range(length)]
        dtype = np.dtype("<" + self._code(kind))
        start = self.take(length * dtype.itemsize)
        values: list[Any] = np.frombuffer(self.data, dtype, length, start).tolist()
        return values

    def _code(self, kind: int) -> str:
        try:
            return self._SCALARS[GGUFValueType(kind)]
        except (ValueError, KeyError):
            raise CorruptModel(f"{self.path} is damaged: metadata value of type {kind}") from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata fields."""
    start = cursor.take(4)
    if cursor.data[start : start + 4] != b"GGUF":
        raise CorruptModel(f"{cursor.path} is not a GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        raise UnsupportedModel(f"{cursor.path}: GGUF version {version} is not supported; supported: 2, 3")
    return cursor.number("Q"), cursor.number("Q")


def _read_tensors(cursor: _Cursor, count: int, fields: Mapping[str, Any]) -> Iterator[GgufTensor]:
    headers = []
    for _ in range(count):
        name, num_dims = cursor.text(), cursor.number("I")
        if num_dims > _MAX_DIMS:
            raise CorruptModel(f"{cursor.path} is damaged: tensor {name[:60]!r} has {num_dims} dimensions")
        dims = [cursor.number("Q") for _ in range(num_dims)]
        headers.append((name, tuple(reversed(dims)), cursor.number("I"), cursor.number("Q")))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CorruptModel(f"{cursor.path}: general.alignment must be a positive integer, got {alignment!r}")
    base = math.ceil(cursor.offset / alignment) * alignment
    for name, shape, code, offset in headers:
        kind = _tensor_type(cursor.path, name, code)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise CorruptModel(
                f"{cursor.path}: tensor {name[:60]!r} has shape {list(shape)}, impossible in {kind.name}"
            )
        num_rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
        if base + offset + num_rows * row_bytes > len(cursor.data):
            raise CorruptModel(f"{cursor.path} is truncated: it ends within tensor {name[:60]!r}")
        raw = np.frombuffer(cursor.data, np.uint8, num_rows * row_bytes, base + offset)
        yield GgufTensor(name, shape, kind, raw.reshape(num_rows, row_bytes))


def _tensor_type(path: Path, name: str, code: int) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(code)
    except ValueError:
        raise UnsupportedModel(f"{path}: tensor {name[:60]!r} has unknown type {code}") from None


def _write_folder(file: GgufFile, folder: Path, progress: Progress | None) -> None:
    """All files of the converted model but the marker; the small ones first, since they refuse early."""
    config = _hf_config(file)
    _write_json(folder / "config.json", config)
    ModelConfig.from_folder(folder)
    tensors = list(_planned_tensors(file, config))
    tokenizer, tokenizer_config = _build_tokenizer(file, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    _sync(folder / "tokenizer.json")
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", _generation_config(file, config))
    _write_safetensors(folder / "model.safetensors", tensors, progress)


# --- configuration ---


def _hf_config(file: GgufFile) -> dict[str, Any]:
    """``config.json`` of the model. Raises: UnsupportedModel for features that are not mapped."""
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
    num_heads, hidden_size = (
        _uniform(file, f"{arch}.attention.head_count"),
        file.need(f"{arch}.embedding_length", int),
    )
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(f"{arch}.{key}", int, head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: {arch}.{key} must equal the head size {head_dim}")
    return {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _uniform(file, f"{arch}.feed_forward_length"),
        "num_hidden_layers": file.need(f"{arch}.block_count", int),
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


def _refuse_unmapped(file: GgufFile, arch: str) -> None:
    """Raise UnsupportedModel where the metadata holds something that would change the result."""
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
    """A size that GGUF may give for each layer; only one for all is supported."""
    value = file.fields.get(key, default)
    if isinstance(value, list) and value:
        if len(set(value)) > 1:
            raise UnsupportedModel(f"{file.path}: {key} differs between layers, which is not supported")
        value = value[0]
    if not isinstance(value, int):
        raise CorruptModel(f"{file.path}: {key} must be an integer, got {value!r}")
    return value


def _rope_fields(file: GgufFile, arch: str, head_dim: int) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of ``config.json``."""
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
    """Recover Llama 3's rope parameters from the divisors of the frequencies that GGUF stores.

    The file keeps only the divisors. All published Llama 3 models share three of the four parameters,
    and the largest divisor is the fourth; the guess is kept only if it reproduces every divisor.
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


def _generation_config(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """``generation_config.json``: the file names the end of text and the end of turn apart."""
    ends = [config["eos_token_id"], file.get("tokenizer.ggml.eot_token_id", int)]
    known = {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"]}
    ids = sorted({i for i in ends if i is not None})
    return {key: value for key, value in known.items() if value is not None} | (
        {"eos_token_id": ids} if ids else {}
    )


# --- tensors ---


@dataclass(frozen=True, slots=True)
class _PlannedTensor:
    """One tensor of the output, and the order its rows are taken from the source in."""

    name: str
    source: GgufTensor
    row_order: npt.NDArray[np.int64] | None


def _planned_tensors(file: GgufFile, config: Mapping[str, Any]) -> Iterator[_PlannedTensor]:
    """Every tensor under its Hugging Face name, its shape checked.

    Raises: CorruptModel for a missing or misshapen tensor; UnsupportedModel for one that is not known.
    """
    expected = _tensor_table(config)
    unknown = sorted(set(file.tensors) - set(expected) - {"rope_freqs.weight"})
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: tensor {unknown[0][:60]!r} is not part of a {config['model_type']} model"
        )
    head_dim = config["head_dim"]
    for stored_name, (name, shape) in expected.items():
        tensor = file.tensors.get(stored_name)
        if tensor is None:
            raise CorruptModel(f"{file.path}: tensor {stored_name} is missing")
        if tensor.shape != shape:
            found, wanted = list(tensor.shape), list(shape)
            raise CorruptModel(f"{file.path}: tensor {stored_name} has shape {found}, expected {wanted}")
        rotated = config["model_type"] == "llama" and stored_name.endswith(("attn_q.weight", "attn_k.weight"))
        yield _PlannedTensor(name, tensor, _split_pairs(shape[0], head_dim) if rotated else None)


def _tensor_table(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name to Hugging Face name and shape, of all tensors the model must have."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (query, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (kv, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (kv, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, query)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (inner, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (inner, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, inner)),
    }
    if config["model_type"] == "qwen2":
        for letter, width in (("q", query), ("k", kv), ("v", kv)):
            layer[f"attn_{letter}.bias"] = (f"self_attn.{letter}_proj.bias", (width,))
    if config["model_type"] == "qwen3":
        for letter in "qk":
            layer[f"attn_{letter}_norm.weight"] = (f"self_attn.{letter}_norm.weight", (head,))
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        table["output.weight"] = ("lm_head.weight", (config["vocab_size"], hidden))
    for i in range(config["num_hidden_layers"]):
        for stored, (name, shape) in layer.items():
            table[f"blk.{i}.{stored}"] = (f"model.layers.{i}.{name}", shape)
    return table


def _split_pairs(num_rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Row order that undoes llama.cpp's interleaving of the q and k rows of Llama models.

    There the two elements of a rotated pair are neighbours (2i, 2i + 1); Hugging Face keeps them half a
    head apart (i, i + head_dim / 2).
    """
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_rows // head_dim, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(num_rows)


def _write_safetensors(path: Path, tensors: Sequence[_PlannedTensor], progress: Progress | None) -> None:
    """Write ``tensors`` as bf16, a few rows at a time: safetensors' own writer wants them all in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + 2 * math.prod(tensor.source.shape)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.source.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    written = 0
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            for rows in _bf16_chunks(path, tensor):
                out.write(rows.data)
                written += rows.nbytes
                if progress is not None:
                    progress("converting", written, offset)
        out.flush()
        os.fsync(out.fileno())


def _bf16_chunks(path: Path, tensor: _PlannedTensor) -> Iterator[npt.NDArray[np.uint16]]:
    source = tensor.source
    num_rows, step = len(source.rows), max(1, _CHUNK_ELEMENTS // source.shape[-1])
    for start in range(0, num_rows, step):
        try:
            values = source.dequantized(start, min(start + step, num_rows), tensor.row_order)
        except NotImplementedError:
            raise UnsupportedModel(
                f"tensor {source.name} is of type {source.kind.name}, not supported"
            ) from None
        if not np.isfinite(values).all():
            raise CorruptModel(f"tensor {source.name} holds values that are not finite numbers")
        yield _to_bf16(values)


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Finite float32 to the bits of bfloat16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return rounded


# --- tokenizer ---


def _build_tokenizer(file: GgufFile, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and ``tokenizer_config.json``. Raises: UnsupportedModel, CorruptModel."""
    tokens: list[str] = file.need("tokenizer.ggml.tokens", list)
    kinds: list[int] = file.get("tokenizer.ggml.token_type", list, [TokenType.NORMAL] * len(tokens))
    if len(kinds) != len(tokens) or len(tokens) > config["vocab_size"]:
        raise CorruptModel(
            f"{file.path}: {len(tokens)} tokens, {len(kinds)} token types, {config['vocab_size']} embeddings"
        )
    while (
        kinds and kinds[-1] == TokenType.UNUSED
    ):  # padding of the embedding table, no part of the vocabulary
        tokens, kinds = tokens[:-1], kinds[:-1]
    model = file.need("tokenizer.ggml.model", str)
    builders = {"gpt2": _byte_level_tokenizer, "llama": _sentencepiece_tokenizer}
    if model not in builders:
        raise UnsupportedModel(
            f"{file.path}: tokenizer {model[:60]!r} is not supported; supported: {', '.join(builders)}"
        )
    try:
        tokenizer, adds_bos = builders[model](file, tokens, kinds)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception for an inconsistent vocabulary
        raise CorruptModel(f"{file.path}: the tokenizer's parts do not fit together: {error}") from None
    for kind, special in (
        (TokenType.USER_DEFINED, False),
        (TokenType.CONTROL, True),
        (TokenType.UNKNOWN, True),
    ):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, k in zip(tokens, kinds, strict=True)
            if k == kind and token
        ]
        tokenizer.add_tokens(added) if not special else tokenizer.add_special_tokens(added)
    names = _special_tokens(file, tokens)
    _add_template(file, tokenizer, names, adds_bos)
    template = file.get("tokenizer.chat_template", str)
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **names,
        **({"chat_template": template} if template is not None else {}),
    }


def _special_tokens(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    """Text of the special tokens by transformers' names."""
    names = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if index is not None and not 0 <= index < len(tokens):
            raise CorruptModel(
                f"{file.path}: {key}_token_id {index} is outside the vocabulary of {len(tokens)}"
            )
        if index is not None:
            names[f"{name}_token"] = tokens[index]
    return names


def _add_template(file: GgufFile, tokenizer: Tokenizer, names: Mapping[str, str], adds_bos: bool) -> None:
    """Make encoding add the begin and end tokens the file asks for."""
    bos = names.get("bos_token") if file.get("tokenizer.ggml.add_bos_token", bool, adds_bos) else None
    eos = names.get("eos_token") if file.get("tokenizer.ggml.add_eos_token", bool, False) else None

    def around(part: str, sequence: int) -> list[str]:
        marks = [f"{bos}:{sequence}"] if bos else [], [f"{eos}:{sequence}"] if eos else []
        return [*marks[0], f"{part}:{sequence}", *marks[1]]

    special = [(token, tokenizer.token_to_id(token)) for token in {bos, eos} if token]
    # Without marks too: an empty template keeps transformers from making up one of its own.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("$A", 0), pair=around("$A", 0) + around("$B", 1), special_tokens=special
    )


def _byte_level_tokenizer(
    file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """Byte-level BPE with the pre-tokenizer the file names, and whether it adds BOS by default."""
    del kinds
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges", list)]
    if any(len(merge) != 2 for merge in merges):
        raise CorruptModel(f"{file.path}: a merge is not two tokens")
    pre = file.get("tokenizer.ggml.pre", str, "default")
    vocab = {token: i for i, token in reversed(list(enumerate(tokens)))}
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _REGEX_OF)
    is_llama3 = pre in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _REGEX_OF:
        split = pre_tokenizers.Split(Regex(_REGEX_OF[pre]), behavior="isolated", invert=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in ("default", "gpt-2"):
        if pre == "default":
            logger.warning(
                "%s names no pre-tokenizer; GPT-2's is used, which may not be the model's", file.path
            )
        tokenizer.pre_tokenizer = byte_level
    else:
        known = ", ".join([*_REGEX_OF, "smollm", "gpt-2"])
        raise UnsupportedModel(
            f"{file.path}: pre-tokenizer {pre[:60]!r} is not supported; supported: {known}"
        )
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, is_llama3


_REGEX_OF = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}


def _sentencepiece_tokenizer(
    file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE with byte fallback, as of Llama 1 and 2 and early Mistral."""
    scores: list[float] = file.need("tokenizer.ggml.scores", list)
    vocab = {token: i for i, token in reversed(list(enumerate(tokens)))}
    mergeable = {
        token: scores[i]
        for token, i in vocab.items()
        if kinds[i] in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", int, 0)]
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges_by_score(mergeable),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """BPE merges equal to SentencePiece's rule "join the neighbours whose union has the highest score".

    A piece can be reached by any split into two pieces, so each split is a merge; they rank by the score
    of the piece, and among equals the shorter left part first.
    """
    pairs = [
        (-score, len(piece[:cut]), piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    pairs.sort()
    return [(left, right) for _, _, left, right in pairs]


# --- files ---


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False))


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.write(text + "\n")
        out.flush()
        os.fsync(out.fileno())


def _sync(path: Path) -> None:
    """Flush a file or a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
