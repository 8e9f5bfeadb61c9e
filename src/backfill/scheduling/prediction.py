"""Predicted step times, and how far observed ones are from them."""

from __future__ import annotations

from backfill.costs.correction import BiasCorrection, ErrorQuantile
from backfill.costs.model import CostModel

# Assumed of the error of a profile until steps have been observed.
_INITIAL_ERROR = 0.1


class StepPredictor:
    """A cost model, and what the steps that ran say of its errors.

    Attributes:
        cost: predicts steps; uncorrected.

    Args:
        attainment: share of the deadlines that are to be met.
    """

    def __init__(self, cost: CostModel, attainment: float = 0.99) -> None:
        self.cost = cost
        self._bias = BiasCorrection()
        self._errors = ErrorQuantile(attainment, 1.0 + _INITIAL_ERROR)

    @property
    def time_scale(self) -> float:
        """Observed over predicted step time, averaged over recent steps."""
        return self._bias.mean

    @property
    def worst_scale(self) -> float:
        """Over predicted step time, what a deadline must allow for to be met as often as is wanted.

        It follows the errors observed: a good profile on a quiet machine leaves nearly the whole objective
        to the step, and a noisy one less.
        """
        return self._bias.mean * self._errors.ratio

    def observe(self, predicted_s: float, step_s: float, cycle_s: float | None = None) -> None:
        """Learn from a complete step.

        Args:
            step_s: that the executor took.
            cycle_s: from one commit of tokens to the next, which is what a reader waits; default ``step_s``.
        """
        if predicted_s <= 0.0 or step_s <= 0.0:
            return
        self._errors.observe((step_s if cycle_s is None else cycle_s) / (predicted_s * self._bias.mean))
        self._bias.observe(predicted_s, step_s)

    def set_cost_model(self, cost: CostModel) -> None:
        """Predict with this model from now on. The spread of errors is kept, and their mean starts at 1."""
        self.cost = cost
        self._bias.restart()
