"""Finds out what a real device does, so that it can be simulated."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from backfill.core.clock import Clock, VirtualClock
from backfill.core.plan import Compute, CopyDirections, StepOutcome, StepPlan
from backfill.costs.behaviour import DeviceBehaviour, StepNoise
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.costs.profile import CostProfile
from backfill.costs.refine import ProfileRefiner
from backfill.execution.executor import StoppableExecutor

# The median of fewer steps beside copies says nothing.
_LEAST_BESIDE_COPIES = 20
_SEED = 0


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A step that ran from its first layer to its last without waiting for copies.

    Attributes:
        beside_copies: blocks were copied while it ran, or some part of it.
    """

    plan: StepPlan
    seconds: float
    num_safepoints: int
    beside_copies: bool


class ObservedExecutor:
    """Passes plans on to an executor and notes what they took.

    Attributes:
        steps: in order; those that were stopped, resumed or waited are left out.
        gaps_s: from the end of each plan to the begin of the next.
    """

    def __init__(self, executor: StoppableExecutor, clock: Clock) -> None:
        self.info = executor.info
        self.steps: list[ObservedStep] = []
        self.gaps_s: list[float] = []
        self._executor = executor
        self._clock = clock
        self._num_copying = 0
        self._ended_at_s: float | None = None

    def request_stop(self, step: int) -> None:
        self._executor.request_stop(step)

    def run(self, plan: StepPlan) -> StepOutcome:
        began_s = self._clock.now_s()
        if self._ended_at_s is not None:
            self.gaps_s.append(began_s - self._ended_at_s)
        self._num_copying += _num_background_copies(plan)
        beside_copies = self._num_copying > 0
        outcome = self._executor.run(plan)
        self._num_copying -= len(outcome.completed_copies)
        self._ended_at_s = self._clock.now_s()
        if isinstance(plan.work, Compute) and plan.slices and not outcome.stopped and not plan.copies.stalls:
            points = plan.safepoints
            num_safepoints = 0 if points is None else (self.info.num_layers - 1) // points.layers_apart
            seconds = self._ended_at_s - began_s
            self.steps.append(ObservedStep(plan, seconds, num_safepoints, beside_copies))
        return outcome


def observed_behaviour(
    steps: Sequence[ObservedStep],
    gaps_s: Sequence[float],
    profile: CostProfile,
    grid: Iterable[StepLoad],
    *,
    safepoint_s: float,
) -> DeviceBehaviour:
    """The behaviour of the device on which these steps ran.

    Its typical step times are fitted to the steps as ``ProfileRefiner`` does. The noise is of the steps over
    these. Copies are as fast as in the profile. The host takes the median gap between two steps.

    Args:
        profile: predicted the steps; kept where too few of a kind ran.
        grid: loads at which the profile counts where no steps ran.
        safepoint_s: what a safepoint takes.
    Raises: ValueError for fewer than two steps or no gap.
    """
    if len(steps) < 2 or not gaps_s:
        raise ValueError(f"needs two or more steps to observe, got {len(steps)}")
    bare = [replace(step, seconds=step.seconds - step.num_safepoints * safepoint_s) for step in steps]
    slowdown = _copy_slowdown(bare, profile.cost)
    bare = [
        replace(step, seconds=step.seconds / (1.0 + slowdown)) if step.beside_copies else step
        for step in bare
        if step.seconds > 0.0
    ]
    refiner = ProfileRefiner(profile, grid, VirtualClock())
    # It keeps the latest of each kind; so these are of all runs, not of the last.
    for step in random.Random(_SEED).sample(bare, len(bare)):
        refiner.observe(step.plan, step.seconds)
    refiner.refine()
    cost = refiner.profile.cost
    return DeviceBehaviour(
        cost,
        profile.copies,
        noise=StepNoise.of_ratios([_ratio(step, cost) for step in bare]),
        host_s=statistics.median(gaps_s),
        safepoint_s=safepoint_s,
        copy_slowdown=slowdown,
    )


def _copy_slowdown(steps: Sequence[ObservedStep], cost: CostModel) -> float:
    """How much longer steps take beside copies, over what is predicted; 0 where too few ran either way."""
    beside, alone = (
        [_ratio(step, cost) for step in steps if step.beside_copies is beside_copies]
        for beside_copies in (True, False)
    )
    if min(len(beside), len(alone)) < _LEAST_BESIDE_COPIES:
        return 0.0
    return max(0.0, statistics.median(beside) / statistics.median(alone) - 1.0)


def _ratio(step: ObservedStep, cost: CostModel) -> float:
    return step.seconds / cost.step_time_s(StepLoad.of_slices(step.plan.slices))


def _num_background_copies(plan: StepPlan) -> int:
    blocking, copies = plan.copies.blocking, plan.copies
    num_checkpoints = 0 if CopyDirections.CHECKPOINT in blocking else len(copies.checkpoint)
    return num_checkpoints + (0 if CopyDirections.RESTORE in blocking else len(copies.restore))
