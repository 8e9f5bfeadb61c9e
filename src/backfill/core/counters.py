"""What is counted of each service class."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class ClassCounters:
    """Totals since the start, of one service class.

    Attributes:
        num_computed_tokens: in steps that were committed, recomputation included.
        num_recomputed_tokens: of these, tokens that had been computed before a preemption.
        num_discarded_tokens: computed in slices that were stopped and discarded; a token counts by the share
            of the layers that it had passed.
        num_checkpointed_tokens: whose KV was copied to host memory, at a preemption or before.
        num_reclaimed_tokens: of preempted requests, kept in host memory when their blocks were taken back.
        num_restored_tokens: whose KV was copied back.
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
