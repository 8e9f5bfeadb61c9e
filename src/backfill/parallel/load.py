"""Loads one rank's part of a model, in the rank's process."""

from __future__ import annotations

import torch

from backfill.core.config import EngineConfig
from backfill.execution.create import choose_device, choose_dtype, load_executor
from backfill.execution.sizing import plan_rank
from backfill.execution.stage import Stage
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.config import ModelConfig
from backfill.models.placement import ModelPlacement
from backfill.models.shard import ModelShard
from backfill.parallel.connect import connect
from backfill.parallel.observed import observed
from backfill.parallel.rank import RankContext
from backfill.parallel.stage_links import RowShape

WARM_UP_TOKENS = 64


def load_rank(config: EngineConfig, context: RankContext) -> TorchExecutor:
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
    progress = None if context.progress is None else context.progress.of_rank(context.rank)
    if progress is not None:
        links = observed(links, progress)
    shard = ModelShard(links.group, placement.stages[context.stage], model_config.num_layers)
    stage = Stage(shard, links, context.stop, None if progress is None else progress.begin_layer)
    return load_executor(config, placement, plan, stage, device, dtype)
