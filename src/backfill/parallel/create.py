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
    if config.executor == "ray":
        return create_ray_executor(config)
    if config.num_ranks > 1:
        return create_parallel_executor(config)
    return create_torch_executor(config, bus)


def create_timed_executor(config: EngineConfig) -> TimedExecutor | ParallelExecutor:
    """The same where each rank reports what its layers take, and the transfers of their weights.

    Raises: as ``create_executor``.
    """
    if config.executor == "ray":
        return create_ray_executor(config, load_timed_rank)
    if config.num_ranks > 1:
        return create_parallel_executor(config, load_timed_rank)
    return TimedExecutor(create_torch_executor(config))


def create_parallel_executor(config: EngineConfig, load: RankLoader = load_rank) -> ParallelExecutor:
    """Start the ranks' processes and load the model there.

    Raises: BackfillError with a message for the user; no process is left then.
    """
    _check_sizes(config)
    check_threads(config)
    if choose_device(config).type == "cuda":
        check_device_count(config, torch.cuda.device_count())
    return _warmed_up(ParallelExecutor(config, threads_of_rank(config), load), config)


def create_ray_executor(config: EngineConfig, load: RankLoader = load_rank) -> ParallelExecutor:
    """Start the ranks as actors of Ray and load the model there.

    Raises: BackfillError with a message for the user; no actor is left then.
    """
    require_ray()
    from backfill.parallel.ray_stages import plan_stages, start_stages

    _check_sizes(config)
    bundle = plan_stages(config)
    config = replace(config, device="cuda" if bundle.num_gpus else "cpu")
    threads = max(1, bundle.threads // config.tensor_parallel_size)
    start = partial(start_stages, bundle)
    return _warmed_up(ParallelExecutor(config, threads, load, start=start), config)


def _check_sizes(config: EngineConfig) -> None:
    """Before any process is started, which takes seconds. Raises: ModelError, ConfigError."""
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    ModelPlacement.of(ModelConfig.from_folder(config.model_dir), *sizes)


def _warmed_up(executor: ParallelExecutor, config: EngineConfig) -> ParallelExecutor:
    try:
        warm_up(executor, config.scheduler)
    except BaseException:
        executor.close()
        raise
    return executor


def check_device_count(config: EngineConfig, num_devices: int) -> None:
    """Raise ConfigError if there are more ranks than CUDA devices."""
    if config.num_ranks > num_devices:
        raise ConfigError(
            f"`tensor_parallel_size` {config.tensor_parallel_size} times `pipeline_parallel_size` "
            f"{config.pipeline_parallel_size} needs {config.num_ranks} CUDA devices, and torch finds "
            f"{num_devices} here."
        )
