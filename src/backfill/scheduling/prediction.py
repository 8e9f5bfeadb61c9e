"""Predicted step times, and how far observed ones are from them."""

from __future__ import annotations

from backfill.costs.correction import BiasCorrection
from backfill.costs.model import CostModel


class StepPredictor:
    """A cost model, and the ratio of observed to predicted times of the steps that ran.

    Attributes:
        cost: predicts steps; uncorrected.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.correction = BiasCorrection()

    @property
    def time_scale(self) -> float:
        """Observed over predicted step time, averaged over recent steps."""
        return self.correction.mean

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Learn from a complete step."""
        self.correction.observe(predicted_s, observed_s)

    def set_cost_model(self, cost: CostModel) -> None:
        """Predict with this model from now on, and forget the errors of the previous one."""
        self.cost = cost
        self.correction.restart()
