"""Batches that must run before the plan, or they would miss their deadlines."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from backfill.blending.requests import Batch
from backfill.blending.resources import Cost, Work

MARGIN_FRAC = 0.25
MARGIN_S = 60.0
"""Time that batches are taken to need, over what their work takes at the present pace: a share of it, and a
fixed part.

The share is for a pace that changes, the fixed part for the latency of the last request.
"""

_PACE_HALF_LIFE_S = 600.0
_PACE_PRIOR_S = 60.0
_LEAST_S = 1e-9


class BatchWork(NamedTuple):
    """Requests of one batch and what they are expected to cost."""

    batch: Batch
    num_requests: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class ObservedPace:
    """Work, in its least time, and the seconds that it took."""

    done: Work
    elapsed_s: float


class Pace:
    """How long work takes over its least time: the device is shared with online requests, and never ideal.

    What was observed counts by half after ten minutes. At first it is a minute of work in its least time.

    Args:
        observed: by another one for the same device.
    """

    def __init__(self, observed: ObservedPace | None = None) -> None:
        prior = ObservedPace(Work(_PACE_PRIOR_S, _PACE_PRIOR_S), _PACE_PRIOR_S)
        self._done, self._elapsed_s = replace((observed or prior).done), (observed or prior).elapsed_s
        self._at_s: float | None = None

    @property
    def observed(self) -> ObservedPace:
        return ObservedPace(replace(self._done), self._elapsed_s)

    @property
    def slowdown(self) -> float:
        """Seconds that a second of work takes; at least 1."""
        return max(1.0, self._elapsed_s / max(self._done.time_s, _LEAST_S))

    def advance(self, now_s: float, *, is_busy: bool) -> None:
        """Time went on; ``is_busy``: with requests in flight since the last call."""
        at_s, self._at_s = self._at_s, now_s
        if at_s is None or not is_busy or now_s <= at_s:
            return
        kept = 0.5 ** ((now_s - at_s) / _PACE_HALF_LIFE_S)
        self._elapsed_s = self._elapsed_s * kept + (now_s - at_s)
        self._done = Work(self._done.compute_s * kept, self._done.memory_s * kept)

    def add(self, compute_s: float, memory_s: float) -> None:
        """Work was done."""
        self._done.add(max(compute_s, 0.0), max(memory_s, 0.0))


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
        self._left[batch].work.add(*some.cost)

    def remove(self, some: BatchWork) -> None:
        batch = some.batch
        if batch.complete_by_s is None:
            return
        left = self._left[batch]
        left.num_requests -= some.num_requests
        left.work.remove(*some.cost)
        if left.num_requests == 0:
            del self._left[batch]
            del self._ordered[bisect_left(self._ordered, (batch.complete_by_s, batch.group))]

    def in_order(self) -> list[Batch]:
        """The batches with a deadline, the earliest first."""
        return [Batch(group, complete_by_s) for complete_by_s, group in self._ordered]

    def urgent(self, now_s: float, slowdown: float, group: str | None = None) -> list[Batch]:
        """The batches to serve before others, earliest deadline first.

        All batches up to a deadline must be done by it, so their work is added up: the greater of compute
        and memory time. Where it exceeds the time left, the deadlines up to there are in danger. A deadline
        that has passed is no reason to be served first.

        Args:
            slowdown: seconds that a second of work takes on the whole device.
            group: whose batches; the device is shared evenly between groups, so each has a part of its pace.
                None: all batches, whoever's.
        """
        if group is not None:
            slowdown *= len({batch.group for batch in self._left})
        in_danger: list[Batch] = []
        passed: list[Batch] = []
        total = Work()
        for complete_by_s, of_group in self._ordered:
            if complete_by_s <= now_s or group not in (None, of_group):
                continue
            batch = Batch(of_group, complete_by_s)
            work = self._left[batch].work
            total.add(work.compute_s, work.memory_s)
            passed.append(batch)
            if total.time_s * slowdown * (1 + MARGIN_FRAC) + MARGIN_S >= complete_by_s - now_s:
                in_danger += passed
                passed.clear()
        return in_danger
