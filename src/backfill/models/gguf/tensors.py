"""A GGUF file's tensors under their Hugging Face names, as bf16 safetensors."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backfill.core.errors import CorruptModel, UnsupportedModel
from backfill.models.gguf.file import GgufFile, GgufTensor

Progress = Callable[[str, int, int], None]
"""Called with the current work as text, bytes done and bytes in all."""

_CHUNK_ELEMENTS = 1 << 23  # dequantised at once: 32 MiB of float32; the dequantiser takes a few times that


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the output, and the order in which it takes the rows of the source."""

    name: str
    source: GgufTensor
    row_order: npt.NDArray[np.int64] | None


def planned_tensors(file: GgufFile, config: Mapping[str, Any]) -> Iterator[PlannedTensor]:
    """Every tensor under its Hugging Face name, its shape checked.

    Raises: CorruptModel for a missing tensor or a wrong shape; UnsupportedModel for an unknown tensor.
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
        yield PlannedTensor(name, tensor, _split_pairs(shape[0], head_dim) if rotated else None)


def _tensor_table(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name to Hugging Face name and shape, for all tensors of the model.

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

    In llama.cpp the two elements of a rotated pair are neighbours (2i, 2i + 1); in Hugging Face they are half
    a head apart (i, i + head_dim / 2). Source: ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py.
    """
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_rows // head_dim, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(num_rows)


def write_safetensors(path: Path, tensors: Sequence[PlannedTensor], progress: Progress | None) -> None:
    """Write ``tensors`` as bf16, a few rows at a time: safetensors' own writer needs all of them in memory.

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


def _bf16_chunks(tensor: PlannedTensor) -> Iterator[npt.NDArray[np.uint16]]:
    """The tensor's rows in order as the bits of bfloat16, about ``_CHUNK_ELEMENTS`` at a time.

    Raises: UnsupportedModel for a type without a dequantiser; CorruptModel for infinities and NaN.
    """
    source = tensor.source
    num_rows, step = len(source.rows), max(1, _CHUNK_ELEMENTS // source.shape[-1])
    for start in range(0, num_rows, step):
        values = source.dequantized(start, min(start + step, num_rows), tensor.row_order)
        if not np.isfinite(values).all():
            raise CorruptModel(f"tensor {source.name} holds values that are not finite numbers")
        yield _to_bf16(values)


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Finite float32 to the bits of bfloat16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return rounded
