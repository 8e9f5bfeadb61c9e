"""Select-N's performance analyzer (section 4.4): times layers and transfers on the real model."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.measured_on import MeasuredOn
from backfill.core.options import with_options
from backfill.core.plan import StepOutcome, StepPlan
from backfill.costs.profiler import Capacity, Shape, StepTimer
from backfill.execution.create import target_of
from backfill.execution.layer_timing import TRANSFER_AGAIN, TimedExecutor
from backfill.execution.machine import OthersMeter, threads_of_rank
from backfill.execution.profile import device_name, measured_path, saved_measurement, step_capacity
from backfill.offloading.choice import RESERVED_TOKENS
from backfill.offloading.loads import QUICK_LOADS, Load, LoadGrid, is_within, never_falling
from backfill.offloading.rank_times import RankTransfers, StepTimes, layer_bytes, merge_step
from backfill.offloading.record import PerformanceRecord, RecordedLoad
from backfill.offloading.spread import delays_s, quantile, run_times_s
from backfill.parallel.create import create_timed_executor
from backfill.parallel.executor import ParallelExecutor

logger = logging.getLogger(__name__)

# Of the processors: while other processes use more, a quick record is not to be trusted for long.
_MUCH = 0.25
_SAMPLED_S = 0.25
_FEWEST_TRANSFERS = 128  # timed alone, and so at least 128 of those that the quantile is of


@dataclass(frozen=True, slots=True)
class Analysis:
    """A record, and the times of transfers that it is made of, in seconds.

    Attributes:
        alone_s: quantile of transfers with nothing beside them.
        beside_s: the same beside the computation of layers.
    """

    record: PerformanceRecord
    alone_s: float
    beside_s: float


def analyze(
    config: EngineConfig,
    grid: LoadGrid,
    on_load: Callable[[int, int], None] = lambda _done, _total: None,
) -> Analysis:
    """Load the model with every layer offloaded, run the grid's loads and time its layers.

    So everything is measured as it is while weights are transferred: on a CPU transfers take memory bandwidth
    and processor time of the layers. Without that, layers may be faster.

    Args:
        config: with the device that its ranks will have (``with_device_of_ranks``).
        on_load: gets the runs made or left out, and all runs.
    Raises: BackfillError as ``create_timed_executor``; ConfigError if not even one request fits.
    """
    executor = create_timed_executor(_for_analysis(config))
    try:
        return _analyze(config, executor, grid, on_load)
    finally:
        executor.close()
        del executor
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # another executor may be made, and sees what is free


def _analyze(
    config: EngineConfig,
    executor: TimedExecutor | ParallelExecutor,
    grid: LoadGrid,
    on_load: Callable[[int, int], None],
) -> Analysis:
    info = executor.info
    capacity = step_capacity(config, info)
    shapes = _shapes(grid, capacity)
    # Pages that were never written are not mapped: reads would be too fast.
    executor.fill_kv_pool(max(map(capacity.num_blocks, shapes.values())))
    others = OthersMeter(_own_processes(config, executor))
    timer = _LoadTimer(executor, capacity, num_stages=len(info.layers_of_stages))
    timer.forget_transfers()
    runs = timer.time_all(shapes, grid, on_load)
    beside = timer.transfers.take()
    timer.forget_transfers()
    alone = timer.transfer_alone()
    others_share = 0.0 if config.executor == "ray" else others.share()  # processors of other machines
    recorded = _recorded(runs)
    transfers = [*beside, *alone]
    record = PerformanceRecord(
        key=record_key(config),
        num_layers=info.num_layers,
        layer_bytes=timer.layer_bytes,
        transfer_s=max(map(quantile, transfers)),
        loads=never_falling(recorded.values()),
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        typical_transfer_s=max(map(statistics.median, transfers)),
        transfer_runs_s=tuple(map(max, zip(*map(run_times_s, transfers), strict=False))),
        delays_s=tuple(delays_s(_parts(runs, recorded))),
        is_thorough=grid.is_thorough,
        others_share=others_share,
        provenance=f"{len(recorded)} loads, the median of up to {grid.rounds} steps of each; transfers: P99.",
        stage_layers=info.stage_layers,
    )
    return Analysis(record, max(map(quantile, alone)), max(map(quantile, beside)))


def _shapes(grid: LoadGrid, capacity: Capacity) -> dict[Load, Shape]:
    """The loads of a grid that a step may have. Raises: ConfigError if there are none of some phase."""
    # Else no load would stand for as many requests, or tokens of them, as the engine may have.
    most = 1 << (capacity.max_num_seqs.bit_length() - 1)
    longest = capacity.max_model_len - RESERVED_TOKENS
    shorter = {each for each in grid.context_lengths if each < longest}
    grid = replace(
        grid,
        batch_sizes=tuple(sorted({*grid.batch_sizes, most})),
        context_lengths=tuple(sorted({*shorter, longest})) if shorter else grid.context_lengths,
    )
    shapes = {load: shape for load in grid.loads() if capacity.holds(shape := _shape(load))}
    if len({phase for phase, _, _ in shapes}) < 2:
        raise ConfigError(
            f"There is no load to time within a context of {capacity.max_model_len} tokens and a KV pool of "
            f"{capacity.kv_tokens}: one request of {min(grid.context_lengths)} tokens is needed; raise "
            "`max_model_len` or `kv_gib`."
        )
    return shapes


def _recorded(runs: Sequence[_Run]) -> dict[Load, RecordedLoad]:
    """What each load typically takes."""
    of_load: dict[Load, list[_Run]] = {}
    for run in runs:
        of_load.setdefault(run.load, []).append(run)
    return {
        load: RecordedLoad(
            *load,
            compute_s=statistics.median(statistics.mean(each.layers_s) for each in found),
            other_s=statistics.median(each.other_s for each in found),
        )
        for load, found in of_load.items()
    }


def _parts(runs: Sequence[_Run], recorded: Mapping[Load, RecordedLoad]) -> list[tuple[float, float]]:
    """What each layer, and the rest of each step, typically takes and took."""
    parts: list[tuple[float, float]] = []
    for run in runs:
        typical = recorded[run.load]
        parts += [(typical.compute_s, layer_s) for layer_s in run.layers_s]
        parts.append((typical.other_s, run.other_s))
    return parts


def load_or_measure_record(config: EngineConfig) -> PerformanceRecord:
    """The saved record of this model and device, else a quick measurement, which is saved.

    A record of smaller steps than the configuration allows is measured again; so is one that a start measured
    while other processes used much of the machine, when they do no longer.

    Raises: BackfillError if the model cannot be loaded to be measured.
    """
    key = record_key(config)
    path = record_path(key)
    saved = saved_measurement(PerformanceRecord, key, path)
    if saved is not None:
        reason = _outdated(saved, config)
        if reason is None:
            return saved
        logger.info("the performance record %s %s: it is measured again", path, reason)
    began_s = time.monotonic()
    record = analyze(config, QUICK_LOADS).record
    logger.info("measured the performance record in %.1f s", time.monotonic() - began_s)
    if record.others_share > _MUCH:
        logger.warning(
            "other processes used %.0f %% of the processors meanwhile, so the performance record may be of "
            "too slow a machine: the next start measures it again if they use less then, and "
            "`backfill profile --offload` measures it thoroughly",
            100 * record.others_share,
        )
    try:
        record.save(path)
    except OSError as error:
        logger.warning("the performance record %s cannot be saved: %s", path, error.strerror or error)
    return record


def _outdated(record: PerformanceRecord, config: EngineConfig) -> str | None:
    """What is wrong with a record; None if nothing is."""
    limits = config.scheduler
    if (
        record.max_num_seqs < limits.max_num_seqs
        or record.max_num_batched_tokens < limits.max_num_batched_tokens
    ):
        return "is of smaller steps"
    if record.is_thorough or record.others_share <= _MUCH:
        return None
    others = OthersMeter()
    time.sleep(_SAMPLED_S)
    if others.share() > record.others_share / 2:
        return None
    return f"was measured while other processes used {record.others_share:.0%} of the processors"


def saved_record(config: EngineConfig) -> PerformanceRecord | None:
    """The saved record of this model and device; None if there is none that can be used."""
    path = record_path(record_key(config))
    try:
        return PerformanceRecord.load(path) if os.path.exists(path) else None
    except ConfigError:
        return None


def record_key(config: EngineConfig) -> MeasuredOn:
    """Key of the record of a configuration's model: the model's shape, the device and its kernels, the dtype.

    Raises: ConfigError, ModelError.
    """
    target = target_of(config)
    name = device_name(config, target.device, threads_of_rank(config))
    stored_in, weight_bits = target.checkpoint.stored_in, 8 * target.checkpoint.layer_width
    types = MeasuredOn.types(target.dtype_name, stored_in, weight_bits, target.kv_codes)
    return MeasuredOn(target.placement.config.shape_key, name, types)


def record_path(key: MeasuredOn) -> Path:
    """File of a key's record, which may not exist."""
    return measured_path(key, "offload.json")


def _for_analysis(config: EngineConfig) -> EngineConfig:
    """The same with every layer offloaded, which needs the least memory, and no pool in host memory.

    A bus is left out: what it leaves a transfer is known without measuring it.
    """
    changes = {"offload_interval": 1, "min_offload_interval": None, "host_kv_gib": None}
    bus = {"offload_bus": None, "offload_bus_gib_per_s": None}
    return with_options(config, {**changes, **bus, "checkpointing": "none"})


def _own_processes(config: EngineConfig, executor: TimedExecutor | ParallelExecutor) -> list[int]:
    """Of the ranks, on this machine. Those of ``executor`` ray may be on others."""
    if isinstance(executor, TimedExecutor) or config.executor == "ray":
        return []
    return [pid for pid in executor.pids if pid is not None]


def _shape(load: Load) -> Shape:
    """Slices of a step."""
    phase, batch_size, length = load
    return ((0, length, True) if phase == "prefill" else (length, 1, True),) * batch_size


@dataclass(frozen=True, slots=True)
class _Run:
    """One step: seconds of each layer, and outside the layers without waiting for weights."""

    load: Load
    layers_s: list[float]
    other_s: float


class _LoadTimer:
    """Runs steps on ranks that time their layers, and takes the times.

    Attributes:
        transfers: of all plans since they were taken.
        layer_bytes: of the weights of a layer, on all ranks of its stage together; known after a plan.
    """

    def __init__(
        self, executor: TimedExecutor | ParallelExecutor, capacity: Capacity, num_stages: int
    ) -> None:
        self._executor = executor
        self._capacity = capacity
        self._num_stages = num_stages
        self._step = StepTimes([], 0.0)
        self.transfers = RankTransfers(num_stages)
        self.layer_bytes = 0

    def time_all(
        self, shapes: Mapping[Load, Shape], grid: LoadGrid, on_load: Callable[[int, int], None]
    ) -> list[_Run]:
        """Runs of the loads that are not left out (see ``LoadGrid``), in their order."""
        steps = StepTimer(self, WallClock(), self._capacity)  # not kept: a cycle would keep the executor
        runs: list[_Run] = []
        timed: set[Load] = set()
        too_long: list[Load] = []
        total, left_s = grid.rounds * len(shapes), grid.budget_s
        for number in range(total):
            load = list(shapes)[number % len(shapes)]
            is_new = number < len(shapes)
            is_first = all(load[0] != other[0] for other in timed)  # of its phase, which needs one
            is_within_limits = not any(is_within(other, load) for other in too_long) and left_s > 0.0
            if is_first or (is_within_limits and (is_new or load in timed)):
                seconds = steps.time(shapes[load])
                layers_s, waits_s = self._step
                runs.append(_Run(load, layers_s, max(0.0, seconds - sum(layers_s) - waits_s)))
                timed.add(load)
                left_s -= seconds
                if seconds > grid.longest_s:
                    too_long.append(load)
            on_load(number + 1, total)
        return runs

    def run(self, plan: StepPlan) -> StepOutcome:
        """See ``RunsPlans``; called by the step timer."""
        outcome = self._executor.run(plan)
        timings = outcome.weight_transfers.timings
        self.transfers.add(timings)
        self.layer_bytes = layer_bytes(timings, self._num_stages)
        if plan.slices:
            self._step = merge_step(timings, self._num_stages)
        return outcome

    def forget_transfers(self) -> None:
        """All until now. The next ones are the same on all ranks: none is left that only some have ended."""
        self.run(TRANSFER_AGAIN)
        self.transfers.take()

    def transfer_alone(self) -> list[list[float]]:
        """Of each stage, seconds of transfers with nothing beside them."""
        found: list[list[float]] = [[] for _ in range(self._num_stages)]
        while min(map(len, found)) < _FEWEST_TRANSFERS:
            self.run(TRANSFER_AGAIN)
            for times_s, more in zip(found, self.transfers.take(), strict=True):
                times_s.extend(more)
        return found
