"""A pool for the engine that runs its requests: what they cost there, and how a pool sees them."""

from __future__ import annotations

from array import array
from pathlib import Path

from backfill.blending.memory_forecast import SLACK_BLOCKS, MemoryForecast
from backfill.blending.pool import Learned, OfflinePool
from backfill.blending.requests import OrderName, PoolRequest
from backfill.blending.resources import ResourceModel
from backfill.costs.model import CostModel
from backfill.costs.profile import CostProfile
from backfill.execution.executor import ExecutorInfo
from backfill.generation.generator import GenerationRequest
from backfill.models.config import ModelConfig
from backfill.models.tensor_shapes import num_parameters

# Of an engine that was not measured: an A100's, in bfloat16. The order depends on their ratio alone.
_FLOPS_PER_S = 312e12
_BYTES_PER_S = 2.039e12
_KV_DTYPE_BYTES = {"float32": 4, "int8": 1}
_FIRST_NAMESPACE = 1 << 31  # above all token ids


def create_pool(
    order: OrderName,
    info: ExecutorInfo,
    profile: CostProfile | None,
    folder: Path,
    learned: Learned | None = None,
) -> tuple[OfflinePool, MemoryForecast | None]:
    """An empty pool for the engine, and a forecast of its KV where the order asks for it.

    Raises: ModelError where the model's dimensions cannot be read.
    """
    resources = resources_of(info, profile, ModelConfig.from_folder(folder))
    block_size = info.block_size
    kv_tokens = info.num_blocks * block_size
    forecast = MemoryForecast(kv_tokens, SLACK_BLOCKS * block_size) if order == "blend" else None
    return OfflinePool(order, resources, kv_tokens=kv_tokens, learned=learned), forecast


def as_pool_request(request: GenerationRequest, request_id: int, namespace: int | None) -> PoolRequest:
    """Of several prompts or choices, the first one stands for all.

    Args:
        namespace: requests of two share no KV. It is a token before the prompt, also in ``reused_tokens``.
    """
    sampling = request.samplings[0]
    assert sampling.max_tokens is not None
    token_ids = array("I", [] if namespace is None else [_FIRST_NAMESPACE + namespace % _FIRST_NAMESPACE])
    token_ids.extend(request.prompts[0])
    runs_on = sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids
    is_known = runs_on or sampling.min_tokens == sampling.max_tokens
    return PoolRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        max_output_tokens=sampling.max_tokens,
        known_output_tokens=sampling.max_tokens if is_known else None,
        num_choices=request.num_choices,
    )


def resources_of(info: ExecutorInfo, profile: CostProfile | None, model: ModelConfig) -> ResourceModel:
    """As measured, where the engine has a cost profile; else from the model's dimensions."""
    computed = typical_resources(model, _KV_DTYPE_BYTES.get(info.kv_dtype or info.dtype, 2))
    return computed if profile is None else _measured(profile.cost, computed)


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
