"""Cost of a model on several devices: tensor parallel within a stage, stages one after another.

A rank of a tensor-parallel group has its part of the heads and of the MLP (Megatron-LM, arXiv 1909.08053,
section 3), and each layer has two all-reduces of the hidden states. Between two stages of a pipeline the
hidden states are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources

import msgspec

from backfill.core.errors import ConfigError
from backfill.core.measured_on import MeasuredOn
from backfill.costs.derived import A100_40G, A100_80G, LLAMA_2_7B, derive_cost_model, measured_error
from backfill.costs.hardware import HardwareProfile, hardware_profile_names, load_hardware_profile
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.model_work import VALUE_BYTES, Device, ModelShape
from backfill.costs.profile import CopySpeed, CostProfile

LLAMA_3_8B = ModelShape("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192)
LLAMA_3_70B = ModelShape("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192)
MODELS: Mapping[str, ModelShape] = {each.name: each for each in (LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B)}
DEVICES: Mapping[str, Device] = {each.name: each for each in (A100_40G, A100_80G)}

_LINK_BYTES_PER_S = 25e9  # of two devices to the host, which share a switch in a DGX A100


def parallel_hardware(
    name: str, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1
) -> HardwareProfile:
    """A model on ``tensor_parallel_size * pipeline_parallel_size`` devices of one machine.

    Where operators were measured at that tensor-parallel size the profile of the package is taken, else the
    cost is derived (docs/hardware-profiles.md). The time of a step is from its first stage to its last.

    Args:
        name: device and model, such as a100-80g-llama-3-70b.
    Raises: ConfigError for sizes that do not divide the model, were not measured, or leave no memory for KV.
    """
    shape, device = _known(name)
    _check_sizes(shape, tensor_parallel_size, pipeline_parallel_size)
    num_devices = tensor_parallel_size * pipeline_parallel_size
    stage = f"{name}-tp{tensor_parallel_size}" if tensor_parallel_size > 1 else name
    if stage in hardware_profile_names():
        costs = load_hardware_profile(stage).costs
    else:
        costs = _derived(shape, device, tensor_parallel_size)
    if pipeline_parallel_size > 1:
        costs = replace(costs, cost=with_transfers(costs.cost, shape, pipeline_parallel_size - 1))
    suffix = f"-pp{pipeline_parallel_size}" if pipeline_parallel_size > 1 else ""
    link = _LINK_BYTES_PER_S * max(1, num_devices // 2)
    # KV heads that are fewer than the ranks are on several of them.
    kv_bytes = shape.kv_bytes_per_token * max(1, tensor_parallel_size // shape.num_kv_heads)
    kv_tokens = int((num_devices * device.usable_bytes - shape.weight_bytes) / kv_bytes)
    if kv_tokens < shape.max_model_len:
        raise ConfigError(
            f"{shape.name} does not fit {num_devices} x {device.name}: its weights have "
            f"{shape.weight_bytes / 1e9:.0f} GB; take more devices.",
            field="tensor_parallel_size",
        )
    return HardwareProfile(
        stage + suffix,
        replace(
            costs,
            key=replace(costs.key, device=costs.key.device + suffix),
            copies=CopySpeed(link, link),
        ),
        kv_tokens,
        kv_bytes,
        shape.max_model_len,
        stage_layers(shape.num_layers, pipeline_parallel_size) if pipeline_parallel_size > 1 else (),
    )


def derive_parallel_cost(shape: ModelShape, device: Device, tensor_parallel_size: int) -> CostModel:
    """Steps on ranks that have their part of the weights and heads, with two all-reduces a layer.

    Args:
        tensor_parallel_size: one at which all-reduces were measured.
    """
    part = derive_cost_model(shape, device, tensor_parallel_size)
    if tensor_parallel_size == 1:
        return part
    all_reduce_s = all_reduce_times()[tensor_parallel_size]
    return _with_rows(
        part, lambda num_tokens: 2 * shape.num_layers * all_reduce_s(num_tokens * shape.hidden * VALUE_BYTES)
    )


def with_transfers(cost: CostModel, shape: ModelShape, num_transfers: int) -> CostModel:
    """The same steps, whose hidden states pass so many links between stages.

    Links were not measured. An all-reduce between two devices moves as many bytes each way over the same
    link, so its time is an upper bound.
    """
    transfer_s = all_reduce_times()[2]
    return _with_rows(
        cost, lambda num_tokens: num_transfers * transfer_s(num_tokens * shape.hidden * VALUE_BYTES)
    )


def stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: as even as they can be, the last ones with one less for the output projection."""
    least, more = divmod(num_layers, num_stages)
    return tuple(least + (stage < more) for stage in range(num_stages))


@lru_cache(maxsize=1)
def all_reduce_times() -> Mapping[int, PiecewiseLinear]:
    """Measured all-reduces in a DGX A100: seconds by bytes of the tensor, by number of devices.

    Part of the package; the file says where the times come from.
    """
    file = resources.files(__package__).joinpath("collectives", "a100-dgx.json")
    times = msgspec.json.decode(file.read_bytes())["all_reduce"]
    return {int(size): PiecewiseLinear(tuple(of["x"]), tuple(of["y"])) for size, of in times.items()}


def _known(name: str) -> tuple[ModelShape, Device]:
    for device in DEVICES.values():
        shape = MODELS.get(name.removeprefix(f"{device.name}-"))
        if shape is not None and name.startswith(f"{device.name}-"):
            return shape, device
    known = ", ".join(f"{device}-{model}" for device in DEVICES for model in MODELS)
    raise ConfigError(f"{name!r} cannot be put on several devices; these can: {known}.", field="hardware")


def _check_sizes(shape: ModelShape, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    def splits(size: int) -> bool:
        kv_heads = shape.num_kv_heads
        is_even = shape.num_heads % size == 0 and shape.intermediate % size == 0
        return is_even and (kv_heads % size == 0 or size % kv_heads == 0)

    measured = (1, *all_reduce_times())
    allowed = [size for size in measured if splits(size)]
    if tensor_parallel_size not in allowed:
        raise ConfigError(
            f"must be one of {', '.join(map(str, allowed))} for {shape.name}, got {tensor_parallel_size}.",
            field="tensor_parallel_size",
        )
    if not 1 <= pipeline_parallel_size <= shape.num_layers:
        raise ConfigError(
            f"must be 1 to {shape.num_layers}, the layers of {shape.name}, got {pipeline_parallel_size}.",
            field="pipeline_parallel_size",
        )


def _derived(shape: ModelShape, device: Device, tensor_parallel_size: int) -> CostProfile:
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
        provenance=f"Derived from {LLAMA_2_7B.name} on a {A100_80G.name} (backfill.costs.parallel).",
    )


def _with_rows(cost: CostModel, more_s: Callable[[float], float]) -> CostModel:
    """The same, with row-wise work that takes longer."""
    x, y = cost.rows_s.x, cost.rows_s.y
    return replace(cost, rows_s=PiecewiseLinear(x, tuple(s + more_s(n) for n, s in zip(x, y, strict=True))))
