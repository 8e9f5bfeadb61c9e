"""Policies that decide which blocks are checkpointed, and when (ConServe, section 4.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a checkpoint policy sees.

    Attributes:
        num_blocks: of the device's pool.
        num_free: those that hold neither a running request's KV nor what a preempted one lacks a copy of.
        num_checkpointed: the others that have a host copy, complete or in flight.
    """

    num_blocks: int
    num_free: int
    num_checkpointed: int


class CheckpointPolicy(Protocol):
    """Decides how many blocks of running requests are checkpointed before a step."""

    checkpoints_at_preemption: bool  # a preempted request's other blocks are checkpointed then

    def max_blocks(self, view: PoolView) -> int:
        """Most blocks to begin checkpointing before the next step."""
        ...


class NoCheckpoints:
    """Preempted requests are recomputed."""

    checkpoints_at_preemption = False

    def max_blocks(self, view: PoolView) -> int:
        return 0


class SwapAtPreemption:
    """A request is checkpointed when it is preempted, and the step waits: what swapping engines do."""

    checkpoints_at_preemption = True

    def max_blocks(self, view: PoolView) -> int:
        return 0


class EagerCheckpoints:
    """Every block as soon as it is full."""

    checkpoints_at_preemption = True

    def max_blocks(self, view: PoolView) -> int:
        return view.num_blocks


class AdaptiveCheckpoints:
    """Keeps a share of the used blocks checkpointed. The share grows with the use of the pool.

    It is 0 below ``begins_at`` and 1 from ``complete_at`` on, linear in between (the shape of random early
    detection, to which the paper refers). A constant share makes the rate follow the consumption: as many
    blocks are checkpointed as are filled, and more while the use grows.

    Args:
        begins_at, complete_at: used shares of the pool.
    """

    checkpoints_at_preemption = True

    def __init__(self, begins_at: float, complete_at: float) -> None:
        assert 0.0 <= begins_at < complete_at <= 1.0
        self._begins_at = begins_at
        self._complete_at = complete_at

    def max_blocks(self, view: PoolView) -> int:
        used = view.num_blocks - view.num_free
        pressure = (used / view.num_blocks - self._begins_at) / (self._complete_at - self._begins_at)
        if pressure <= 0.0:
            return 0
        return max(0, math.ceil(min(pressure, 1.0) * used) - view.num_checkpointed)
