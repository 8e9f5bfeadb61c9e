"""``offload_interval`` auto: the interval that holds an engine's objectives within its memory."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.core.slo import SLO
from backfill.engine.analyzer import load_or_measure_record, record_path, saved_record
from backfill.engine.record_check import RecordCheck
from backfill.execution.create import choose_device, target_of
from backfill.execution.sizing import Target
from backfill.models.config import ModelConfig
from backfill.offloading.choice import IntervalChooser, LoadLimits, NoIntervalHolds
from backfill.offloading.record import PerformanceRecord
from backfill.parallel.memories import memories_of, with_device_of_ranks
from backfill.scheduling.objectives import rounded_up, slo_above

logger = logging.getLogger(__name__)


def with_chosen_interval(config: EngineConfig) -> EngineConfig:
    """The configuration with a number or none where ``offload_interval`` is auto.

    None where all layers fit and nothing would use what offloading saves.
    The performance record is measured if there is none yet. With none there is no bus either. If the interval
    may become smaller (``min_offload_interval``), it may be one that saves no memory as long as it is in use.

    An engine that is started again may not refuse to: if no interval holds the objectives by a record that
    was corrected since, the nearest one that fits is taken.

    Raises: ConfigError if no interval both fits and holds the objectives, or if an objective cannot be met
        even without offloading, with what is achievable; BackfillError if the model cannot be loaded.
    """
    if config.offload_interval != "auto":
        return config
    config = with_device_of_ranks(config)
    _check_least(config)
    fitting = _fitting(config)
    if None in fitting and _saves_for_nothing(config):
        logger.warning(  # an option without effect, so that run-batch shows it too
            "offload_interval auto is none: all layers fit; `device_memory` would give KV what others save"
        )
        return _without_offloading(config)
    record = on_bus(load_or_measure_record(config), config)
    chooser = IntervalChooser(record, load_limits(config), fitting)
    slo = objectives(config, chooser)
    try:
        interval = chooser.smallest_interval(slo)
        how = f"{interval}: the smallest that"
        if interval is None:
            interval = _saving_nothing(config, chooser, slo)
            how = f"{interval or 'none'}: no interval saves memory and"
    except NoIntervalHolds as error:
        refusal = _refusal(config, slo, error)
        if config.scheduler.kept_slo is None:
            raise ConfigError(refusal, field="offload_interval") from None
        logger.warning("offload_interval %s", refusal)
        interval, how = error.nearest, f"{error.nearest}, though none"
    logger.log(
        logging.WARNING if interval is None else logging.INFO,
        "offload_interval auto is %s holds a first token within %.3g s and each next within %.3g s%s, by a "
        "record of %s",
        how,
        slo.ttft_s,
        slo.tpot_s,
        "" if config.offload_bus is None else f" on {config.offload_bus_gib_per_s:g} GiB/s of `offload_bus`",
        _extent(record),
    )
    _warn_beyond_record(chooser)
    if interval is None:
        return _without_offloading(config)
    least = config.min_offload_interval
    if least is not None and least >= interval:
        logger.info("offload_interval auto: %d is not above min_offload_interval, and stays", interval)
        config = replace(config, min_offload_interval=None)
    elif least is not None:
        logger.info("offload_interval auto: %d to %d are used while there is offline work", least, interval)
    if config.device_memory is None:
        logger.info("offload_interval auto: what it saves stays free; `device_memory` gives it to KV")
    return replace(config, offload_interval=interval)


def _check_least(config: EngineConfig) -> None:
    """Raises: ConfigError for a smallest interval that no other one is above."""
    least, most = config.min_offload_interval, _target(config).placement.most_layers
    if least is not None and least >= most:
        raise ConfigError(
            f"must be below {most}, the layers of the model or of its largest stage, got {least}.",
            field="min_offload_interval",
        )


def _saving_nothing(config: EngineConfig, chooser: IntervalChooser, slo: SLO) -> int | None:
    """The smallest interval from which a smaller one may be changed to; None where none is asked for."""
    least = config.min_offload_interval
    if least is None:
        return None
    return next((each for each in chooser.holding(slo) if each in chooser.fitting and each > least), None)


def _warn_beyond_record(chooser: IntervalChooser) -> None:
    for phase, beyond in chooser.beyond_record().items():
        logger.warning(
            "offload_interval auto: %ss of %s are beyond the record, and may miss their objective; "
            "`backfill profile --offload` records larger ones",
            phase,
            beyond,
        )


def _without_offloading(config: EngineConfig) -> EngineConfig:
    if config.min_offload_interval is not None:
        logger.warning("offload_interval auto: min_offload_interval has no effect without offloading")
    return replace(
        config,
        offload_interval="none",
        min_offload_interval=None,
        offload_bus=None,
        offload_bus_gib_per_s=None,
    )


def on_bus(record: PerformanceRecord, config: EngineConfig) -> PerformanceRecord:
    """The record with transfers no faster than the bus of the configuration, if it has one.

    All stages of a pipeline transfer at a time, each a layer.
    """
    bytes_per_s = config.offload_bus_bytes_per_s
    if bytes_per_s is None:
        return record
    return record.with_transfers_of(len(record.stages) * record.layer_bytes / bytes_per_s)


def create_record_check(config: EngineConfig) -> RecordCheck | None:
    """Compares the record by which the interval was chosen with what is served; None without offloading."""
    if config.offload_every is None:
        return None
    record = saved_record(config)
    if record is None:
        return None
    return RecordCheck(record, _save_correction, has_own_link=config.offload_bus is None)


def _save_correction(record: PerformanceRecord) -> None:
    """Where the next start looks for it, unless it was measured thoroughly meanwhile."""
    path = record_path(record.key)
    with suppress(ConfigError):
        if PerformanceRecord.load(path).is_thorough:
            return
    try:
        record.save(path)
    except OSError as error:
        logger.warning("the performance record %s cannot be saved: %s", path, error.strerror or error)


def load_limits(config: EngineConfig) -> LoadLimits:
    """The loads that a configuration allows."""
    model_len = ModelConfig.from_folder(config.model_dir).max_position_embeddings
    return LoadLimits(config.scheduler.max_num_seqs, min(config.max_model_tokens or model_len, model_len))


def objectives(config: EngineConfig, chooser: IntervalChooser) -> SLO:
    """The configured ones, else the defaults.

    Not those that an engine keeps of the one before it: these were widened for steps that offloading has made
    longer, and an interval that just holds them would make all longer still.

    Raises: ConfigError for a configured one that no request can meet, at the first start of a server.
    """
    scheduler = config.scheduler
    least = SLO(chooser.least_alone_s("prefill"), chooser.least_alone_s("decode"))
    for field, asked_s, least_s in (
        ("ttft_slo", scheduler.ttft_slo, least.ttft_s),
        ("tpot_slo", scheduler.tpot_slo, least.tpot_s),
    ):
        if asked_s is not None and asked_s < least_s and scheduler.kept_slo is None:
            raise ConfigError(
                f"`{field}` {asked_s:g}: one request alone needs {rounded_up(least_s):g} s on this device, "
                "even without offloading; give at least that."
            )
    return slo_above(scheduler, least)


def _fitting(config: EngineConfig) -> set[int | None]:
    """The intervals with which the model fits its devices; None if it does without offloading.

    Raises: InsufficientMemory if there is none.
    """
    fitting: set[int | None] = set()
    first: InsufficientMemory | None = None
    target = _target(config)
    memories = memories_of(target)
    for interval in (*range(1, target.placement.most_layers + 1), None):
        of_interval = replace(target, config=_with_interval(config, interval))
        try:
            for each in memories:
                of_interval.divide_memory(each.available_bytes, each.ranks[0], each.ranks)
            fitting.add(interval)
        except InsufficientMemory as error:
            first = first or error
    if not fitting:
        assert first is not None
        raise first
    return fitting


def _target(config: EngineConfig) -> Target:
    return target_of(config, config.tensor_parallel_size, config.pipeline_parallel_size)


def _saves_for_nothing(config: EngineConfig) -> bool:
    """Whether what offloading saves would stay free, while it makes answers slower."""
    has_pool_of_its_own = config.kv_gib is not None or choose_device(config).type == "cpu"
    gives = config.device_memory, config.min_offload_interval, config.offload_bus
    return has_pool_of_its_own and all(each is None for each in gives)


def _with_interval(config: EngineConfig, interval: int | None) -> EngineConfig:
    return replace(config, offload_interval=interval or "none")


def _refusal(config: EngineConfig, slo: SLO, error: NoIntervalHolds) -> str:
    """What is asked for, and the two ways out of it."""
    target = _target(config)
    memories = [each.ranks for each in memories_of(target)]
    memory = "the device's memory" if len(memories) == 1 else "the memory of each device"
    if config.device_memory is not None:
        memory = f"`device_memory` {config.device_memory:g} GiB"
    rules = (
        ("ttft_slo", slo.ttft_s, error.achievable.ttft_s),
        ("tpot_slo", slo.tpot_s, error.achievable.tpot_s),
    )
    missed = [(field, asked_s, least_s) for field, asked_s, least_s in rules if least_s > asked_s]
    asked = " and ".join(f"`{field}` {asked_s:g}" for field, asked_s, _ in missed)
    offered = " and ".join(f"`{field}` {rounded_up(least_s):g} or more" for field, _, least_s in missed)
    holding: list[int | None] = [*error.holding, None]
    needed = {
        each: max(map(replace(target, config=_with_interval(config, each)).least_device_bytes, memories))
        for each in holding
    }
    cheapest = min(needed, key=lambda each: needed[each])
    gib = -(-needed[cheapest] * 1000 // GIB) / 1000  # rounded up: the advice must suffice
    return (
        f"auto: no interval that fits {memory} holds {asked}. Interval {error.nearest} fits and holds "
        f"{offered}; interval {cheapest or 'none'} holds what is asked for and needs `device_memory` "
        f"{gib:.3f} or more."
    )


def _extent(record: PerformanceRecord) -> str:
    largest = max(record.loads, key=lambda load: load.batch_size * load.length)
    return f"up to {largest.batch_size} requests of {largest.length} tokens"
