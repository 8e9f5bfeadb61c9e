"""What the ranks report, as one executor's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from backfill.core.block import BlockCopy, SlotCopy
from backfill.core.plan import StepOutcome, WeightTransfers
from backfill.execution.executor import ExecutorInfo


def merge_infos(infos: Sequence[ExecutorInfo], num_stages: int) -> ExecutorInfo:
    """Of all ranks together: a block exists where all ranks have memory for their part of it."""
    num_blocks = min(info.num_blocks for info in infos)
    return replace(
        infos[0],
        num_blocks=num_blocks,
        num_host_blocks=min(info.num_host_blocks for info in infos),
        max_model_len=min(info.max_model_len for info in infos),
        block_bytes=sum(info.block_bytes for info in infos),
        max_steps_in_flight=num_stages,
    )


def merge_transfers(transfers: Sequence[WeightTransfers]) -> WeightTransfers:
    """Of all ranks in a step: each transfers its shard of its layers, while the others transfer theirs."""
    if not transfers:
        return WeightTransfers()
    return WeightTransfers(
        transfers[0].interval,
        num_bytes=sum(each.num_bytes for each in transfers),
        stall_s=max(each.stall_s for each in transfers),
        transfer_s=max(each.transfer_s for each in transfers),
    )


@dataclass(slots=True)
class CompletedOnAll:
    """Copies that all ranks have completed. Each rank copies its part of a block, at its own pace."""

    num_ranks: int
    _counts: Counter[BlockCopy | SlotCopy] = field(default_factory=Counter)
    _blocks: list[BlockCopy] = field(default_factory=list)
    _slots: list[SlotCopy] = field(default_factory=list)

    def add(self, outcome: StepOutcome) -> None:
        """Of one rank."""
        for copy in outcome.completed_copies:
            if self._is_last(copy):
                self._blocks.append(copy)
        for slot_copy in outcome.completed_slot_copies:
            if self._is_last(slot_copy):
                self._slots.append(slot_copy)

    def take(self) -> tuple[tuple[BlockCopy, ...], tuple[SlotCopy, ...]]:
        """Those since the last call."""
        taken = tuple(self._blocks), tuple(self._slots)
        self._blocks, self._slots = [], []
        return taken

    def _is_last(self, copy: BlockCopy | SlotCopy) -> bool:
        self._counts[copy] += 1
        if self._counts[copy] < self.num_ranks:
            return False
        del self._counts[copy]
        return True
