"""Write the model in a GGUF file as a folder: configuration, tokenizer, bf16 safetensors."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backfill.core.errors import CorruptModel, ModelError, UnsupportedModel
from backfill.models.config import ModelConfig
from backfill.models.frequencies import inverse_frequencies
from backfill.models.gguf.file import GgufFile, GgufTensor
from backfill.models.gguf.tokenizer import build_tokenizer
from backfill.models.rope import RopeConfig

Progress = Callable[[str, int, int], None]
"""Called with what is being done, units done and units in all (bytes)."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CHUNK_ELEMENTS = 1 << 23  # dequantised at once: 32 MiB of float32, a few times that within the dequantiser
# original_max_position_embeddings, low_freq_factor and high_freq_factor of every published Llama 3.
_LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


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


def _write_folder(file: GgufFile, folder: Path, progress: Progress | None) -> None:
    """All files of the converted model; the small ones first, since they refuse early.

    Raises: CorruptModel, UnsupportedModel; OSError if a file cannot be written.
    """
    config = _hf_config(file)
    _write_json(folder / "config.json", config)
    ModelConfig.from_folder(folder)  # refuses what the decoder cannot run, and sizes that do not fit
    tensors = list(_planned_tensors(file, config))
    tokenizer, tokenizer_config = build_tokenizer(file, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    _sync(folder / "tokenizer.json")
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", _generation_config(file, config))
    _write_safetensors(folder / "model.safetensors", tensors, progress)


# --- configuration ---


def _hf_config(file: GgufFile) -> dict[str, Any]:
    """``config.json`` of the model.

    Raises: UnsupportedModel for features that are not mapped; CorruptModel for missing or mistyped keys.
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
    """The model's number of layers. Raises: CorruptModel where the file has not even a tensor for each."""
    count: int = file.need(f"{arch}.block_count", int)
    if count > len(file.tensors):
        raise CorruptModel(
            f"{file.path}: {arch}.block_count is {count}, but there are {len(file.tensors)} tensors"
        )
    return count


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
    """A size that GGUF may give for each layer; only one for all is supported.

    Raises: UnsupportedModel where it differs between layers; CorruptModel if it is missing or no integer.
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

    Raises: UnsupportedModel for llama.cpp's own knobs, which Hugging Face's YaRN lacks, away from neutral.
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
    """Recover Llama 3's rope parameters from the divisors of the frequencies that GGUF stores.

    The file keeps only the divisors. All published Llama 3 models share three of the four parameters,
    and the largest divisor is the fourth; the guess is kept only if it reproduces every divisor.

    Raises: UnsupportedModel if it does not.
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
    """GGUF name to Hugging Face name and shape, of all tensors the model must have.

    Source: ``gguf.tensor_mapping``.
    """
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
    head apart (i, i + head_dim / 2). Source: ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py.
    """
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_rows // head_dim, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(num_rows)


def _write_safetensors(path: Path, tensors: Sequence[_PlannedTensor], progress: Progress | None) -> None:
    """Write ``tensors`` as bf16, a few rows at a time: safetensors' own writer wants them all in memory.

    ``progress`` counts bytes of the output. Raises: CorruptModel, UnsupportedModel, OSError.
    """
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
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
    written = 0
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            for rows in _bf16_chunks(tensor):
                out.write(rows.data)
                written += rows.nbytes
                if progress is not None:
                    progress("converting", written, offset)
        out.flush()
        os.fsync(out.fileno())


def _bf16_chunks(tensor: _PlannedTensor) -> Iterator[npt.NDArray[np.uint16]]:
    """The tensor's rows in order as the bits of bfloat16, some ``_CHUNK_ELEMENTS`` at a time.

    Raises: UnsupportedModel for a type without dequantiser; CorruptModel for infinities and NaN.
    """
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


# --- files ---


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False))


def _write_text(path: Path, text: str) -> None:
    """Write ``text`` and a newline as UTF-8, synced to the disk. Raises: OSError."""
    with path.open("w", encoding="utf-8") as out:
        out.write(text + "\n")
        out.flush()
        os.fsync(out.fileno())


def _sync(path: Path) -> None:
    """Flush a file or a folder's list of names to the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
