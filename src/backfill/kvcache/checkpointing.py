"""Policies that decide which blocks are checkpointed, and when (ConServe, section 4.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backfill.core.config import CheckpointingName
from backfill.core.request import Request

SortKey: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a checkpoint policy sees.

    Attributes:
        num_blocks, num_free: of the device's pool.
        num_checkpointed: device blocks that have a host copy, complete or in flight.
    """

    num_blocks: int
    num_free: int
    num_checkpointed: int


class CheckpointPolicy(Protocol):
    """Decides how many blocks are checkpointed before a step, whose, and what a full host pool evicts."""

    name: CheckpointingName
    checkpoints_at_preemption: bool  # a preempted request's other blocks are checkpointed then

    def max_blocks(self, view: PoolView) -> int:
        """Most blocks to begin checkpointing before the next step."""
        ...

    def checkpoint_key(self, request: Request) -> SortKey:
        """All blocks of the candidate with the least key are checkpointed first."""
        ...

    def eviction_key(self, request: Request, *, on_device: bool) -> SortKey:
        """When the host's pool is full, copies of the request with the greatest key are evicted first.

        For a preempted request, only copies of requests with a greater key than its own are evicted.
        """
        ...


class _PriorityOrder:
    """The keys of all policies: by priority."""

    def checkpoint_key(self, request: Request) -> SortKey:
        """The least urgent request first, because it is preempted first."""
        return (-request.priority_level.value, *(-part for part in request.order_key))

    def eviction_key(self, request: Request, *, on_device: bool) -> SortKey:
        """Copies of requests on the device first: their KV is not lost. Of these the most urgent request's,
        which is preempted last. Of preempted requests the least urgent class's.
        """
        level = request.priority_level.value
        return (on_device, -level if on_device else level)


class NoCheckpoints(_PriorityOrder):
    """Preempted requests are recomputed."""

    name: CheckpointingName = "none"
    checkpoints_at_preemption = False

    def max_blocks(self, view: PoolView) -> int:
        return 0


class SwapAtPreemption(_PriorityOrder):
    """A request is checkpointed when it is preempted, and the step waits: what swapping engines do."""

    name: CheckpointingName = "swap"
    checkpoints_at_preemption = True

    def max_blocks(self, view: PoolView) -> int:
        return 0


class EagerCheckpoints(_PriorityOrder):
    """Every block as soon as it is full."""

    name: CheckpointingName = "eager"
    checkpoints_at_preemption = True

    def max_blocks(self, view: PoolView) -> int:
        return view.num_blocks


class AdaptiveCheckpoints(_PriorityOrder):
    """Keeps a share of the used blocks checkpointed. The share grows with the use of the pool.

    It is 0 below ``begins_at`` and 1 from ``complete_at`` on, linear in between (the shape of random early
    detection, to which the paper refers). A constant share makes the rate follow the consumption: as many
    blocks are checkpointed as are filled, and more while the use grows.

    Args:
        begins_at, complete_at: used shares of the pool.
    """

    name: CheckpointingName = "adaptive"
    checkpoints_at_preemption = True

    def __init__(self, begins_at: float = 0.5, complete_at: float = 0.9) -> None:
        assert 0.0 <= begins_at < complete_at <= 1.0
        self._begins_at = begins_at
        self._complete_at = complete_at

    def max_blocks(self, view: PoolView) -> int:
        used = view.num_blocks - view.num_free
        pressure = (used / view.num_blocks - self._begins_at) / (self._complete_at - self._begins_at)
        if pressure <= 0.0:
            return 0
        return max(0, math.ceil(min(pressure, 1.0) * used) - view.num_checkpointed)


def create_checkpoint_policy(name: CheckpointingName) -> CheckpointPolicy:
    policies: dict[str, type[CheckpointPolicy]] = {
        policy.name: policy
        for policy in (NoCheckpoints, SwapAtPreemption, EagerCheckpoints, AdaptiveCheckpoints)
    }
    return policies[name]()
