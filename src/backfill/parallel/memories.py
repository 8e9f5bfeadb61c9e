"""Which ranks of a model share a device's memory, and how much there is before any of them has begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.execution.machine import available_host_bytes
from backfill.execution.sizing import Target, available_cuda_bytes
from backfill.parallel import require_ray
from backfill.parallel.create import check_device_count
from backfill.parallel.rank import ranks_of_stage


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one device.

    Attributes:
        ranks: that have it: the ranks of a machine on CPU, else one.
        available_bytes: None if they are unknown, since it may be another machine's.
    """

    ranks: Sequence[int]
    available_bytes: int | None


def with_device_of_ranks(config: EngineConfig) -> EngineConfig:
    """The configuration with the ``device`` that its cluster has for it, where ``executor`` is ray.

    Raises: ConfigError if the cluster cannot be reached, or can never hold all stages.
    """
    if config.executor != "ray":
        return config
    require_ray()
    from backfill.parallel.ray_stages import plan_stages

    config = replace(config, device="cuda" if plan_stages(config).num_gpus else "cpu")
    if config.device == "cuda" and config.device_memory is None and config.kv_gib is None:
        raise ConfigError(
            "auto needs `device_memory` with `executor` ray on GPUs: what other machines have is not known "
            "before.",
            field="offload_interval",
        )
    return config


def memories_of(target: Target) -> list[RankMemory]:
    """All that the ranks of a model have.

    Raises: ConfigError as ``with_device_of_ranks``, and as ``check_device_count``.
    """
    config, ranks = target.config, range(target.placement.num_ranks)
    if target.device.type == "cpu":
        if config.executor == "ray":
            return [RankMemory(each, None) for each in _ranks_of_nodes(target)]
        return [RankMemory(ranks, available_host_bytes())]
    if config.executor == "ray":
        return [RankMemory([rank], None) for rank in ranks]
    utilization = config.gpu_memory_utilization
    if len(ranks) == 1:
        return [RankMemory(ranks, available_cuda_bytes(target.device, utilization))]
    check_device_count(config, torch.cuda.device_count())
    # To ask what is free of a device takes some of it, in a process that does not use it.
    totals = [torch.cuda.get_device_properties(rank).total_memory for rank in ranks]
    return [RankMemory([rank], int(utilization * total)) for rank, total in zip(ranks, totals, strict=True)]


def _ranks_of_nodes(target: Target) -> list[list[int]]:
    """Ranks that Ray may place on one node, which has room for so many stages: it takes few nodes."""
    from backfill.parallel.ray_cluster import most_on_a_node, resources_of_nodes
    from backfill.parallel.ray_stages import plan_stages

    num_stages, size = len(target.placement.stages), target.placement.tensor_parallel_size
    most = min(num_stages, most_on_a_node(resources_of_nodes(), plan_stages(target.config)))
    return [
        [rank for stage in range(first, first + most) for rank in ranks_of_stage(stage, size)]
        for first in range(num_stages - most + 1)
    ]
