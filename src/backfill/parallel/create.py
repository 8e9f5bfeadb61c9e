"""Creates the executor that a configuration asks for: in this process, or on several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from backfill.bus.file import BusReservations
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.execution.create import choose_device, create_torch_executor
from backfill.execution.executor import warm_up
from backfill.execution.layer_timing import TimedExecutor
from backfill.execution.machine import check_threads, threads_of_rank
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.config import ModelConfig
from backfill.models.placement import ModelPlacement
from backfill.parallel import require_ray
from backfill.parallel.executor import ParallelExecutor
from backfill.parallel.load import load_rank, load_timed_rank
from backfill.parallel.rank import RankLoader


def create_executor(
    config: EngineConfig, bus: BusReservations | None = None
) -> TorchExecutor | ParallelExecutor:
    """Load the model, by rank if there are several.

    Args:
        bus: that the configuration names, and that this process has joined; ranks then open it themselves.
    Raises: ConfigError, ModelError, InsufficientMemory, each with a message for the user.
    """
    if _is_divided(config):
        return create_parallel_executor(config)
    return create_torch_executor(config, bus)


def create_timed_executor(config: EngineConfig) -> TimedExecutor | ParallelExecutor:
    """The same where each rank reports what its layers take, and the transfers of their weights.

    Raises: as ``create_executor``.
    """
    if _is_divided(config):
        return create_parallel_executor(config, load_timed_rank)
    return TimedExecutor(create_torch_executor(config))


def create_parallel_executor(config: EngineConfig, load: RankLoader = load_rank) -> ParallelExecutor:
    """Start the ranks, as processes or as actors of Ray, and load the model there.

    Raises: BackfillError with a message for the user; no process and no actor is left then.
    """
    # Before any process is started, which takes seconds.
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    ModelPlacement.of(ModelConfig.from_folder(config.model_dir), *sizes)
    if config.executor == "ray":
        executor = _start_on_ray(config, load)
    else:
        check_threads(config)
        if choose_device(config).type == "cuda":
            check_device_count(config, torch.cuda.device_count())
        executor = ParallelExecutor(config, threads_of_rank(config), load)
    try:
        warm_up(executor, config.scheduler)
    except BaseException:
        executor.close()
        raise
    return executor


def _is_divided(config: EngineConfig) -> bool:
    return config.executor == "ray" or config.num_ranks > 1


def _start_on_ray(config: EngineConfig, load: RankLoader) -> ParallelExecutor:
    require_ray()
    from backfill.parallel.ray_stages import plan_stages, start_stages

    bundle = plan_stages(config)
    config = replace(config, device="cuda" if bundle.num_gpus else "cpu")
    threads = max(1, bundle.threads // config.tensor_parallel_size)
    return ParallelExecutor(config, threads, load, start=partial(start_stages, bundle))


def check_device_count(config: EngineConfig, num_devices: int) -> None:
    """Raise ConfigError if there are more ranks than CUDA devices."""
    if config.num_ranks > num_devices:
        raise ConfigError(
            f"`tensor_parallel_size` {config.tensor_parallel_size} times `pipeline_parallel_size` "
            f"{config.pipeline_parallel_size} needs {config.num_ranks} CUDA devices, and torch finds "
            f"{num_devices} here."
        )
