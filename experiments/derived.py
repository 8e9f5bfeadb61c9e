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
from backfill.costs.profile import FitError
from experiments.model_work import (
    GIB,
    Device,
    ModelShape,
    kv_write_bytes,
    modelled_time_s,
    operator_work,
)

A100_40G = Device("a100-40g", 39.4 * GIB, 1.555e12, 312e12)
A100_80G = Device("a100-80g", 79.2 * GIB, 2.039e12, 312e12)
LLAMA_2_7B = ModelShape("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096)
MEASURED_PROFILE = "a100-80g-llama-2-7b"

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
