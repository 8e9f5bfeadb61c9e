"""Fits a cost model to timed steps, by non-negative least squares on relative errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import FitError

Array = NDArray[np.float64]

_SHORTEST_S = 1e-9
_QUANTILES = np.linspace(0.0, 1.0, 41)
_LEAST_S = 1e-6  # no step takes less
# Knots of a model that another one completes: one for each power of two, as for the strata, so each interval
# has steps.
_ROW_KNOTS = tuple(1 << power for power in range(15))
_SAMPLED_KNOTS = (1, 8, 32, 128)
_CONTEXT_UNIT = 64
# Weight of a stratum without timed steps; one with them weighs 1. All strata share attention's terms.
_UNTIMED_WEIGHT = 0.1

# Bits of a load's tokens, sampled rows and context; the same for loads of similar sizes.
StratumKey: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step's load and its measured time."""

    load: StepLoad
    seconds: float


def fit_cost_model(
    steps: Sequence[TimedStep],
    row_knots: Sequence[int],
    sampled_knots: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
) -> CostModel:
    """The model with non-negative terms and the least sum of squared relative errors on one or more steps.

    Args:
        row_knots: token counts, ascending, at which the slope of the row-wise time may change.
        sampled_knots: counts of sampled rows, ascending and above 0, for the time of sampling.
        weights: of the steps' squared errors; None: all equal.
    """
    terms = np.array([_terms(step.load, row_knots, sampled_knots) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    roots = np.sqrt(np.ones(len(steps)) if weights is None else np.array(weights))
    # Fewer steps than terms have many best fits. Any of them will do, so the steps are repeated.
    repeats = -(-terms.shape[1] // len(steps))
    terms, seconds, roots = np.tile(terms, (repeats, 1)), np.tile(seconds, repeats), np.tile(roots, repeats)
    # Columns are scaled to similar sizes: contexts are millions, rows are fractions.
    relative = terms / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-30)
    coefficients = nnls(relative / scale * roots[:, None], roots) / scale
    num_rows, num_sampled = len(row_knots), len(sampled_knots)
    rows, sampled, rest = np.split(coefficients, [num_rows, num_rows + num_sampled])
    return CostModel(
        PiecewiseLinear(tuple(map(float, row_knots)), tuple(np.cumsum(rows).tolist())),
        PiecewiseLinear((0.0, *map(float, sampled_knots)), (0.0, *np.cumsum(sampled).tolist())),
        *rest.tolist(),
    )


def fit_beside(cost: CostModel, steps: Sequence[TimedStep], grid: Iterable[StepLoad]) -> CostModel:
    """A model of these steps; ``cost`` counts a little at loads of the grid that are unlike all of them."""
    known = {stratum_of(step.load) for step in steps}
    # A coarse profile of few steps may predict nothing at all for the smallest loads: that says nothing.
    others = [load for load in grid if stratum_of(load) not in known and cost.step_time_s(load) > _LEAST_S]
    all_steps = [*steps, *(TimedStep(load, predicted_s(cost, load)) for load in others)]
    keys = [stratum_of(load) for load in others]
    counts = Counter(keys)  # the loads of each stratum have the same total weight
    return fit_cost_model(
        all_steps,
        knots_within(_ROW_KNOTS, max(step.load.num_tokens for step in all_steps)),
        knots_within(_SAMPLED_KNOTS, max(step.load.num_sampled for step in all_steps)),
        weights=[1.0] * len(steps) + [_UNTIMED_WEIGHT / counts[key] for key in keys],
    )


def stratum_of(load: StepLoad) -> StratumKey:
    context = load.prefill_context_tokens + load.decode_context_tokens
    return (
        load.num_tokens.bit_length(),
        load.num_sampled.bit_length(),
        (context // _CONTEXT_UNIT).bit_length(),
    )


def predicted_s(cost: CostModel, load: StepLoad) -> float:
    """Above 0, so that ratios to it exist."""
    return max(cost.step_time_s(load), _LEAST_S)


def knots_within(knots: Sequence[int], largest: int) -> list[int]:
    """The knots up to the largest value timed; that value is added if there are fewer than two."""
    kept = [knot for knot in knots if knot <= largest]
    return kept if len(kept) > 1 else [*kept, max(largest, kept[-1] + 1 if kept else 1)]


def fit_error(model: CostModel, steps: Sequence[TimedStep]) -> FitError:
    """The error of the model on these steps, at least one."""
    return _error_of([_measured_over_predicted(model, step) for step in steps])


def cross_validated_error(
    steps: Sequence[TimedStep], fit: Callable[[Sequence[TimedStep]], CostModel], num_folds: int = 5
) -> FitError:
    """The error on steps held out: each of ``num_folds`` parts is predicted by a model of the other parts."""
    ratios: list[float] = []
    for fold in range(num_folds):
        held_out = steps[fold::num_folds]
        others = [step for index, step in enumerate(steps) if index % num_folds != fold] or steps
        if held_out:
            model = fit(others)
            ratios += [_measured_over_predicted(model, step) for step in held_out]
    return _error_of(ratios)


def _measured_over_predicted(model: CostModel, step: TimedStep) -> float:
    return step.seconds / max(model.step_time_s(step.load), _SHORTEST_S)


def _error_of(ratios: Sequence[float]) -> FitError:
    """Of measured over predicted times."""
    errors = np.abs(1.0 / np.asarray(ratios) - 1.0)
    return FitError(
        float(np.median(errors)),
        float(np.percentile(errors, 95)),
        len(errors),
        tuple(np.quantile(ratios, _QUANTILES).tolist()),
    )


def _terms(load: StepLoad, row_knots: Sequence[int], sampled_knots: Sequence[int]) -> list[float]:
    return [
        1.0,
        *_rises(load.num_tokens, row_knots),
        *_rises(load.num_sampled, (0, *sampled_knots)),
        float(load.num_requests),
        float(load.prefill_pairs),
        float(load.prefill_context_tokens),
        float(load.decode_context_tokens),
    ]


def _rises(value: float, knots: Sequence[float]) -> Array:
    """For each interval between knots, the fraction of it below ``value``; the last has no upper end.

    With non-negative weights their sum is a non-decreasing, piecewise linear function of ``value``.
    """
    low, high = np.array(knots[:-1], dtype=float), np.array(knots[1:], dtype=float)
    shares: Array = np.maximum((value - low) / (high - low), 0.0)
    shares[:-1] = np.minimum(shares[:-1], 1.0)
    return shares


def nnls(a: Array, b: Array) -> Array:
    """The x >= 0 with the least ``|a @ x - b|``.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, chapter 23). In each round the
    variable whose growth lowers the error most becomes free; variables that would turn negative are held at 0
    again. Tens of columns take milliseconds. scipy has the same, at the cost of a slow import.

    Args:
        a: [num_rows, num_columns]; there may be more columns than rows.
        b: [num_rows].
    """
    if a.shape[0] > a.shape[1]:  # the same problem with as many rows as columns
        q, a = np.linalg.qr(a)
        b = q.T @ b
    num_columns = a.shape[1]
    x = np.zeros(num_columns)
    is_free = np.zeros(num_columns, dtype=bool)
    is_refused = np.zeros(num_columns, dtype=bool)  # freed at this x, then held at 0 again
    tolerance = 10 * np.finfo(float).eps * float(np.abs(a).sum(axis=0).max()) * max(a.shape)
    for _ in range(10 * num_columns):
        gain = a.T @ (b - a @ x)
        gain[is_free | is_refused] = -np.inf
        entering = int(np.argmax(gain))
        if gain[entering] <= tolerance:
            break
        is_free[entering] = True
        moved = _descend(a, b, x, is_free)
        if is_free[entering] or not np.array_equal(moved, x):
            is_refused[:] = False
        else:  # it depends linearly on the free ones: its gain was a rounding error
            is_refused[entering] = True
        x = moved
    return x


def _descend(
    a: Array,
    b: Array,
    x: Array,
    is_free: NDArray[np.bool_],
) -> Array:
    """The best point of the free columns from ``x`` on; columns that would turn negative are held at 0."""
    x = x.copy()
    while is_free.any():
        best = np.zeros_like(x)
        best[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
        is_blocked = is_free & (best <= 0)
        if not is_blocked.any():
            return best
        moves = x[is_blocked] - best[is_blocked]
        shares = np.divide(x[is_blocked], moves, out=np.zeros_like(moves), where=moves > 0)
        x += shares.min() * (best - x)
        is_free &= ~(is_blocked & (x <= 1e-12 * max(float(x.max()), 1e-300)))
        x[~is_free] = 0.0
    return x
