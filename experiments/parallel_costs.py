"""Costs of models on several A100s, derived: ``python -m experiments.parallel_costs`` writes them.

docs/hardware-profiles.md says how they are derived. ``backfill.costs.parallel`` reads the file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import backfill.costs
from backfill.core.measured_on import MeasuredOn
from backfill.costs.hardware import hardware_profile_names
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.parallel import all_reduce_times
from backfill.costs.profile import CostProfile
from experiments.derived import A100_40G, A100_80G, LLAMA_2_7B, derive_cost_model, measured_error
from experiments.model_work import VALUE_BYTES, Device, ModelShape

LLAMA_3_8B = ModelShape("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192)
LLAMA_3_70B = ModelShape("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192)
MODELS = (LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B)
DEVICES = (A100_40G, A100_80G)
SIZES = (1, *all_reduce_times())


def derive_parallel_cost(shape: ModelShape, device: Device, tensor_parallel_size: int) -> CostModel:
    """Steps on ranks that have their part of the weights and heads, with two all-reduces a layer.

    Args:
        tensor_parallel_size: one at which all-reduces were measured.
    """
    part = derive_cost_model(shape, device, tensor_parallel_size)
    if tensor_parallel_size == 1:
        return part
    x, all_reduce_s = part.rows_s.x, all_reduce_times()[tensor_parallel_size]
    rows_s = (
        seconds + 2 * shape.num_layers * all_reduce_s(num_tokens * shape.hidden * VALUE_BYTES)
        for num_tokens, seconds in zip(x, part.rows_s.y, strict=True)
    )
    return replace(part, rows_s=PiecewiseLinear(x, tuple(rows_s)))


def derived_profile(shape: ModelShape, device: Device, tensor_parallel_size: int) -> CostProfile:
    parallel = f"-tp{tensor_parallel_size}" if tensor_parallel_size > 1 else ""
    return CostProfile(
        key=MeasuredOn(shape.name, device.name + parallel, "float16"),
        quality="full",
        num_layers=shape.num_layers,
        cost=derive_parallel_cost(shape, device, tensor_parallel_size),
        error=measured_error(),
        known_tokens=shape.max_model_len,
        known_chunk_tokens=min(shape.max_model_len, 4096),
        copies=None,
        provenance=f"Derived from {LLAMA_2_7B.name} on a {A100_80G.name} (experiments/parallel_costs.py).",
    )


def splits(shape: ModelShape, size: int) -> bool:
    """Whether so many ranks have equal parts of the model."""
    kv_heads = shape.num_kv_heads
    is_even = shape.num_heads % size == 0 and shape.intermediate % size == 0
    return is_even and (kv_heads % size == 0 or size % kv_heads == 0)


def machine() -> dict[str, dict[str, object]]:
    """Of ``backfill.costs.parallel.Machine``."""
    measured = hardware_profile_names()
    stages = {
        f"{device.name}-{shape.name}" + (f"-tp{size}" if size > 1 else ""): (shape, device, size)
        for device, shape, size in itertools.product(DEVICES, MODELS, SIZES)
    }
    assert all(splits(shape, size) for shape, _, size in stages.values())
    return {
        "usable_bytes": {device.name: device.usable_bytes for device in DEVICES},
        "models": {
            shape.name: {
                "name": shape.name,
                "num_layers": shape.num_layers,
                "num_kv_heads": shape.num_kv_heads,
                "hidden_bytes": VALUE_BYTES * shape.hidden,
                "weight_bytes": shape.weight_bytes,
                "kv_bytes_per_token": shape.kv_bytes_per_token,
                "max_model_len": shape.max_model_len,
            }
            for shape in MODELS
        },
        "costs": {
            name: derived_profile(*stage).content() for name, stage in stages.items() if name not in measured
        },
    }


def as_text(content: Mapping[str, Mapping[str, object]]) -> str:
    """JSON with a line for each entry of the second level."""
    parts = []
    for name, entries in content.items():
        lines = ",\n ".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in entries.items())
        parts.append(f"{json.dumps(name)}: {{\n {lines}\n}}")
    return "{" + ",\n".join(parts) + "}\n"


def main() -> None:
    path = Path(backfill.costs.__file__).parent / "machines" / "a100-dgx.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(as_text(machine()), encoding="utf-8")


if __name__ == "__main__":
    main()
