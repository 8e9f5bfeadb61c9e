"""Cost of a model on several devices: tensor parallel within a stage, stages one after another.

A rank of a tensor-parallel group has its part of the heads and of the MLP (Megatron-LM, arXiv 1909.08053,
section 3), and each layer has two all-reduces of the hidden states. Between two stages of a pipeline the
hidden states are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from itertools import product
from operator import add
from typing import Any

import msgspec

from backfill.core.errors import ConfigError
from backfill.costs.hardware import HardwareProfile, hardware_profile_names, load_hardware_profile
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CopySpeed, CostProfile

_LINK_BYTES_PER_S = 25e9  # of two devices to the host, which share a switch in a DGX A100


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """Sizes of a model in fp16.

    Attributes:
        hidden_bytes: of a token's hidden state.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    hidden_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What can be put on a machine of eight devices.

    Attributes:
        usable_bytes: memory for weights and KV, by device.
        models: by name.
        costs: derived profiles as JSON has them, by the name of a stage; for sizes that were not measured.
    """

    usable_bytes: Mapping[str, float]
    models: Mapping[str, ParallelModel]
    costs: Mapping[str, dict[str, Any]]


def parallel_hardware(
    name: str, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1
) -> HardwareProfile:
    """A model on ``tensor_parallel_size * pipeline_parallel_size`` devices of one machine.

    Where operators were measured at that tensor-parallel size their profile is taken, else the derived one
    (docs/hardware-profiles.md). The time of a step is from its first stage to its last.

    Args:
        name: device and model, such as a100-80g-llama-3-70b.
    Raises: ConfigError for sizes that do not divide the model, were not measured, or leave no memory for KV.
    """
    model, device = _known(name)
    _check_sizes(model, tensor_parallel_size, pipeline_parallel_size)
    num_devices = tensor_parallel_size * pipeline_parallel_size
    stage = f"{name}-tp{tensor_parallel_size}" if tensor_parallel_size > 1 else name
    if stage in hardware_profile_names():
        costs = load_hardware_profile(stage).costs
    else:
        costs = CostProfile.parse(a100_dgx().costs[stage], stage)
    if pipeline_parallel_size > 1:
        costs = replace(costs, cost=with_transfers(costs.cost, model, pipeline_parallel_size - 1))
    suffix = f"-pp{pipeline_parallel_size}" if pipeline_parallel_size > 1 else ""
    link = _LINK_BYTES_PER_S * max(1, num_devices // 2)
    # KV heads that are fewer than the ranks are on several of them.
    kv_bytes = model.kv_bytes_per_token * max(1, tensor_parallel_size // model.num_kv_heads)
    kv_tokens = int((num_devices * a100_dgx().usable_bytes[device] - model.weight_bytes) / kv_bytes)
    if kv_tokens < model.max_model_len:
        raise ConfigError(
            f"{model.name} does not fit {num_devices} x {device}: its weights have "
            f"{model.weight_bytes / 1e9:.0f} GB; take more devices.",
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
        model.max_model_len,
        stage_layers(model.num_layers, pipeline_parallel_size) if pipeline_parallel_size > 1 else (),
    )


def with_transfers(cost: CostModel, model: ParallelModel, num_transfers: int) -> CostModel:
    """The same steps, whose hidden states pass so many links between stages.

    Links were not measured. An all-reduce between two devices moves as many bytes each way over the same
    link, so its time is an upper bound.
    """
    x, transfer_s = cost.rows_s.x, all_reduce_times()[2]
    more_s = (num_transfers * transfer_s(num_tokens * model.hidden_bytes) for num_tokens in x)
    return replace(cost, rows_s=PiecewiseLinear(x, tuple(map(add, cost.rows_s.y, more_s))))


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


@lru_cache(maxsize=1)
def a100_dgx() -> Machine:
    """Part of the package, made by ``experiments/parallel_costs.py``."""
    file = resources.files(__package__).joinpath("machines", "a100-dgx.json")
    return msgspec.json.decode(file.read_bytes(), type=Machine)


def _known(name: str) -> tuple[ParallelModel, str]:
    """The model, and the name of the device."""
    pairs = product(a100_dgx().usable_bytes, a100_dgx().models.values())
    known = {f"{device}-{model.name}": (model, device) for device, model in pairs}
    if name not in known:
        names = ", ".join(known)
        raise ConfigError(f"{name!r} cannot be put on several devices; these can: {names}.", field="hardware")
    return known[name]


def _check_sizes(model: ParallelModel, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    allowed = (1, *all_reduce_times())  # each divides every model of the machine
    if tensor_parallel_size not in allowed:
        raise ConfigError(
            f"must be one of {', '.join(map(str, allowed))} for {model.name}, got {tensor_parallel_size}.",
            field="tensor_parallel_size",
        )
    if not 1 <= pipeline_parallel_size <= model.num_layers:
        raise ConfigError(
            f"must be 1 to {model.num_layers}, the layers of {model.name}, got {pipeline_parallel_size}.",
            field="pipeline_parallel_size",
        )
