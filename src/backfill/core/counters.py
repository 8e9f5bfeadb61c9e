"""Counters of each service class."""

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
    """

    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_discarded_tokens: float = 0.0
    num_checkpointed_tokens: int = 0
    num_reclaimed_tokens: int = 0
    num_restored_tokens: int = 0

    def copy(self) -> ClassCounters:
        return replace(self)
