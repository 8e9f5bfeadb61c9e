"""Counters of each service class, and of the blocks of a tier."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class ClassCounters:
    """Totals of one service class since the start.

    Attributes:
        num_computed_tokens: tokens computed in committed steps, recomputed ones included.
        num_recomputed_tokens: tokens among them that had been computed before a preemption.
        num_discarded_tokens: tokens of discarded slices; a token counts by the share of the layers that it
            had passed.
        num_checkpointed_tokens: tokens whose KV was copied to host memory, at a preemption or before.
        num_reclaimed_tokens: tokens of preempted requests whose KV was in host memory when their blocks were
            reclaimed.
        num_restored_tokens: tokens whose KV was copied back to the device.
        num_prefix_queried_tokens: prompt tokens of requests that were looked up in the prefix cache.
        num_prefix_hit_tokens: tokens among them that were found on the device.
        num_host_prefix_hit_tokens: tokens among them that were found in host memory.
        num_evicted_blocks, num_evicted_host_blocks: cached blocks of this class whose memory on the device,
            and in host memory, was taken for other KV.
    """

    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_discarded_tokens: float = 0.0
    num_checkpointed_tokens: int = 0
    num_reclaimed_tokens: int = 0
    num_restored_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_host_prefix_hit_tokens: int = 0
    num_evicted_blocks: int = 0
    num_evicted_host_blocks: int = 0

    @property
    def num_all_prefix_hit_tokens(self) -> int:
        """Tokens found in the prefix cache, on the device or in host memory."""
        return self.num_prefix_hit_tokens + self.num_host_prefix_hit_tokens

    def copy(self) -> ClassCounters:
        return replace(self)


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Blocks of a tier's KV pool by use; their sum is the pool.

    Attributes:
        online, offline: on the device, referenced by requests of the class; by both counts as online. In host
            memory, copies of what running requests reference, and what preempted ones will come back for.
        cached: with other content.
        empty: without content, or so once the copies on them complete.
    """

    online: int = 0
    offline: int = 0
    cached: int = 0
    empty: int = 0
