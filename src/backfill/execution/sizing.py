"""Sizes of what a rank allocates: its KV blocks, on the device and on the host, and its longest request.

The KV pool is one pool, and each rank has a part of every block. So ``kv_gib`` and ``host_kv_gib`` are of all
ranks together. ``device_memory`` is of one device: on CPU all ranks share it, on CUDA each rank has its own.

The server's process, which has no torch, asks ``check_sizes`` before it starts an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backfill.core.block import KVLayout
from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.execution.machine import available_host_bytes, check_host_pool_fits, runs_on_cpu
from backfill.execution.memory import (
    MemoryPlan,
    WeightSizes,
    activation_bytes,
    check_pool_fits,
    plan_memory,
)
from backfill.models.config import ModelConfig
from backfill.models.placement import ModelPlacement
from backfill.models.shard import ShardSizes

if TYPE_CHECKING:
    import torch

    from backfill.models.weights import Checkpoint

logger = logging.getLogger(__name__)

_DEFAULT_CPU_KV_BYTES = GIB
_DEFAULT_HOST_KV_FRAC = 0.25  # of the host memory that is left, as an upper limit


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What a rank allocates.

    Ranks with devices of their own may differ in the numbers of blocks and the length; the least one holds.

    Attributes:
        layout: of the rank's part of each block.
        memory: of the rank's device; on CPU of the memory that all ranks share.
        block_bytes: of a block, on all ranks together.
        num_blocks, num_host_blocks: in the KV pools of device and host.
        max_model_len: tokens of prompt and output a request can have.
    """

    layout: KVLayout
    memory: MemoryPlan
    block_bytes: int
    num_blocks: int
    num_host_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Target:
    """A model, the ranks that it is divided among, and what it runs on and in.

    Attributes:
        device: of the rank in question.
        dtype: of rows, and of weights and KV that are not codes.
        checkpoint: the model's weights.
    """

    config: EngineConfig
    placement: ModelPlacement
    device: torch.device
    dtype: torch.dtype
    checkpoint: Checkpoint

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_codes(self) -> str:
        """Type of KV that is codes; empty where it is of ``dtype``."""
        return "" if self.config.kv_dtype == "auto" else self.config.kv_dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        import torch

        return torch.int8 if self.kv_codes else self.dtype

    def plan_rank(self, rank: int = 0, node_ranks: Sequence[int] | None = None) -> RankPlan:
        """Size what one rank allocates. Where ranks share a memory: before any of them allocates.

        Args:
            node_ranks: ranks that share the machine's memory. None: all.
        Raises: ConfigError, InsufficientMemory.
        """
        config, placement = self.config, self.placement
        on_cpu, utilization = self.device.type == "cpu", config.gpu_memory_utilization
        available = available_host_bytes() if on_cpu else available_cuda_bytes(self.device, utilization)
        memory = self.divide_memory(available, rank, node_ranks)
        num_blocks, block_bytes = memory.num_blocks, self._block_bytes(placement.shards())
        kv_bytes = num_blocks * block_bytes if placement.num_ranks > 1 else memory.kv_bytes
        on_node = list(map(placement.sizes, range(placement.num_ranks) if node_ranks is None else node_ranks))
        taken_bytes = memory.weights_bytes + memory.kv_bytes
        if not on_cpu:
            taken_bytes = self.weight_sizes(on_node).host_layers_bytes(config.offload_every)
        on_host = available_host_bytes()
        left_bytes = (
            None if on_host is None else (on_host - taken_bytes) * block_bytes // self._block_bytes(on_node)
        )
        return RankPlan(
            self.kv_layout(placement.sizes(rank)),
            memory,
            block_bytes,
            num_blocks,
            num_host_blocks=choose_num_host_blocks(config, block_bytes, kv_bytes, left_bytes),
            max_model_len=_choose_max_model_len(
                config, placement.config, num_blocks, block_bytes, warns=rank == 0
            ),
        )

    def divide_memory(
        self, available_bytes: int | None, rank: int = 0, node_ranks: Sequence[int] | None = None
    ) -> MemoryPlan:
        """Of a rank's device; see ``plan_rank``, also for what it raises.

        Args:
            available_bytes: what the device has; None: unknown.
        """
        config, placement, on_cpu = self.config, self.placement, self.device.type == "cpu"
        _check_interval(config.offload_every, placement)
        sharing = range(placement.num_ranks) if node_ranks is None else node_ranks
        shards = list(map(placement.sizes, sharing if on_cpu else [rank]))
        block_bytes, kv_bytes = self._block_bytes(shards), config.kv_bytes
        has_all = len(shards) == placement.num_ranks
        if on_cpu and kv_bytes is None and config.device_memory_bytes is None and not has_all:
            kv_bytes = _DEFAULT_CPU_KV_BYTES  # as below, of all ranks together
        if kv_bytes is not None:
            kv_bytes = self._part_of_pool(kv_bytes, shards)
        return plan_memory(
            self.weight_sizes(shards),
            device=str(self.device),
            block_bytes=block_bytes,
            default_kv_bytes=_DEFAULT_CPU_KV_BYTES if on_cpu else None,
            interval=config.offload_every,
            kv_bytes=kv_bytes,
            limit_bytes=config.device_memory_bytes,
            activation_bytes=self.step_bytes(shards),
            available_bytes=available_bytes,
        )

    def least_device_bytes(self, ranks: Sequence[int]) -> int:
        """Of device memory that these ranks need together.

        The KV pool has the size that is asked for, of which they have their part, else one block.
        """
        config, shards = self.config, list(map(self.placement.sizes, ranks))
        weights_bytes = self.weight_sizes(shards).device_bytes(config.offload_every)
        one_block, kv_bytes = self._block_bytes(shards), config.kv_bytes
        pool_bytes = one_block if kv_bytes is None else self._part_of_pool(kv_bytes, shards)
        return weights_bytes + self.step_bytes(shards) + pool_bytes

    def kv_layout(self, shard: ShardSizes) -> KVLayout:
        """Of a rank's part of a KV block."""
        return _kv_layout(shard, self.config, self.dtype.itemsize)

    def weight_sizes(self, shards: Sequence[ShardSizes]) -> WeightSizes:
        """Of shards in the memory of one device."""
        checkpoint = self.checkpoint
        return WeightSizes.of(shards, checkpoint.layer_width, checkpoint.table_width, self.dtype.itemsize)

    def step_bytes(self, shards: Sequence[ShardSizes]) -> int:
        """What a step takes beside weights and KV, on ranks that share a memory."""
        limits, dtype_bytes = self.config.scheduler, self.dtype.itemsize
        return sum(
            activation_bytes(each, limits.max_num_batched_tokens, limits.max_num_seqs, dtype_bytes)
            for each in shards
        )

    def _part_of_pool(self, kv_bytes: int, shards: Sequence[ShardSizes]) -> int:
        """What some ranks have of a KV pool that all of them have together."""
        if len(shards) == self.placement.num_ranks:
            return kv_bytes
        return kv_bytes // self._block_bytes(self.placement.shards()) * self._block_bytes(shards)

    def _block_bytes(self, shards: Sequence[ShardSizes]) -> int:
        """Of a KV block, on several ranks together."""
        return sum(self.kv_layout(each).block_bytes for each in shards)


def check_sizes(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse what ``Target.plan_rank`` would, as far as it is known without torch, the weights and a GPU.

    Raises: ConfigError, InsufficientMemory.
    """
    placement = ModelPlacement.of(model, config.tensor_parallel_size, config.pipeline_parallel_size)
    _check_interval(config.offload_every, placement)
    _check_context(config, model)
    kv_bytes = config.kv_bytes
    if config.executor != "ray" and runs_on_cpu(config):
        if kv_bytes is None and config.device_memory is None:
            kv_bytes = _DEFAULT_CPU_KV_BYTES
        available = available_host_bytes()
        check_pool_fits(kv_bytes or 0, device="cpu", available_bytes=available)
        if config.host_kv_bytes is not None and config.scheduler.checkpointing not in (None, "none"):
            left = None if available is None else available - (kv_bytes or 0)
            check_host_pool_fits(host_kv_bytes=config.host_kv_bytes, left_bytes=left)
    if kv_bytes is not None:
        dtype = model.dtype if config.dtype == "auto" else config.dtype
        layouts = (_kv_layout(each, config, 4 if dtype == "float32" else 2) for each in placement.shards())
        block_bytes = sum(each.block_bytes for each in layouts)
        _choose_max_model_len(config, model, kv_bytes // block_bytes, block_bytes, warns=False)


def _kv_layout(shard: ShardSizes, config: EngineConfig, dtype_bytes: int) -> KVLayout:
    """Args: dtype_bytes: of KV that is not codes."""
    return KVLayout(
        num_layers=len(shard.layers),
        num_kv_heads=shard.kv_heads.length,
        head_dim=shard.config.head_dim,
        block_size=config.block_size,
        dtype_bytes=dtype_bytes if config.kv_dtype == "auto" else 1,
    )


def _check_interval(interval: int | None, placement: ModelPlacement) -> None:
    """Raises: ConfigError for an interval with which no stage offloads a layer."""
    most = placement.most_layers
    if interval is not None and interval > most:
        of = "the model's layers" if len(placement.stages) == 1 else "the layers of the largest stage"
        raise ConfigError(
            f"must be none, auto or at most {most}, {of}, got {interval}.", field="offload_interval"
        )


def available_cuda_bytes(device: torch.device, utilization: float) -> int:
    """Bytes of device memory that this process may still allocate, up to ``utilization`` of the total."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free))


def choose_num_host_blocks(
    config: EngineConfig, block_bytes: int, kv_bytes: int, left_bytes: int | None
) -> int:
    """Blocks of the host pool, 0 for none.

    Args:
        kv_bytes: of the device's pool.
        left_bytes: of host memory, for blocks of all ranks; None: unknown.
    Raises: InsufficientMemory.
    """
    if config.scheduler.checkpointing in (None, "none") or config.host_kv_bytes == 0:
        return 0
    if config.host_kv_bytes is None:
        host_kv_bytes = kv_bytes
        if left_bytes is not None:
            host_kv_bytes = min(host_kv_bytes, max(0, int(left_bytes * _DEFAULT_HOST_KV_FRAC)))
        return host_kv_bytes // block_bytes
    check_host_pool_fits(host_kv_bytes=config.host_kv_bytes, left_bytes=left_bytes)
    if config.host_kv_bytes < block_bytes:
        raise InsufficientMemory(
            f"The KV pool in host memory holds no block: one takes {block_bytes / GIB:.4f} GiB; raise "
            "`host_kv_gib`, or use 0 to have none."
        )
    return config.host_kv_bytes // block_bytes


def _check_context(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens that the model allows. Raises: ConfigError if more are asked for."""
    model_limit, asked = model_config.max_position_embeddings, config.max_model_tokens
    if model_config.sliding_window is not None:
        # Attention here has no window: the results are equal only up to the window's length.
        model_limit = min(model_limit, model_config.sliding_window)
    if asked is not None and asked > model_limit:
        raise ConfigError(f"`max_model_len` {asked} exceeds the model's context of {model_limit} tokens.")
    return model_limit


def _choose_max_model_len(
    config: EngineConfig, model_config: ModelConfig, num_blocks: int, block_bytes: int, *, warns: bool
) -> int:
    model_limit = _check_context(config, model_config)
    pool_limit = num_blocks * config.block_size
    asked = config.max_model_tokens
    if asked is not None:
        if asked > pool_limit:
            needed_gib = -(-asked // config.block_size) * block_bytes / GIB
            raise InsufficientMemory(
                f"`max_model_len` {asked} needs a KV pool of {needed_gib:.3f} GiB, and it "
                f"holds {pool_limit} tokens; raise `kv_gib` or lower `max_model_len`."
            )
        return asked
    if pool_limit < 1:
        raise InsufficientMemory(
            f"The KV pool holds no block: one takes {block_bytes / GIB:.4f} GiB; raise `kv_gib`."
        )
    if pool_limit < model_limit and warns:
        logger.warning(
            "the KV pool holds %d tokens, fewer than the model's context of %d: longer requests are refused",
            pool_limit,
            model_limit,
        )
    return min(model_limit, pool_limit)
