"""Finds out what a real device does, so that it can be simulated."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import clone  # noqa: F401
import numpy as np

from backfill.core.clock import Clock, VirtualClock
from backfill.core.plan import Compute, CopyDirections, StepOutcome, StepPlan
from backfill.costs.behaviour import StepNoise
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CopySpeed, CostProfile
from backfill.costs.refine import ProfileRefiner
from backfill.execution.executor import Executor
from experiments.layered_device import LayeredDevice

# A slow-down beside copies counts from so many standard errors, up to so much of a step's time.
_LEAST_STANDARD_ERRORS = 2.0
_MOST_EXCESS = 0.75
_LEAST_STEPS = 20
_OUTLIERS = 0.05
_LONGEST = 0.99
_NUM_QUANTILES = 101
_SEED = 0


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A step that ran from its first layer to its last without waiting for copies.

    Attributes:
        copying_s: how long blocks were copied while it ran, as predicted.
    """

    plan: StepPlan
    seconds: float
    num_safepoints: int
    copying_s: float


class ObservedExecutor(Executor):
    """Passes plans on to an executor and notes what they took.

    Attributes:
        steps: in order; those that were stopped, resumed or waited are left out.
        gaps_s: from the end of each plan to the begin of the next.

    Args:
        copies: predicts how long blocks are copied; None if none are.
    """

    def __init__(self, executor: Executor, clock: Clock, copies: CopySpeed | None) -> None:
        self.info = executor.info
        self.steps: list[ObservedStep] = []
        self.gaps_s: list[float] = []
        self._executor = executor
        self._clock = clock
        self._copies = copies
        self._num_copying = 0
        self._copying_until_s = 0.0
        self._ended_at_s: float | None = None

    def request_stop(self, step: int) -> None:
        self._executor.request_stop(step)

    def run(self, plan: StepPlan) -> StepOutcome:
        began_s = self._clock.now_s()
        if self._ended_at_s is not None:
            self.gaps_s.append(began_s - self._ended_at_s)
        self._begin_copies(plan, began_s)
        outcome = self._executor.run(plan)
        ended_at_s = self._ended_at_s = self._clock.now_s()
        copying_s = max(0.0, min(self._copying_until_s, ended_at_s) - began_s)
        self._num_copying -= len(outcome.completed_copies) + len(outcome.completed_slot_copies)
        if not self._num_copying:
            self._copying_until_s = 0.0
        if isinstance(plan.work, Compute) and plan.slices and not outcome.stopped and not plan.copies.stalls:
            points = plan.safepoints
            num_safepoints = 0 if points is None else (self.info.num_layers - 1) // points.layers_apart
            self.steps.append(ObservedStep(plan, ended_at_s - began_s, num_safepoints, copying_s))
        return outcome

    def _begin_copies(self, plan: StepPlan, now_s: float) -> None:
        """Predict when the copies end that run beside this step and later ones."""
        copies, size = plan.copies, self.info.block_size
        num_out = num_in = 0.0  # in blocks
        if CopyDirections.CHECKPOINT not in copies.blocking:
            num_out = len(copies.checkpoint) + sum(copy.num for copy in copies.slot_checkpoint) / size
            self._num_copying += len(copies.checkpoint) + len(copies.slot_checkpoint)
        if CopyDirections.RESTORE not in copies.blocking:
            num_in = len(copies.restore) + sum(copy.num for copy in copies.slot_restore) / size
            self._num_copying += len(copies.restore) + len(copies.slot_restore)
        if self._copies is not None and num_out + num_in:
            seconds = self.info.block_bytes * (
                num_out / self._copies.to_host_bytes_per_s + num_in / self._copies.to_device_bytes_per_s
            )
            self._copying_until_s = max(self._copying_until_s, now_s) + seconds


def observed_behaviour(
    steps: Sequence[ObservedStep],
    gaps_s: Sequence[float],
    profile: CostProfile,
    grid: Iterable[StepLoad],
    *,
    safepoint_s: float,
) -> LayeredDevice:
    """The behaviour of the device on which these steps ran.

    Its typical step times are fitted to the steps as ``ProfileRefiner`` does. The noise is of the steps over
    these. Copies are as fast as in the profile. The host takes the mean gap between two steps.

    Args:
        profile: predicted the steps; kept where too few of a kind ran.
        grid: loads at which the profile counts where no steps ran.
        safepoint_s: what a safepoint takes.
    Raises: ValueError for fewer than two steps or no gap.
    """
    if len(steps) < 2 or not gaps_s:
        raise ValueError(f"needs two or more steps to observe, got {len(steps)}")
    bare = [replace(step, seconds=step.seconds - step.num_safepoints * safepoint_s) for step in steps]
    # A machine that is several times slower than when it was profiled is beyond what the refiner corrects.
    typical = _scaled(profile.cost, statistics.median(_ratio(step, profile.cost) for step in bare))
    excess = _excess_beside_copies(bare, typical)
    bare = [replace(step, seconds=step.seconds - excess * step.copying_s) for step in bare]
    bare = [step for step in bare if step.seconds > 0.0]
    refiner = ProfileRefiner(replace(profile, cost=typical), grid, VirtualClock())
    # It keeps the latest of each kind; so these are of all runs, not of the last.
    for step in random.Random(_SEED).sample(bare, len(bare)):
        refiner.observe(step.plan, step.seconds)
    refiner.refine()
    cost = refiner.profile.cost
    return LayeredDevice(
        cost,
        profile.copies,
        noise=noise_of_ratios([_ratio(step, cost) for step in bare]),
        host_s=_host_s(gaps_s),
        safepoint_s=safepoint_s,
        copy_slowdown=excess / (1.0 - excess),
    )


def noise_of_ratios(ratios: Sequence[float]) -> StepNoise:
    """The noise of consecutive steps, in order, two or more: observed over typical time."""
    at = np.linspace(0.0, 1.0, _NUM_QUANTILES)
    quantiles = np.quantile(np.asarray(ratios), at)
    return StepNoise(tuple(at.tolist()), tuple(quantiles.tolist()), _autocorrelation(ratios))


def _autocorrelation(ratios: Sequence[float]) -> float:
    """Lag-1 autocorrelation of the normal scores of the ratios' ranks, at least 0 and below 1."""
    values = np.asarray(ratios)
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = (np.arange(len(values)) + 0.5) / len(values)
    scores = np.array([statistics.NormalDist().inv_cdf(rank) for rank in ranks])
    variance = float(np.mean(scores * scores))
    found = float(np.mean(scores[:-1] * scores[1:])) / variance if variance > 0 else 0.0
    return min(max(found, 0.0), 1.0 - 1e-6)


def _host_s(gaps_s: Sequence[float]) -> float:
    """The mean gap. The longest hundredth may be waits for arrivals; these count as the P99."""
    return float(np.minimum(gaps_s, np.quantile(gaps_s, _LONGEST)).mean())


def _excess_beside_copies(steps: Sequence[ObservedStep], cost: CostModel) -> float:
    """The share of the time beside copies that is due to them; 0 where the steps do not show it.

    It is the slope of a line through the steps' times by their times beside copies, both over the predicted
    time. The slowest and the fastest steps are left out: other processes disturbed them.
    """
    if len(steps) < _LEAST_STEPS:
        return 0.0
    predicted_s = np.array([cost.step_time_s(StepLoad.of_slices(step.plan.slices)) for step in steps])
    x = np.array([step.copying_s for step in steps]) / predicted_s
    y = np.array([step.seconds for step in steps]) / predicted_s
    is_usual = (y >= np.quantile(y, _OUTLIERS)) & (y <= np.quantile(y, 1.0 - _OUTLIERS))
    x, y = x[is_usual] - x[is_usual].mean(), y[is_usual] - y[is_usual].mean()
    square = float(x @ x)
    if square == 0.0:
        return 0.0
    slope = float(x @ y) / square
    rest = y - slope * x
    standard_error = math.sqrt(float(rest @ rest) / (len(x) - 2) / square)
    return min(slope, _MOST_EXCESS) if slope > _LEAST_STANDARD_ERRORS * standard_error else 0.0


def _ratio(step: ObservedStep, cost: CostModel) -> float:
    return step.seconds / cost.step_time_s(StepLoad.of_slices(step.plan.slices))


def _scaled(cost: CostModel, factor: float) -> CostModel:
    """All terms times ``factor``."""

    def curve(of: PiecewiseLinear) -> PiecewiseLinear:
        return replace(of, y=tuple(factor * y for y in of.y))

    return CostModel(
        curve(cost.rows_s),
        curve(cost.sampled_s),
        request_s=factor * cost.request_s,
        prefill_pair_s=factor * cost.prefill_pair_s,
        prefill_context_s=factor * cost.prefill_context_s,
        decode_context_s=factor * cost.decode_context_s,
    )
