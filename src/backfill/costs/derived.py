"""Cost models of devices that were not measured, derived from one that was.

Row-wise work of a step takes as many times its roofline as that of Llama-2-7B on an A100-80G at the same
number of tokens, whose profile rests on measured operators. The rest is modelled as for every profile.
docs/hardware-profiles.md says what this leaves out.
"""

from __future__ import annotations

import numpy as np

from backfill.costs.hardware import load_hardware_profile
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.model_work import (
    GIB,
    Device,
    ModelShape,
    kv_write_bytes,
    modelled_time_s,
    operator_work,
)
from backfill.costs.profile import FitError

A100_40G = Device("a100-40g", 39.4 * GIB, 1.555e12, 312e12)
A100_80G = Device("a100-80g", 79.2 * GIB, 2.039e12, 312e12)
LLAMA_2_7B = ModelShape("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096)
MEASURED_PROFILE = "a100-80g-llama-2-7b"

# NVIDIA A10 Tensor Core GPU data sheet: 24 GB of GDDR6 at 600 GB/s, 125 TFLOP/s of fp16 tensor cores, dense.
# That 23,028 MiB of them can be used is assumed.
A10 = Device("a10", 23_028 * 2**20, 600e9, 125e12)

_SAMPLED = (1, 64, 128, 256, 512)
_MANY = 1 << 20  # of a load from which a linear term is read


def rows_roofline_s(shape: ModelShape, device: Device, num_tokens: int, num_devices: int = 1) -> float:
    """Least seconds of all row-wise operators of a step, one after another, on one of so many devices."""
    work = operator_work(shape, num_tokens, num_devices)
    layer_s = sum(work[name].roofline_s(device) * count for name, count in shape.layer_operators.items())
    layer_s += kv_write_bytes(shape, num_tokens) / num_devices / device.bandwidth
    return work["emb"].roofline_s(device) + shape.num_layers * layer_s


def derive_cost_model(shape: ModelShape, device: Device, num_devices: int = 1) -> CostModel:
    """Steps of a model on a device of which the data sheet is known.

    Args:
        num_devices: among which weights and heads are divided, without what they then exchange.
    """
    measured = load_hardware_profile(MEASURED_PROFILE).costs.cost.rows_s
    rows_s = [
        seconds
        * rows_roofline_s(shape, device, int(num_tokens), num_devices)
        / rows_roofline_s(LLAMA_2_7B, A100_80G, int(num_tokens))
        for num_tokens, seconds in zip(measured.x, measured.y, strict=True)
    ]

    def modelled_s(load: StepLoad) -> float:
        return modelled_time_s(shape, device, num_devices, load)

    return CostModel(
        rows_s=PiecewiseLinear(measured.x, tuple(np.maximum.accumulate(rows_s).tolist())),
        sampled_s=PiecewiseLinear(
            (0.0, *map(float, _SAMPLED)), (0.0, *(modelled_s(StepLoad(num_sampled=n)) for n in _SAMPLED))
        ),
        request_s=0.0,
        prefill_pair_s=modelled_s(StepLoad(prefill_pairs=_MANY)) / _MANY,
        prefill_context_s=modelled_s(StepLoad(prefill_context_tokens=_MANY)) / _MANY,
        decode_context_s=modelled_s(StepLoad(decode_context_tokens=_MANY)) / _MANY,
    )


def measured_error() -> FitError:
    """Scatter of the measured device's steps about its profile; the derivation's own error is not in it."""
    return load_hardware_profile(MEASURED_PROFILE).costs.error


def peak_step_s(shape: ModelShape, device: Device, load: StepLoad, *, counts_bytes: bool) -> float:
    """Seconds of a step at the data sheet's peaks, a lower bound.

    Args:
        counts_bytes: at the memory's bandwidth too, where that takes longer; else FLOPs alone.
    """
    n = load.num_tokens
    pairs = load.prefill_pairs + load.decode_context_tokens
    context = load.prefill_context_tokens + load.decode_context_tokens
    flops_s = 4 * shape.hidden * shape.num_layers * pairs / device.flops
    output_flops = 2 * shape.vocab * shape.hidden * load.num_sampled
    if not counts_bytes:
        operators = operator_work(shape, n, 1)
        layer = sum(operators[name].flops * count for name, count in shape.layer_operators.items())
        return flops_s + (shape.num_layers * layer + output_flops) / device.flops
    attention_s = max(flops_s, context * shape.kv_bytes_per_token / device.bandwidth)
    output_s = max(output_flops / device.flops, shape.vocab * shape.hidden * 2 / device.bandwidth)
    return rows_roofline_s(shape, device, n) + attention_s + (output_s if load.num_sampled else 0.0)
