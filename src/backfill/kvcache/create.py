"""The KV cache that a configuration asks for."""

from __future__ import annotations

from backfill.core.config import SchedulerConfig
from backfill.core.plan import CopyDirections
from backfill.kvcache.checkpointing import (
    AdaptiveCheckpoints,
    CheckpointPolicy,
    FixedCheckpoints,
    UserCheckpoints,
)
from backfill.kvcache.manager import KVCacheManager


def create_kv_cache(
    config: SchedulerConfig,
    num_blocks: int,
    block_size: int,
    num_host_blocks: int = 0,
    max_num_blocks: int | None = None,
) -> KVCacheManager:
    """A KV cache with the configuration's checkpointing, restoring and prefix caching.

    Raises: ConfigError if the user's own checkpoint policy cannot be made.
    """
    blocking = CopyDirections.NONE
    if config.checkpointing in ("swap", "lazy"):
        blocking |= CopyDirections.CHECKPOINT
    if config.kv_restore == "blocking":
        blocking |= CopyDirections.RESTORE
    return KVCacheManager(
        num_blocks,
        block_size,
        num_host_blocks,
        policy=create_checkpoint_policy(config),
        blocking=blocking,
        prefix_caching=config.prefix_caching,
        prefix_cache_scope=config.prefix_cache_scope,
        bidirectional=config.shares_blocks,
        max_num_blocks=max_num_blocks,
    )


def create_checkpoint_policy(config: SchedulerConfig) -> CheckpointPolicy:
    """The policy of ``config.checkpointing``. Raises: ConfigError if the user's own one cannot be made."""
    match config.checkpointing:
        case None | "none" | "lazy":  # lazy: as other KV is about to overwrite it (BROS, section 5.2)
            return FixedCheckpoints()
        case "swap":  # what swapping engines do
            return FixedCheckpoints(checkpoints_at_preemption=True)
        case "eager":
            return FixedCheckpoints(checkpoints_at_preemption=True, copies_full_blocks=True)
        case "adaptive":
            return AdaptiveCheckpoints(config.checkpoint_from, config.checkpoint_all_from)
        case path:
            return UserCheckpoints(path)
