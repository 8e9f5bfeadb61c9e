"""What requests cost on the engine that runs them, for the plan of their order."""

from __future__ import annotations

from pathlib import Path

from backfill.blending.memory_forecast import SLACK_BLOCKS, MemoryForecast
from backfill.blending.pool import Learned, OfflinePool
from backfill.blending.requests import OrderName
from backfill.blending.resources import ResourceModel
from backfill.costs.model import CostModel
from backfill.models.config import ModelConfig
from backfill.models.tensor_shapes import num_parameters
from backfill.protocol.preparer import EngineFacts

# Of an engine that was not measured: an A100's, in bfloat16. The order depends on their ratio alone.
_FLOPS_PER_S = 312e12
_BYTES_PER_S = 2.039e12
_KV_DTYPE_BYTES = {"float32": 4, "int8": 1}


def create_pool(
    order: OrderName, facts: EngineFacts, folder: Path, learned: Learned | None = None
) -> tuple[OfflinePool, MemoryForecast | None]:
    """An empty pool for the engine, and a forecast of its KV where the order asks for it.

    Raises: ModelError where the model's dimensions cannot be read.
    """
    resources = resources_of(facts, ModelConfig.from_folder(folder))
    block_size = facts.info.block_size
    kv_tokens = facts.info.num_blocks * block_size
    forecast = MemoryForecast(kv_tokens, SLACK_BLOCKS * block_size) if order == "blend" else None
    return OfflinePool(order, resources, kv_tokens=kv_tokens, learned=learned), forecast


def resources_of(facts: EngineFacts, model: ModelConfig) -> ResourceModel:
    """As measured, where the engine has a cost profile; else from the model's dimensions."""
    computed = typical_resources(model, _KV_DTYPE_BYTES.get(facts.info.kv_dtype or facts.info.dtype, 2))
    return computed if facts.profile is None else _measured(facts.profile.cost, computed)


def typical_resources(model: ModelConfig, dtype_bytes: int = 2) -> ResourceModel:
    """Of the model on a device that was not measured. Args: dtype_bytes: as of ``KVLayout``."""
    num_elements = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return ResourceModel.from_dimensions(
        num_parameters(model),
        model.hidden_size,
        model.num_kv_heads * model.head_dim,
        model.num_layers,
        _FLOPS_PER_S,
        _BYTES_PER_S,
        model.kv_bytes_per_token(dtype_bytes) / num_elements,
    )


def _measured(cost: CostModel, computed: ResourceModel) -> ResourceModel:
    """A fit may find that a term costs nothing beside the others; the pool needs it in proportion."""
    token_s = cost.rows_s.y[-1] / cost.rows_s.x[-1]
    if token_s <= 0:
        return computed
    scale = token_s / computed.token_s
    return ResourceModel(
        token_s=token_s,
        prompt_pair_s=cost.prefill_pair_s or scale * computed.prompt_pair_s,
        cached_token_s=cost.decode_context_s or scale * computed.cached_token_s,
    )
