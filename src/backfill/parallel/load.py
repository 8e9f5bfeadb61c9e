"""Loads one rank's part of a model, in the rank's process."""

from __future__ import annotations

import torch

from backfill.core.config import EngineConfig
from backfill.execution.create import allocate_pool, choose_device, choose_dtype, create_host_copier
from backfill.execution.executor import ExecutorInfo
from backfill.execution.shard_executor import ShardExecutor
from backfill.execution.sizing import RankPlan, plan_rank
from backfill.kernels import create_kernels
from backfill.models.build import build_model
from backfill.models.config import ModelConfig
from backfill.models.generation_config import GenerationDefaults, end_token_ids
from backfill.models.placement import ModelPlacement
from backfill.models.shard import ModelShard
from backfill.models.weights import Checkpoint
from backfill.parallel.connect import connect
from backfill.parallel.rank import RankContext
from backfill.parallel.shared_memory_link import RowShape

WARM_UP_TOKENS = 64


def load_rank(config: EngineConfig, context: RankContext) -> ShardExecutor:
    """See ``RankLoader``. Raises: ConfigError, ModelError, InsufficientMemory."""
    model_config = ModelConfig.from_folder(config.model_dir)
    placement = ModelPlacement.of(model_config, context.tensor_parallel_size, context.pipeline_parallel_size)
    device = choose_device(config)
    dtype = choose_dtype(config, model_config, device)
    if device.type == "cuda":
        device = torch.device("cuda", context.local_rank)
        torch.cuda.set_device(device)
    else:
        assert config.threads is not None
        torch.set_num_threads(config.threads)
    plan = plan_rank(config, placement, context.rank, device, dtype, context.node_ranks)
    if context.barrier is not None:
        # What one rank allocates is part of every rank's plan, and must not be taken for memory in use.
        context.barrier.wait(context.rank)
    num_rows = max(config.scheduler.max_num_batched_tokens, WARM_UP_TOKENS)
    links = connect(context, RowShape(num_rows, model_config.hidden_size, dtype), device)
    checkpoint = Checkpoint.open(
        config.model_dir, dtype=dtype, load_format=config.load_format, seed=config.seed
    )
    model = build_model(
        model_config,
        checkpoint,
        create_kernels(device),
        max_positions=plan.max_model_len,
        device=device,
        shard=ModelShard(links.group, placement.stages[context.stage], model_config.num_layers),
    )
    kv_pool = allocate_pool(plan.layout, plan.num_blocks, dtype, device)
    copier = (
        create_host_copier(kv_pool, plan.layout, plan.num_host_blocks, None) if plan.num_host_blocks else None
    )
    info = _info(config, placement, plan, device, dtype)
    return ShardExecutor(model, kv_pool, info, links, context.stop.is_requested, copier)


def _info(
    config: EngineConfig,
    placement: ModelPlacement,
    plan: RankPlan,
    device: torch.device,
    dtype: torch.dtype,
) -> ExecutorInfo:
    model_config, stages = placement.config, placement.stages
    return ExecutorInfo(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_model_len=plan.max_model_len,
        vocab_size=model_config.vocab_size,
        end_token_ids=end_token_ids(model_config, GenerationDefaults.from_folder(config.model_dir)),
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        num_layers=model_config.num_layers,
        can_stop=True,
        num_host_blocks=plan.num_host_blocks,
        block_bytes=plan.layout.block_bytes,
        stage_layers=tuple(map(len, stages)) if len(stages) > 1 else (),
    )
