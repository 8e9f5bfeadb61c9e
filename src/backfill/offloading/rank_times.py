"""What ranks have measured of a step, as the times of one model: Select-N, section 4.4, on several ranks.

The ranks of a stage compute each layer in lockstep: sums over all of them end it. So its time on a rank that
begins it early has the wait for the others in it, whose weights are not there yet or who were late; the rank
that begins it last waits for nobody. That is the one with the least time, and what it did between two layers
is what the step took there. Stages follow one another. The time of a layer's transfer is that of the rank
whose part is there last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from backfill.core.plan import RankTiming

_Each = TypeVar("_Each")


class StepTimes(NamedTuple):
    """Of one step: seconds of each layer of the model, and of all waits for weights."""

    layers_s: list[float]
    waits_s: float


def merge_step(timings: Sequence[RankTiming], num_stages: int) -> StepTimes:
    """Of the ranks of a step that ran alone. Args: timings: by rank."""
    layers_s: list[float] = []
    waits_s = 0.0
    for ranks in _by_stage(timings, num_stages):
        for of_ranks in zip(*(zip(each.layers_s, each.waits_s, strict=True) for each in ranks), strict=True):
            layer_s, wait_s = min(of_ranks)
            layers_s.append(layer_s)
            waits_s += wait_s
    return StepTimes(layers_s, waits_s)


class RankTransfers:
    """Collects the transfers of all ranks. Each transfers its parts of the same layers in the same order."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._by_rank: list[list[float]] = []

    def add(self, timings: Sequence[RankTiming]) -> None:
        """Of a step, by rank."""
        if not self._by_rank:
            self._by_rank = [[] for _ in timings]
        for times_s, timing in zip(self._by_rank, timings, strict=True):
            times_s.extend(timing.transfers_s)

    def take(self) -> list[list[float]]:
        """Of each stage, seconds of the transfers that have ended on all its ranks; then forgets all."""
        taken, self._by_rank = self._by_rank, []
        return [list(map(max, zip(*ranks, strict=False))) for ranks in _by_stage(taken, self._num_stages)]


def layer_bytes(timings: Sequence[RankTiming], num_stages: int) -> int:
    """Of the weights of a layer, on all ranks of its stage together."""
    return max(sum(each.layer_bytes for each in ranks) for ranks in _by_stage(timings, num_stages))


def _by_stage(by_rank: Sequence[_Each], num_stages: int) -> list[Sequence[_Each]]:
    size = len(by_rank) // num_stages
    return [by_rank[first : first + size] for first in range(0, size * num_stages, size)]
