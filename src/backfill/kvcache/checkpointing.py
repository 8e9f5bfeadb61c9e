"""When blocks are checkpointed: policies that decide, and nothing else (ConServe, section 4.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from backfill.core.config import CheckpointingName
from backfill.core.request import Request


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a checkpoint policy sees.

    Attributes:
        num_blocks, num_free: of the device's pool.
        num_checkpointed: device blocks that have a host copy, complete or under way.
    """

    num_blocks: int
    num_free: int
    num_checkpointed: int


class CheckpointPolicy(Protocol):
    """Decides how many blocks are copied before a step, whose, and what a full host pool drops."""

    name: CheckpointingName
    checkpoints_at_preemption: bool  # what a preempted request has no copy of is copied then

    def num_blocks(self, view: PoolView) -> int:
        """Blocks to begin copying before the next step, if there are so many without a copy."""
        ...

    def order_key(self, request: Request) -> Any:
        """The candidate with the least key is copied first, whole, before the next."""
        ...

    def drop_key(self, request: Request, *, on_device: bool) -> Any:
        """When the host's pool is full the request with the greatest key loses copies first.

        To make room for a request that is preempted, only those with a greater key than its own.
        """
        ...


class _ByUrgency:
    """What the policies share: whose blocks come first, and whose go."""

    def order_key(self, request: Request) -> Any:
        """The least urgent first: they are preempted first."""
        return (-request.priority_level.value, *(-part for part in request.order_key))

    def drop_key(self, request: Request, *, on_device: bool) -> Any:
        """Copies of what is on the device first, and of these the most urgent request's, which stays longest.

        Off the device the copy is all there is; there the least urgent class gives way.
        """
        level = request.priority_level.value
        return (on_device, -level if on_device else level)


class NoCheckpoints(_ByUrgency):
    """Preempted requests are recomputed."""

    name: CheckpointingName = "none"
    checkpoints_at_preemption = False

    def num_blocks(self, view: PoolView) -> int:
        return 0


class SwapAtPreemption(_ByUrgency):
    """Everything is copied when a request is preempted, and the step waits: what swapping engines do."""

    name: CheckpointingName = "swap"
    checkpoints_at_preemption = True

    def num_blocks(self, view: PoolView) -> int:
        return 0


class EagerCheckpoints(_ByUrgency):
    """Every block as soon as it is full."""

    name: CheckpointingName = "eager"
    checkpoints_at_preemption = True

    def num_blocks(self, view: PoolView) -> int:
        return view.num_blocks


class AdaptiveCheckpoints(_ByUrgency):
    """Nothing while more than half the pool is free, then a share of the blocks in use that grows with use.

    The share is 0 at ``begins_at`` and 1 at ``complete_at``, linear in between (random early detection's
    shape, to which the paper refers). Holding a share, the rate follows what is consumed by itself: as many
    blocks are copied as are filled, and more while use grows.

    Args:
        begins_at, complete_at: shares of the pool that is in use.
    """

    name: CheckpointingName = "adaptive"
    checkpoints_at_preemption = True

    def __init__(self, begins_at: float = 0.5, complete_at: float = 0.9) -> None:
        assert 0.0 <= begins_at < complete_at <= 1.0
        self._begins_at = begins_at
        self._complete_at = complete_at

    def num_blocks(self, view: PoolView) -> int:
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
