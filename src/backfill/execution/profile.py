"""The running executor's cost profile: loaded from disk, or measured if there is none."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from backfill import __version__
from backfill.blending.resources import ResourceModel
from backfill.core.clock import Clock, WallClock
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.measured_on import MeasuredFile, MeasuredOn
from backfill.costs.copy_profiler import RunsPlans
from backfill.costs.fit import TimedStep
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CostProfile
from backfill.costs.profiler import FULL, QUICK, Capacity, Grid, Shape, StepTimer, profile_executor
from backfill.costs.refine import ProfileRefiner, corrected, num_as_predicted
from backfill.execution.executor import ExecutorInfo
from backfill.execution.machine import proc_value, threads_of_rank
from backfill.kernels.cpu import CpuKernels
from backfill.models.config import ModelConfig
from backfill.models.resolve import cache_root
from backfill.models.tensor_shapes import num_parameters

logger = logging.getLogger(__name__)

_Measured = TypeVar("_Measured", bound=MeasuredFile)

# By which a start checks a saved profile, and the seconds that it may take.
_CHECK = replace(QUICK, listed=QUICK.listed[:7])
_CHECK_S = 0.15
# FLOPs and bytes a second of a device that was not measured: two cores with AVX2, an A100.
_CPU_RATES, _GPU_RATES = (150e9, 20e9), (312e12, 2.039e12)
_LOCK_TIMEOUT_S = 10.0  # a save takes milliseconds; a start may wait for it


class MeasuredExecutor(RunsPlans, Protocol):
    """An executor whose steps are timed."""

    info: ExecutorInfo

    def fill_kv_pool(self, num_blocks: int) -> None:
        """Write to the first blocks of the pool, so that their pages are mapped."""


def profile_key(config: EngineConfig, executor: MeasuredExecutor) -> MeasuredOn:
    """Key of this executor's profile: the model's shape, the device and its kernels, the dtype.

    Offloading and a bus that transfers are held to are part of how the device is used.
    """
    model = ModelConfig.from_folder(config.model_dir)
    info = executor.info
    num_threads = torch.get_num_threads() if config.num_ranks == 1 else threads_of_rank(config)
    device = device_name(config, torch.device(info.device), num_threads)
    if config.offload_every is not None:
        device += f", offload interval {config.offload_every}"
        if config.offload_bus_gib_per_s is not None and info.device == "cpu":
            device += f", bus of {config.offload_bus_gib_per_s:g} GiB/s"
    types = MeasuredOn.types(info.dtype, info.stored_in, info.weight_bits, info.kv_dtype)
    return MeasuredOn(model.shape_key, device, types)


def device_name(config: EngineConfig, device: torch.device, num_threads: int) -> str:
    """What times on a device depend on: its kind and how it is used, and a CPU's kernels and threads.

    Micro-batches and the division among ranks are part of how it is used.

    Args:
        num_threads: of each rank.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        processor = proc_value("cpuinfo", "model name") or platform.processor() or platform.machine()
        name = f"{processor or os.name}, {CpuKernels().isa}, {num_threads} threads"
    if config.num_micro_batches > 1:
        name += f", {config.num_micro_batches} micro-batches"
    if config.num_ranks > 1:
        name += f", {config.tensor_parallel_size} x {config.pipeline_parallel_size} ranks"
    if config.executor == "ray":
        name += ", actors of Ray"
    return name


def profile_path(key: MeasuredOn) -> Path:
    """File of a key's profile, which may not exist."""
    return measured_path(key, "json")


def measured_path(key: MeasuredOn, ending: str) -> Path:
    """File of what was measured on this, with this ending; it may not exist."""
    # Another release may be faster or slower; commits between two releases share what was measured.
    release = __version__.partition(".dev")[0]
    digest = hashlib.sha256(repr((astuple(key), release)).encode()).hexdigest()[:12]
    return cache_root() / "profiles" / f"{key.model}-{key.dtype}-{digest}.{ending}"


def saved_measurement(kind: type[_Measured], key: MeasuredOn, path: Path) -> _Measured | None:
    """What a start finds there; None if there is nothing, or nothing of use, which is logged."""
    if not os.path.exists(path):  # unlike Path.exists, False where permission is missing
        return None
    try:
        saved = kind.load(path)
        saved.check_key(key, str(path))
        return saved
    except ConfigError as error:
        logger.warning("%s It is measured quickly instead.", error)
        return None


def measure_profile(
    config: EngineConfig,
    executor: MeasuredExecutor,
    grid: Grid = FULL,
    on_step: Callable[[int, int], None] = lambda _done, _total: None,
) -> CostProfile:
    """Time the executor. It must have no requests; the contents of its KV pool are lost."""
    capacity = step_capacity(config, executor.info)
    # Pages that were never written are not mapped: reads would be too fast and writes too slow.
    executor.fill_kv_pool(grid.num_blocks(capacity))
    return profile_executor(
        executor,
        WallClock(),
        capacity,
        grid,
        key=profile_key(config, executor),
        num_layers=executor.info.num_layers,
        on_step=on_step,
        expected=None if grid.budget_s is None else _expected_cost(config, executor.info),
    )


def _expected_cost(config: EngineConfig, info: ExecutorInfo) -> CostModel:
    """Of steps whose FLOPs and bytes take all of their time. What counts is how its terms compare."""
    model = ModelConfig.from_folder(config.model_dir)
    flops, bytes_per_s = _CPU_RATES if info.device == "cpu" else _GPU_RATES
    num_weights = num_parameters(model)
    resources = ResourceModel.from_dimensions(
        num_weights,
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
        model.num_layers,
        flops,
        bytes_per_s,
    )
    row_s, weights_s = resources.token_s, 2 * num_weights / bytes_per_s
    sampled_s = 2 * model.vocab_size * model.hidden_size / flops
    num_tokens, num_sampled = float(FULL.row_knots[-1]), float(FULL.sampled_knots[-1])
    return CostModel(
        rows_s=PiecewiseLinear((1.0, num_tokens), (weights_s + row_s, weights_s + num_tokens * row_s)),
        sampled_s=PiecewiseLinear((0.0, num_sampled), (0.0, num_sampled * sampled_s)),
        request_s=0.0,
        prefill_pair_s=resources.prompt_pair_s,
        prefill_context_s=resources.prompt_pair_s,
        decode_context_s=max(resources.prompt_pair_s, resources.cached_token_s),
    )


def step_capacity(config: EngineConfig, info: ExecutorInfo) -> Capacity:
    """Limits of a step of this executor."""
    return Capacity(
        kv_tokens=info.num_blocks * info.block_size,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        num_host_blocks=info.num_host_blocks,
        block_bytes=info.block_bytes,
    )


def create_refiner(
    config: EngineConfig, info: ExecutorInfo, profile: CostProfile, clock: Clock
) -> ProfileRefiner | None:
    """A refiner of the profile, which learns from the served steps and saves; None for a full profile.

    A profile that the configuration names is refined too, but its file is the user's and is not overwritten.
    """
    if profile.quality == "full":
        return None
    grid = _loads_of(step_capacity(config, info))
    if config.profile_path is not None:
        return ProfileRefiner(profile, grid, clock)
    return ProfileRefiner(profile, grid, clock, ProfileSaver().put)


class ProfileSaver:
    """Saves profiles on a thread of its own, because a hanging disk must not delay the steps.

    It runs in the engine process, so that `serve`, `run-batch` and `LLM` need no code for it. A profile that
    is not saved yet is replaced by the next.
    """

    def __init__(self) -> None:
        self._latest: CostProfile | None = None
        self._has_news = threading.Event()
        threading.Thread(target=self._save, name="profile-saver", daemon=True).start()

    def put(self, profile: CostProfile) -> None:
        self._latest = profile
        self._has_news.set()

    def _save(self) -> None:
        while self._has_news.wait():
            self._has_news.clear()  # first, so that a profile put from here on is saved in the next round
            assert self._latest is not None
            save_for_next_start(self._latest)


def save_for_next_start(profile: CostProfile) -> None:
    """Save the profile for the next start, unless a full one exists. A failure is only logged."""
    try:
        save_in_cache(profile, keep_full=True)
    except OSError as error:
        path = profile_path(profile.key)
        logger.warning("the cost profile %s cannot be saved: %s", path, error.strerror or error)


def save_in_cache(profile: CostProfile, *, keep_full: bool) -> None:
    """Save the profile where starts look for it; ``keep_full``: not over a full one. Raises: OSError."""
    from filelock import FileLock  # where nothing is saved, it is not needed

    path = profile_path(profile.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may save a full profile between the check and the save.
    with FileLock(path.with_suffix(".lock"), timeout=_LOCK_TIMEOUT_S):
        if not (keep_full and _is_full(path)):
            profile.save(path)


def _is_full(path: Path) -> bool:
    try:
        return os.path.exists(path) and CostProfile.load(path).quality == "full"
    except ConfigError:  # damaged, or of another release
        return False


def _checked(saved: CostProfile, config: EngineConfig, executor: MeasuredExecutor) -> CostProfile:
    """The saved profile, corrected if a few small steps show that the machine is faster.

    Of a right one the smallest tell: it ends when most of all have taken what the profile says. They run
    once before, since the first of a kind takes up to 1.7 times as long.
    """
    capacity = step_capacity(config, executor.info)
    executor.fill_kv_pool(_CHECK.num_blocks(capacity))
    timer = StepTimer(executor, WallClock(), capacity)
    shapes = sorted(_CHECK.shapes(capacity), key=lambda shape: StepLoad.of(shape).num_tokens)

    for shape in shapes[: len(shapes) // 2 + 1]:
        timer.time(shape)

    def is_right(times: Mapping[Shape, float]) -> bool:
        return 2 * num_as_predicted(saved, _timed(times)) > len(shapes)

    timed = _timed(timer.time_within(shapes, _CHECK.rounds, _CHECK_S, is_right))
    profile = corrected(saved, timed, _loads_of(capacity))
    if profile is not saved:
        logger.info("the saved cost profile is too slow: corrected by %d steps timed now", len(timed))
    return profile


def _timed(times: Mapping[Shape, float]) -> list[TimedStep]:
    return [TimedStep(StepLoad.of(shape), seconds) for shape, seconds in times.items()]


def _loads_of(capacity: Capacity) -> Iterable[StepLoad]:
    """Loads of every kind within the capacity."""
    return map(StepLoad.of, FULL.shapes(capacity))


def load_or_measure_profile(config: EngineConfig, executor: MeasuredExecutor) -> CostProfile:
    """The profile named by the configuration, else the saved one, else a quick measurement, which is saved.

    A saved one that is not full is checked.

    Raises: ConfigError if the named profile cannot be read, or is of another model, device or dtype.
    """
    key = profile_key(config, executor)
    if config.profile_path is not None:
        profile = CostProfile.load(Path(config.profile_path))
        profile.check_key(key, config.profile_path)
        return profile
    saved = saved_measurement(CostProfile, key, profile_path(key))
    if saved is not None:
        return saved if saved.quality == "full" else _checked(saved, config, executor)
    began_s = time.monotonic()
    logger.info("measuring what steps cost, because there is no cost profile of this model on this device")
    profile = measure_profile(config, executor, QUICK)
    logger.info(
        "measured what steps cost in %.1f s, coarsely; the steps that are served refine it",
        time.monotonic() - began_s,
    )
    save_for_next_start(profile)
    return profile
