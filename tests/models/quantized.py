"""Tiny models saved as AWQ, GPTQ and compressed-tensors checkpoints, packed by the formats' descriptions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.tiny import save_tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Case:
    """A format: layout is awq, gptq, gptq_v2, pack-quantized or int-quantized; group None is all inputs."""

    layout: str
    bits: int = 4
    group: int | None = 32
    is_symmetric: bool = False
    scale_type: torch.dtype = torch.float16

    @property
    def config(self) -> dict[str, Any]:
        common = {"bits": self.bits, "group_size": -1 if self.group is None else self.group}
        if self.layout == "awq":
            return {"quant_method": "awq", "version": "gemm", "zero_point": not self.is_symmetric, **common}
        if self.layout in ("gptq", "gptq_v2"):
            return {
                "quant_method": "gptq", "checkpoint_format": self.layout, "sym": self.is_symmetric,
                "desc_act": False, "dynamic": {"-:lm_head": {}}, **common,
            }  # fmt: skip
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": self.is_symmetric, "dynamic": False,
            "strategy": "channel" if self.group is None else "group", "group_size": self.group,
        }  # fmt: skip
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": self.layout, "ignore": ["lm_head"],
            "config_groups": {"group_0": scheme}, "quantization_status": "compressed",
        }  # fmt: skip


def words_of(values: np.ndarray, bits: int, axis: int, order: Sequence[int] = range(8)) -> Tensor:
    """32 // bits neighbours along an axis in a word, whose place i from the right has number order[i]."""
    rows = np.moveaxis(values, axis, -1)
    per_word = 32 // bits
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % per_word)))
    words = np.zeros((len(rows), rows.shape[1] // per_word), np.uint64)
    for place in range(per_word):
        words |= rows[:, order[place] :: per_word].astype(np.uint64) << np.uint64(bits * place)
    signed = np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)
    return torch.from_numpy(np.ascontiguousarray(signed))


def stored_matrix(
    case: Case, name: str, shape: tuple[int, int], seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a random matrix of codes, and its values in float32."""
    random = np.random.default_rng(seed)
    group, middle = case.group or shape[1], 1 << (case.bits - 1)
    num_groups = -(-shape[1] // group)
    codes = random.integers(0, 2 * middle, shape)
    # 0 too, but in one place: stored as one less, it takes one from the next of its word.
    zeros = np.full((shape[0], num_groups), middle)
    if not case.is_symmetric:
        zeros = random.integers(1, 2 * middle, zeros.shape)
        zeros[0, 0], zeros[-1, -1] = 2 * middle - 1, 0
    scales = torch.from_numpy(random.uniform(0.5, 1.5, zeros.shape) / 3 / middle).to(case.scale_type)
    differences = codes - zeros.repeat(group, axis=1)[:, : shape[1]]
    factors = scales.float().repeat_interleave(group, dim=1)[:, : shape[1]]
    tensors = dict(_tensors(case, codes, zeros, scales))
    values = torch.from_numpy(differences).float() * factors
    return {f"{name}.{key}": tensor.contiguous() for key, tensor in tensors.items()}, values


def _tensors(
    case: Case, codes: np.ndarray, zeros: np.ndarray, scales: Tensor
) -> Iterator[tuple[str, Tensor]]:
    middle = 1 << (case.bits - 1)
    if case.layout == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        yield "qweight", words_of(codes.T, 4, 1, order)
        yield "qzeros", words_of(zeros.T, 4, 1, order)  # as AutoAWQ's, of symmetric codes too
        yield "scales", scales.T
    elif case.layout in ("gptq", "gptq_v2"):
        yield "qweight", words_of(codes.T, case.bits, 0)
        words = words_of(zeros.T, case.bits, 1)
        ones = words_of(np.ones_like(zeros.T), case.bits, 1)
        yield "qzeros", words - ones if case.layout == "gptq" else words
        yield "scales", scales.T
        yield "g_idx", torch.arange(codes.shape[1], dtype=torch.int32) // (case.group or codes.shape[1])
    elif case.layout == "pack-quantized":
        yield "weight_packed", words_of(codes, case.bits, 1)
        yield "weight_scale", scales
        yield "weight_shape", torch.tensor(codes.shape)
        if not case.is_symmetric:
            yield "weight_zero_point", words_of(zeros, case.bits, 0)
    else:
        yield "weight", torch.from_numpy(codes - middle).to(torch.int8)
        yield "weight_scale", scales
        if not case.is_symmetric:
            yield "weight_zero_point", torch.from_numpy(zeros - middle).to(torch.int8)


def save_quantized_model(case: Case, folder: Path, **changed: Any) -> Path:
    """A tiny Llama whose layers have matrices of codes; another folder has the same model in floats."""
    plain = folder / "plain"
    save_tiny_model("llama", plain, **{**SIZES, **changed})
    tensors, stored = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            packed, tensors[name] = stored_matrix(case, module, tuple(tensor.shape), seed)
            stored |= packed
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    write_config(folder, config | {"quantization_config": case.config})
    return plain


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
