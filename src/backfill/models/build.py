"""Builds a runnable model from a configuration and its weights."""

from __future__ import annotations

import torch

from backfill.kernels.base import Kernels
from backfill.models.config import Architecture, ModelConfig
from backfill.models.decoder import DecoderModel
from backfill.models.llama import LlamaModel
from backfill.models.opt import OPTModel
from backfill.models.shard import ModelShard
from backfill.models.weights import Checkpoint


def build_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Kernels,
    *,
    max_positions: int,
    device: torch.device,
    shard: ModelShard | None = None,
    has_layers: bool = True,
) -> DecoderModel:
    """Load every weight of a shard through ``checkpoint`` and pack it for ``kernels``.

    Args:
        shard: None: the whole model.
        has_layers: False: the caller fills ``layers``.
    Raises: CorruptModel if a weight is missing or does not have the shape that ``config`` implies.
    """
    of_architecture = OPTModel if config.architecture is Architecture.OPT else LlamaModel
    shard = ModelShard.whole(config.num_layers) if shard is None else shard
    model = of_architecture(
        config, checkpoint, kernels, max_positions=max_positions, device=device, shard=shard
    )
    for index in shard.layers if has_layers else ():
        model.layers[index] = model.load_layer(checkpoint, index)
    return model
