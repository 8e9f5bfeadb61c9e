"""Refines a cost profile with the steps that are served."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from backfill.core.clock import Clock
from backfill.core.plan import StepPlan
from backfill.costs.fit import StratumKey, TimedStep, fit_beside, fit_error, predicted_s, stratum_of
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CostProfile, FitError

_MAX_STRATA = 128
_SAMPLES_PER_STRATUM = 9
_HOLD_OUT_EVERY = 3
# The median of fewer samples depends too much on chance.
_LEAST_SAMPLES = 3

_LEAST_NEW_STEPS = 32
_LEAST_HELD_OUT = 8
_LEAST_INTERVAL_S = 30.0
# Beside online requests: until the first fit, which the next ones double. A fit takes 7 to 20 ms of one gap.
_FIRST_INTERVAL_S, _MOST_INTERVAL_S = 15.0, 60.0
# Least relative gain, of the error's median plus P95, for a new model. A smaller gain may be noise.
_LEAST_GAIN = 0.05
# Least change of the error's median or P95, and least relative change of the known tokens, for a new profile.
_LEAST_MOVE, _LEAST_GROWTH = 0.02, 0.1
_LOWEST_SCALE, _HIGHEST_SCALE = 0.5, 2.0
# A step of more rows than were served takes at most so many times as long for each of them: products do not
# become less efficient, but for a part of a tile.
_MOST_PER_ROW = 1.25
# Disturbed steps of a stratum that are left out in a row.
_MOST_LEFT_OUT = 4
# A saved profile is too slow if it predicts more than so many times what steps take at a start.
_MOST_TOO_SLOW = 1.3


@dataclass(frozen=True, slots=True)
class ServedStep:
    """A step that was served from its first layer to its last.

    Attributes:
        prompt_end: the farthest prompt position it computed; 0 without a prompt.
        chunk_tokens: most tokens of one prompt in it; 0 without a prompt.
    """

    timed: TimedStep
    prompt_end: int = 0
    chunk_tokens: int = 0


@dataclass(slots=True)
class Stratum:
    """The latest steps of similar loads. Every third is held out: no model is fitted to it.

    Attributes: num_left_out: disturbed ones since the last one that was taken.
    """

    fitted: deque[ServedStep] = field(default_factory=lambda: deque(maxlen=_SAMPLES_PER_STRATUM))
    held_out: deque[ServedStep] = field(default_factory=lambda: deque(maxlen=_SAMPLES_PER_STRATUM))
    num_steps: int = 0
    num_left_out: int = 0

    def add(self, step: ServedStep) -> None:
        self.num_steps += 1
        (self.held_out if self.num_steps % _HOLD_OUT_EVERY == 0 else self.fitted).append(step)


class StepSample:
    """A bounded sample of served steps, spread over the loads that occur.

    Loads of a stratum have the same tokens, sampled rows and context, up to a factor of two. A new stratum
    replaces the least recently used one. Disturbed steps are left out, but for one in five of a stratum where
    all are: then that is how fast the device is. Long steps are disturbed more often than short ones.
    """

    def __init__(self) -> None:
        self._strata: OrderedDict[StratumKey, Stratum] = OrderedDict()

    def add(self, step: ServedStep, *, is_disturbed: bool = False) -> bool:
        """Returns: whether it was taken."""
        key = stratum_of(step.timed.load)
        stratum = self._strata.get(key)
        if stratum is None:
            if len(self._strata) == _MAX_STRATA:
                self._strata.popitem(last=False)
            stratum = self._strata[key] = Stratum()
        self._strata.move_to_end(key)
        if is_disturbed and stratum.num_left_out < _MOST_LEFT_OUT:
            stratum.num_left_out += 1
            return False
        stratum.num_left_out = 0
        stratum.add(step)
        return True

    def held_out(self) -> list[TimedStep]:
        return [step.timed for stratum in self._strata.values() for step in stratum.held_out]

    def typical(self, cost: CostModel) -> dict[StratumKey, ServedStep]:
        """By stratum with enough steps, the step with the median ratio of measured to predicted time."""

        def ratio(step: ServedStep) -> float:
            return step.timed.seconds / predicted_s(cost, step.timed.load)

        return {
            key: sorted(stratum.fitted, key=ratio)[len(stratum.fitted) // 2]
            for key, stratum in self._strata.items()
            if len(stratum.fitted) >= _LEAST_SAMPLES
        }


class ProfileRefiner:
    """Collects served steps and from time to time fits the profile's cost model to them.

    Strata without served steps keep the current model's predictions, at the loads of the grid. They are
    scaled by the served steps' ratio of measured to predicted time: a slower machine is slower for all loads.

    Args:
        grid: loads at which the current model counts where no steps were served.
        on_refined: called with each new profile.
    """

    def __init__(
        self,
        profile: CostProfile,
        grid: Iterable[StepLoad],
        clock: Clock,
        on_refined: Callable[[CostProfile], None] = lambda _: None,
    ) -> None:
        self.profile = profile
        self._grid = list(grid)
        self._clock = clock
        self._on_refined = on_refined
        self._sample = StepSample()
        self._num_new = 0
        self._began_at_s = clock.now_s()
        self._fitted_at_s = -math.inf
        self._num_fits = 0

    @property
    def is_due(self) -> bool:
        """Enough steps were served since the last fit, and enough time has passed."""
        return (
            self._num_new >= _LEAST_NEW_STEPS and self._clock.now_s() - self._fitted_at_s >= _LEAST_INTERVAL_S
        )

    @property
    def is_overdue(self) -> bool:
        """A fit is due and so late that requests may wait for it, some milliseconds."""
        last_s = max(self._fitted_at_s, self._began_at_s)
        interval_s = min(_MOST_INTERVAL_S, _FIRST_INTERVAL_S * 2.0**self._num_fits)
        return self.is_due and self._clock.now_s() - last_s >= interval_s

    def observe(self, plan: StepPlan, seconds: float, *, is_disturbed: bool = False) -> None:
        """Take a step into the sample that ran from its first layer to its last in ``seconds``."""
        if seconds <= 0:
            return
        chunks = [scheduled for scheduled in plan.slices if scheduled.num_tokens > 1]
        served = ServedStep(
            TimedStep(StepLoad.of_slices(plan.slices), seconds),
            prompt_end=max((chunk.start + chunk.num_tokens for chunk in chunks), default=0),
            chunk_tokens=max((chunk.num_tokens for chunk in chunks), default=0),
        )
        self._num_new += self._sample.add(served, is_disturbed=is_disturbed)

    def refine(self) -> CostProfile | None:
        """Fit again. Returns the new profile, or None if it did not change.

        The new model replaces the current one if it predicts held-out steps better. Otherwise the profile
        keeps its model, with the error on these steps.
        """
        self._num_new = 0
        held_out = self._sample.held_out()
        typical = self._sample.typical(self.profile.cost)
        if len(held_out) < _LEAST_HELD_OUT or not typical:
            return None
        self._fitted_at_s = self._clock.now_s()
        self._num_fits = min(self._num_fits + 1, 8)
        cost = _bounded(self.profile.cost, [step.timed for step in typical.values()])
        error = fit_error(cost, held_out)
        fitted = self._fit(cost, typical)
        fitted_error = fit_error(fitted, held_out)
        is_better = _total_error(fitted_error) < (1 - _LEAST_GAIN) * _total_error(error)
        if is_better:
            cost, error = fitted, fitted_error
        refined = replace(
            self.profile,
            quality="refined",
            cost=cost,
            error=error,
            known_tokens=max(step.prompt_end for step in typical.values()),
            known_chunk_tokens=max(step.chunk_tokens for step in typical.values()),
            provenance=f"refined by served steps of {len(typical)} kinds; {len(held_out)} others held out.",
        )
        if cost == self.profile.cost and _is_unchanged(refined, self.profile):
            return None
        self.profile = refined
        self._on_refined(refined)
        return refined

    def _fit(self, cost: CostModel, typical: dict[StratumKey, ServedStep]) -> CostModel:
        served = [step.timed for step in typical.values()]
        ratio = statistics.median(step.seconds / predicted_s(cost, step.load) for step in served)
        scale = min(max(ratio, _LOWEST_SCALE), _HIGHEST_SCALE)
        return fit_beside(cost.slowed(scale), served, self._grid)


def num_as_predicted(profile: CostProfile, timed: Sequence[TimedStep]) -> int:
    """How many of these steps took about what the profile says, or more."""
    return sum(step.seconds * _MOST_TOO_SLOW >= predicted_s(profile.cost, step.load) for step in timed)


def corrected(profile: CostProfile, timed: Sequence[TimedStep], grid: Iterable[StepLoad]) -> CostProfile:
    """The profile, fitted to steps timed at a start if most of them took much less than it says.

    Served steps may have run beside other programs, on a machine that is quiet now. What they taught would be
    unlearned slowly: objectives are widened by it, and steps that look too long are never planned. Steps that
    take longer show less: they may be the first of their kind, or run beside others themselves.

    Args:
        timed: of several sizes; none where none fits.
        grid: loads at which the profile's model, scaled, counts where no steps were timed.
    """
    if not timed or 2 * num_as_predicted(profile, timed) > len(timed):
        return profile
    ratio = statistics.median(step.seconds / predicted_s(profile.cost, step.load) for step in timed)
    cost = _bounded(fit_beside(profile.cost.slowed(ratio), timed, grid), timed)
    return replace(
        profile,
        quality="coarse",
        cost=cost,
        error=fit_error(cost, timed),
        provenance=f"{profile.provenance} {len(timed)} steps timed at a start took {ratio:.2f} of that.",
    )


def _bounded(cost: CostModel, steps: Collection[TimedStep]) -> CostModel:
    """The model with times beyond these steps that these make credible.

    Steps that look too long are never planned, so no step would ever correct a time that a busy machine left
    there.
    """
    tokens = max(step.load.num_tokens for step in steps)
    sampled = max(step.load.num_sampled for step in steps)
    return replace(
        cost,
        rows_s=_bounded_beyond(cost.rows_s, tokens),
        sampled_s=_bounded_beyond(cost.sampled_s, sampled),
    )


def _bounded_beyond(seconds: PiecewiseLinear, known: int) -> PiecewiseLinear:
    if known == 0:
        return seconds
    most_s = _MOST_PER_ROW * seconds(known) / known
    return PiecewiseLinear(
        seconds.x,
        tuple(min(y, most_s * x) if x > known else y for x, y in zip(seconds.x, seconds.y, strict=True)),
    )


def _total_error(error: FitError) -> float:
    return error.median + error.p95


def _is_unchanged(new: CostProfile, old: CostProfile) -> bool:
    """Whether two profiles with the same model differ too little for a report."""
    moved = max(abs(new.error.median - old.error.median), abs(new.error.p95 - old.error.p95))
    known = (new.known_tokens, old.known_tokens), (new.known_chunk_tokens, old.known_chunk_tokens)
    return (
        new.quality == old.quality
        and moved <= _LEAST_MOVE
        and all(abs(now - before) <= _LEAST_GROWTH * before for now, before in known)
    )
