"""Batches that must run before the plan, or they would miss their deadlines."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

from backfill.blending.requests import Batch
from backfill.blending.resources import Work

MARGIN_FRAC = 0.25
MARGIN_S = 60.0
"""Time that batches are taken to need, over the least time of their work: a share of it, and a fixed part.

The share is for the resource that is not perfectly overlapped, the fixed part for the latency of the last
request.
"""


class BatchWork(NamedTuple):
    """Requests of one batch and what they are expected to cost."""

    batch: Batch
    num_requests: int
    compute_s: float
    memory_s: float


@dataclass(slots=True)
class _Left:
    num_requests: int = 0
    work: Work = field(default_factory=Work)


class Deadlines:
    """What is left of each batch that has a deadline, and which of them are urgent."""

    def __init__(self) -> None:
        self._left: dict[Batch, _Left] = {}
        self._ordered: list[tuple[float, str]] = []  # the same batches, by deadline

    def add(self, some: BatchWork) -> None:
        batch = some.batch
        if batch.complete_by_s is None:
            return
        if batch not in self._left:
            self._left[batch] = _Left()
            insort(self._ordered, (batch.complete_by_s, batch.group))
        self._left[batch].num_requests += some.num_requests
        self._left[batch].work.add(some.compute_s, some.memory_s)

    def remove(self, some: BatchWork) -> None:
        batch = some.batch
        if batch.complete_by_s is None:
            return
        left = self._left[batch]
        left.num_requests -= some.num_requests
        left.work.remove(some.compute_s, some.memory_s)
        if left.num_requests == 0:
            del self._left[batch]
            del self._ordered[bisect_left(self._ordered, (batch.complete_by_s, batch.group))]

    def in_order(self) -> list[Batch]:
        """The batches with a deadline, the earliest first."""
        return [Batch(group, complete_by_s) for complete_by_s, group in self._ordered]

    def urgent(self, now_s: float) -> list[Batch]:
        """The batches to serve before others, earliest deadline first.

        All batches up to a deadline must be done by it, so their work is added up. Where it exceeds the
        time left, the deadlines up to there are in danger. Work is the greater of compute and memory time,
        with the device for this alone. A deadline that has passed is no reason to be served first.
        """
        in_danger: list[Batch] = []
        passed: list[Batch] = []
        total = Work()
        for complete_by_s, group in self._ordered:
            if complete_by_s <= now_s:
                continue
            batch = Batch(group, complete_by_s)
            work = self._left[batch].work
            total.add(work.compute_s, work.memory_s)
            passed.append(batch)
            if total.time_s * (1 + MARGIN_FRAC) + MARGIN_S >= complete_by_s - now_s:
                in_danger += passed
                passed.clear()
        return in_danger
