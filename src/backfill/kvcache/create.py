"""The KV cache that a configuration asks for."""

from __future__ import annotations

from backfill.core.config import SchedulerConfig
from backfill.core.plan import CopyDirections
from backfill.kvcache.checkpointing import create_checkpoint_policy
from backfill.kvcache.manager import KVCacheManager


def create_kv_cache(
    config: SchedulerConfig, num_blocks: int, block_size: int, num_host_blocks: int = 0
) -> KVCacheManager:
    """A KV cache with the configuration's checkpointing, restoring and prefix caching."""
    blocking = CopyDirections.NONE
    if config.checkpointing == "swap":
        blocking |= CopyDirections.CHECKPOINT
    if config.kv_restore == "blocking":
        blocking |= CopyDirections.RESTORE
    return KVCacheManager(
        num_blocks,
        block_size,
        num_host_blocks,
        policy=create_checkpoint_policy(config.checkpointing or "none"),
        blocking=blocking,
        prefix_caching=config.prefix_caching,
        prefix_cache_scope=config.prefix_cache_scope,
    )
