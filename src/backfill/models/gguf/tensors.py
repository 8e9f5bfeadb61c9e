"""A GGUF file's tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backfill.core.errors import CorruptModel, UnsupportedModel
from backfill.models.config import ModelConfig
from backfill.models.fields import Fields
from backfill.models.gguf.file import GgufFile, GgufTensor
from backfill.models.tensor_shapes import tensor_shapes

_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor, and the order of its rows in the source; None: as they are."""

    name: str
    source: GgufTensor
    row_order: npt.NDArray[np.int64] | None


def planned_tensors(file: GgufFile, config: Mapping[str, Any]) -> Iterator[PlannedTensor]:
    """Every tensor under its Hugging Face name, its shape checked.

    Args:
        config: contents of ``config.json``.
    Raises: CorruptModel for a missing tensor or a wrong shape; UnsupportedModel for an unknown tensor; as
        ``ModelConfig.from_fields``.
    """
    model = ModelConfig.from_fields(Fields(file.path, config))
    expected = {_stored_name(name): (name, shape) for name, shape in tensor_shapes(model)}
    unknown = sorted(set(file.tensors) - set(expected) - {"rope_freqs.weight"})
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: tensor {unknown[0][:60]!r} is not part of a {config['model_type']} model "
            f"of {model.num_layers} layers"
        )
    for stored_name, (name, shape) in expected.items():
        tensor = file.tensors.get(stored_name)
        if tensor is None:
            raise CorruptModel(f"{file.path}: tensor {stored_name} is missing")
        if tensor.shape != shape:
            found, wanted = list(tensor.shape), list(shape)
            raise CorruptModel(f"{file.path}: tensor {stored_name} has shape {found}, expected {wanted}")
        rotated = config["model_type"] == "llama" and stored_name.endswith(("attn_q.weight", "attn_k.weight"))
        yield PlannedTensor(name, tensor, _split_pairs(shape[0], model.head_dim) if rotated else None)


def check_types(tensors: Iterable[PlannedTensor]) -> None:
    """Raises: UnsupportedModel naming a tensor of a type that cannot be read."""
    known = set()
    for tensor in tensors:
        if tensor.source.kind not in known:
            tensor.source.dequantized(0, 1)
            known.add(tensor.source.kind)


def _stored_name(name: str) -> str:
    """The GGUF name of a tensor of ``tensor_shapes``. Source: ``gguf.tensor_mapping``."""
    module, _, kind = name.rpartition(".")
    if module in _ENDS:
        return f"{_ENDS[module]}.{kind}"
    index, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_PARTS[part]}.{kind}"


def _split_pairs(num_rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Row order that undoes llama.cpp's interleaving of the q and k rows of Llama models.

    In llama.cpp the two elements of a rotated pair are neighbours (2i, 2i + 1); in Hugging Face they are half
    a head apart (i, i + head_dim / 2). Source: ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py.
    """
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_rows // head_dim, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(num_rows)
