"""Builds a torch executor from a configuration: device, kernels, memory, weights, KV pool."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from backfill.bus.file import BusReservations
from backfill.bus.throttle import BusTransfers
from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.heap import trim_heap
from backfill.core.measured_on import MeasuredOn
from backfill.execution.arena import DeviceArena
from backfill.execution.copies import BlockCopier, create_copier
from backfill.execution.decode_graphs import DecodeGraphs
from backfill.execution.executor import ExecutorInfo, warm_up
from backfill.execution.grammar_masks import GrammarMasks
from backfill.execution.grammars import GrammarCompiler
from backfill.execution.host_memory import allocating
from backfill.execution.machine import available_processors, check_threads
from backfill.execution.memory import MemoryPlan
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.offloading import LayerStreamer, create_streamer
from backfill.execution.sizing import RankPlan, Target
from backfill.execution.stage import Stage
from backfill.execution.torch_executor import TorchExecutor
from backfill.kernels import create_kernels
from backfill.kernels.base import Kernels
from backfill.models.build import build_model
from backfill.models.checkpoint import open_checkpoint
from backfill.models.config import ModelConfig
from backfill.models.decoder import DecoderModel
from backfill.models.generation_config import GenerationDefaults, end_token_ids
from backfill.models.placement import ModelPlacement
from backfill.models.resolve import told_what_to_delete
from backfill.offloading.residency import Residency, residencies

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def create_torch_executor(config: EngineConfig, bus: BusReservations | None = None) -> TorchExecutor:
    """Load the model and allocate the KV pools.

    Args:
        bus: which transfers share with other engines; None if they share none.
    Raises: ConfigError, ModelError, InsufficientMemory, each with a message for the user.
    """
    assert config.offload_interval != "auto", "the interval has not been chosen"
    target = target_of(config)
    check_threads(config)
    if target.device.type == "cpu":
        torch.set_num_threads(config.threads or available_processors())
    stage = Stage.whole(target.placement.config.num_layers)
    executor = load_executor(target, target.plan_rank(), stage, bus)
    warm_up(executor, config.scheduler)
    return executor


def load_executor(
    target: Target, plan: RankPlan, stage: Stage, bus: BusReservations | None = None
) -> TorchExecutor:
    """Load what one rank has of the model, and allocate its part of the KV pools.

    Args:
        plan: of the rank.
        stage: its place among others.
        bus: which transfers share with other engines and other ranks; None if they share none.
    Raises: ConfigError, ModelError, InsufficientMemory.
    """
    config, device = target.config, target.device
    model_config, interval = target.placement.config, config.offload_every
    info = _executor_info(target, plan)
    checkpoint, kernels = target.checkpoint, create_kernels(device)
    if stage.shard.is_first and stage.shard.group.rank == 0:
        _log_choices(target, kernels)
    streams = MicroBatchStreams(device, config.num_micro_batches)
    with told_what_to_delete(config.model_dir, reads_weights=True):
        model = build_model(
            model_config,
            checkpoint,
            kernels,
            max_positions=plan.max_model_len,
            device=device,
            shard=stage.shard,
            has_layers=interval is None,
        )
    transfers = None if bus is None or device.type != "cpu" else BusTransfers(bus, config.num_ranks)
    streamer: LayerStreamer | None = None
    arena: DeviceArena | None = None
    if interval is not None:
        streamer, arena = create_streamer(
            model,
            checkpoint,
            name=f"{model_config.shape_key}-{MeasuredOn.types(info.dtype, info.stored_in, info.weight_bits)}",
            interval=interval,
            device=device,
            streams=streams,
            num_blocks=plan.num_blocks,
            block_bytes=plan.layout.block_bytes,
            bus=transfers,
        )
        if device.type != "cpu" or (stage.shard.is_first and stage.shard.group.rank == 0):
            _log_offloading(interval, plan.memory)
        info = replace(info, residencies=_residencies(info, config, stage, streamer.layer_bytes))
    trim_heap()
    kv_pool = _create_pool(target, plan, info, arena)
    copier: BlockCopier | None = None
    if info.num_host_blocks:
        host_bytes = info.num_host_blocks * plan.layout.block_bytes
        with allocating("A KV pool", host_bytes, "in host memory", "lower `host_kv_gib`"):
            throttle = None if transfers is None else transfers.copies
            copier = create_copier(kv_pool, info.num_host_blocks, throttle)
        logger.info("KV pool in host memory: %d blocks, %.2f GiB", info.num_host_blocks, host_bytes / GIB)
    # Who sends a request has compiled its grammar.
    compiler = GrammarCompiler(Path(config.model_dir), info.vocab_size, info.end_token_ids, bounds_time=False)
    grammars = GrammarMasks(compiler, config.threads or available_processors())
    graphs = _capture_graphs(config, stage, model, kv_pool, info) if streamer is None else None
    return TorchExecutor(model, kv_pool, info, streams, copier, streamer, stage, grammars, graphs)


def _capture_graphs(
    config: EngineConfig, stage: Stage, model: DecoderModel, kv_pool: Tensor, info: ExecutorInfo
) -> DecodeGraphs | None:
    """Of a model that is whole, on CUDA and in one micro-batch. None if capturing fails, which is logged."""
    is_whole = len(stage.layers) == info.num_layers and stage.shard.group.size == 1
    if not kv_pool.is_cuda or not is_whole or config.num_micro_batches > 1:
        return None
    try:
        return DecodeGraphs(model, kv_pool, config.scheduler.max_num_seqs, info.max_model_len)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        logger.warning("steps of decodes run without CUDA graphs, because capturing them failed: %s", error)
        torch.cuda.empty_cache()
        return None


def _executor_info(target: Target, plan: RankPlan) -> ExecutorInfo:
    """What a rank's executor will be: known before anything is loaded."""
    config, placement = target.config, target.placement
    model_config, stages, interval = placement.config, placement.stages, config.offload_every
    return ExecutorInfo(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_model_len=plan.max_model_len,
        vocab_size=model_config.vocab_size,
        end_token_ids=end_token_ids(model_config, GenerationDefaults.from_folder(config.model_dir)),
        device=target.device.type,
        dtype=target.dtype_name,
        kv_dtype=target.kv_codes,
        stored_in=target.checkpoint.stored_in,
        weight_bits=8 * target.checkpoint.layer_width,
        num_layers=model_config.num_layers,
        num_host_blocks=plan.num_host_blocks,
        block_bytes=plan.layout.block_bytes,
        offload_interval=interval,
        layer_bytes=0 if interval is None else target.weight_sizes(placement.shards()).layer_bytes,
        stage_layers=tuple(map(len, stages)) if len(stages) > 1 else (),
    )


def _residencies(
    info: ExecutorInfo, config: EngineConfig, stage: Stage, buffer_bytes: int
) -> tuple[Residency, ...]:
    """Divisions of a rank's memory between its layers and its part of the KV pool; none if there is one."""
    least, largest = config.min_offload_interval, config.offload_every
    if least is None or largest is None:
        return ()
    return residencies(
        len(stage.layers),
        least,
        largest,
        info.num_blocks,
        buffer_bytes,
        info.block_bytes,
        info.layers_of_stages,
    )


def _create_pool(target: Target, plan: RankPlan, info: ExecutorInfo, arena: DeviceArena | None) -> Tensor:
    """The rank's part of the KV pool, not set: all blocks that there can ever be.

    Raises: InsufficientMemory.
    """
    shape, dtype, device = plan.layout.shape(info.max_num_blocks), target.kv_dtype, target.device
    if arena is not None:
        return arena.kv_pool(shape, dtype)
    num_bytes = info.num_blocks * plan.layout.block_bytes
    with allocating("A KV pool", num_bytes, f"on {device}", "lower `kv_gib`"):
        return torch.empty(shape, dtype=dtype, device=device)


def target_of(config: EngineConfig, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Target:
    """What the model of a configuration will run on and in. Raises: ConfigError, ModelError."""
    model_config = ModelConfig.from_folder(config.model_dir)
    device = choose_device(config)
    dtype = _choose_dtype(config, model_config, device)
    placement = ModelPlacement.of(model_config, tensor_parallel_size, pipeline_parallel_size)
    if device.type != "cpu" and config.quantization in ("int8", "int4"):
        # Its kernels have no product with codes, so that rounding would only lose.
        raise ConfigError("int8 and int4 are supported with `device` cpu only.", field="quantization")
    if device.type != "cpu" and config.kv_dtype != "auto":
        raise ConfigError("int8 is supported with `device` cpu only; use auto.", field="kv_dtype")
    checkpoint = open_checkpoint(
        config.model_dir,
        dtype=dtype,
        load_format=config.load_format,
        quantization=config.quantization if device.type == "cpu" else "none",
        seed=config.seed,
        device=device,
    )
    return Target(config, placement, device, dtype, checkpoint)


def choose_device(config: EngineConfig) -> torch.device:
    """The device that the model will run on. Raises: ConfigError if it is not there."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("`device` cuda: torch finds no CUDA device here; use `device` cpu.")
    return torch.device(config.device)


def _choose_dtype(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of weights and KV. Raises: ConfigError if the device does not have it."""
    name: str = config.dtype
    if name == "auto":
        name = model_config.dtype if model_config.dtype in _TORCH_DTYPES else "bfloat16"
        if name == "float16" and device.type == "cpu":
            name = "bfloat16"  # every variant of the kernels has it, at half of float32's bytes
    if name == "float16" and device.type == "cpu":
        raise ConfigError("`dtype` float16 is not supported on CPU; use bfloat16 or float32.")
    return _TORCH_DTYPES[name]


def _log_choices(target: Target, kernels: Kernels) -> None:
    """One line: what computes the model here, and why."""
    checkpoint, name = target.checkpoint, target.dtype_name
    stored = checkpoint.file_types or target.placement.config.dtype
    if target.config.dtype != "auto":
        types = f"{name} (`dtype`)"
    elif checkpoint.stored_in:
        types = name
    elif name == stored:
        types = f"{name} (as the model is stored)"
    else:
        types = f"{name} (the model is stored in {stored})"
    if checkpoint.stored_in:
        types = f"computed in {types}; weights in {checkpoint.stored_in}"
    kv = f"; KV in {target.kv_codes}" if target.kv_codes else ""
    threads = ""
    if target.device.type == "cpu":
        threads = f"; {torch.get_num_threads()} threads on {available_processors()} processors"
    logger.info("kernels: %s; %s%s%s", kernels.description, types, kv, threads)


def _log_offloading(interval: int, memory: MemoryPlan) -> None:
    logger.info(
        "%d of %d layers are offloaded; device memory has %d layers and staging buffers, weights of %.2f GiB "
        "in all, and %d KV blocks",
        memory.num_offloaded,
        memory.num_layers,
        memory.num_device_layers,
        memory.weights_bytes / GIB,
        memory.num_blocks,
    )
    if memory.num_device_layers == memory.num_layers:
        logger.warning(
            "offload_interval %d saves no memory: %d layers are offloaded, into as many staging buffers",
            interval,
            memory.num_offloaded,
        )
