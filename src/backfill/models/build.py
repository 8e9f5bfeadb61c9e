"""Builds a runnable model from a configuration and its weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from backfill.kernels.base import Kernels
from backfill.models.config import Architecture, ModelConfig
from backfill.models.decoder import DecoderModel
from backfill.models.llama import LlamaModel
from backfill.models.opt import OPTModel
from backfill.models.shard import ModelShard
from backfill.models.weights import Checkpoint

_LAYERS_AT_ONCE = 2  # each takes some six times the memory of its largest matrix until it is packed


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
    if has_layers:
        _load_layers(model, checkpoint, device)
    return model


def _load_layers(model: DecoderModel, checkpoint: Checkpoint, device: torch.device) -> None:
    """On a CPU several layers at once, each by one thread.

    Threads that divide each operation wait for one another, and a start's share their processors with the
    imports of a server: packing then takes twice the time.
    """
    layers, num_threads = model.shard.layers, torch.get_num_threads()
    load = partial(model.load_layer, checkpoint)
    if device.type != "cpu":
        model.layers.update(zip(layers, map(load, layers), strict=True))
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(num_threads, _LAYERS_AT_ONCE), "load-layer") as threads:
            model.layers.update(zip(layers, threads.map(load, layers), strict=True))
    finally:
        torch.set_num_threads(num_threads)
