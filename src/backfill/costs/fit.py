"""Fits a cost model to timed steps, by non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.nnls import nnls
from backfill.costs.profile import FitError

_SHORTEST_S = 1e-9
_QUANTILES = np.linspace(0.0, 1.0, 41)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step's load and its measured time."""

    load: StepLoad
    seconds: float


def num_terms(row_knots: Sequence[int], sampled_knots: Sequence[int]) -> int:
    """Coefficients of a model with these knots."""
    return len(row_knots) + len(sampled_knots) + 4


def fit_cost_model(
    steps: Sequence[TimedStep],
    row_knots: Sequence[int],
    sampled_knots: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
) -> CostModel:
    """The model with non-negative terms and the least sum of squared relative errors.

    Args:
        row_knots: token counts, ascending, at which the slope of the row-wise time may change.
        sampled_knots: counts of sampled rows, ascending and above 0, for the time of sampling.
        weights: of the steps' squared errors; None: all equal.
    Raises: ValueError when there are fewer steps than terms.
    """
    if len(steps) < num_terms(row_knots, sampled_knots):
        raise ValueError(f"{len(steps)} steps cannot fit {num_terms(row_knots, sampled_knots)} terms")
    terms = np.array([_terms(step.load, row_knots, sampled_knots) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    # Columns are scaled to similar sizes: contexts are millions, rows are fractions.
    relative = terms / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-30)
    roots = np.sqrt(np.ones(len(steps)) if weights is None else np.array(weights))
    coefficients = nnls(relative / scale * roots[:, None], roots) / scale
    num_rows, num_sampled = len(row_knots), len(sampled_knots)
    rows, sampled, rest = np.split(coefficients, [num_rows, num_rows + num_sampled])
    return CostModel(
        PiecewiseLinear(tuple(map(float, row_knots)), tuple(np.cumsum(rows).tolist())),
        PiecewiseLinear((0.0, *map(float, sampled_knots)), (0.0, *np.cumsum(sampled).tolist())),
        *rest.tolist(),
    )


def fit_few_steps(
    steps: Sequence[TimedStep],
    row_knots: Sequence[int],
    sampled_knots: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
) -> CostModel:
    """``fit_cost_model`` for any number of steps, at least one.

    Fewer steps than terms have many best fits. Any of them will do, so the steps are repeated.
    """
    repeats = -(-num_terms(row_knots, sampled_knots) // len(steps))
    return fit_cost_model(
        [*steps] * repeats,
        row_knots,
        sampled_knots,
        weights=None if weights is None else [*weights] * repeats,
    )


def fit_error(model: CostModel, steps: Sequence[TimedStep]) -> FitError:
    """The error of the model on these steps, at least one."""
    return _error_of([_measured_over_predicted(model, step) for step in steps])


def cross_validated_error(
    steps: Sequence[TimedStep], row_knots: Sequence[int], sampled_knots: Sequence[int], num_folds: int = 5
) -> FitError:
    """The error on steps held out: each of ``num_folds`` parts is predicted by a model of the other parts."""
    ratios: list[float] = []
    for fold in range(num_folds):
        held_out = steps[fold::num_folds]
        others = [step for index, step in enumerate(steps) if index % num_folds != fold] or steps
        if held_out:
            model = fit_few_steps(others, row_knots, sampled_knots)
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


def _rises(value: float, knots: Sequence[float]) -> NDArray[np.float64]:
    """For each interval between knots, the fraction of it below ``value``; the last has no upper end.

    With non-negative weights their sum is a non-decreasing, piecewise linear function of ``value``.
    """
    low, high = np.array(knots[:-1], dtype=float), np.array(knots[1:], dtype=float)
    shares: NDArray[np.float64] = np.maximum((value - low) / (high - low), 0.0)
    shares[:-1] = np.minimum(shares[:-1], 1.0)
    return shares
