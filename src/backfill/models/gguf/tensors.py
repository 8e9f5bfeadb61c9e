"""A GGUF file's tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backfill.core.errors import CorruptModel, UnsupportedModel
from backfill.models.gguf.file import GgufFile, GgufTensor


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor, and the order of its rows in the source; None: as they are."""

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
            f"{file.path}: tensor {unknown[0][:60]!r} is not part of a {config['model_type']} model "
            f"of {config['num_hidden_layers']} layers"
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


def check_types(tensors: Iterable[PlannedTensor]) -> None:
    """Raises: UnsupportedModel naming a tensor of a type that cannot be read."""
    known = set()
    for tensor in tensors:
        if tensor.source.kind not in known:
            tensor.source.dequantized(0, 1)
            known.add(tensor.source.kind)


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
