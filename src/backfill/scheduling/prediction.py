"""Predicted step times, and how far observed ones are from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backfill.costs.correction import BiasCorrection, ErrorQuantile
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.offloading.interval import StagesBounds, StepBounds
from backfill.scheduling.policy import RequestView

# Share of the deadlines that are to be met; a little more than the 99 % that are promised.
_ATTAINMENT = 0.993
# Assumed of the error of a profile until steps have been observed.
_INITIAL_ERROR = 0.1
# Weight of the latest step in the moving average, as in TCP's of round-trip times.
_AVERAGE_GAIN = 1 / 8
# Disturbed steps are left out while they are a smaller part of the last hundreds: no more than may be late.
# Where they are more, gaps are in time only if the margin allows for them.
_MOST_DISTURBED, _DISTURBED_GAIN = 0.01, 1 / 200
# Part of an objective kept for what the engine does not see: the way of a token from its step to the client's
# socket.
_DELIVERY_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class StreamedCost(CostModel):
    """Of steps that also wait for the weights of offloaded layers."""

    bounds: StepBounds | StagesBounds

    @classmethod
    def of(cls, cost: CostModel, bounds: StepBounds | StagesBounds) -> StreamedCost:
        return cls(*cost.terms, bounds)

    def step_time_s(self, load: StepLoad) -> float:
        seconds = CostModel.step_time_s(self, load)
        return self.bounds.step_s(seconds) if seconds else 0.0


class StepPredictor:
    """A cost model, and what the steps that ran say of its errors.

    The margin is a closed loop. It begins with the quantile of the errors at the share of deadlines that are
    to be met. Few steps take all the time that they may, so more would be met than that; the quantile follows
    the share of gaps that were. Steps that a hypervisor disturbs are left out, unless that is frequent.

    Attributes:
        cost: predicts steps; uncorrected.
        measured: the cost model that was measured; ``cost``, without what transfers of weights add to it.
        average_step_s: moving average of the steps that were observed; 0 before the first.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = self.measured = cost
        self._bounds: StepBounds | StagesBounds | None = None
        self._bias = BiasCorrection()
        self._errors = ErrorQuantile(_ATTAINMENT, 1.0 + _INITIAL_ERROR)
        self._disturbed_share = 0.0  # moving average
        self.average_step_s = 0.0

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

    @property
    def usable_share(self) -> float:
        """The part of a time that the prediction of a step may take for the step to keep to it."""
        return (1.0 - _DELIVERY_SHARE) / self.worst_scale

    def keeps(self, gap_s: float, tpot_s: float) -> bool:
        """Whether a gap between two tokens, as the engine sees it, keeps to an objective at the socket."""
        return gap_s <= (1.0 - _DELIVERY_SHARE) * tpot_s

    def observe_gaps(self, num_kept: int, num_gaps: int, *, is_disturbed: bool = False) -> None:
        """Learn from the gaps of a step's online tokens: how many kept to their objectives."""
        if num_gaps and not self._leaves_out(is_disturbed):
            self._errors.adapt(num_kept / num_gaps, _ATTAINMENT)

    def observe(
        self, predicted_s: float, step_s: float, cycle_s: float | None = None, *, is_disturbed: bool = False
    ) -> None:
        """Learn from a complete step.

        Args:
            step_s: that the executor took.
            cycle_s: from one commit of tokens to the next, which is what a reader waits; default ``step_s``.
        """
        if predicted_s <= 0.0 or step_s <= 0.0:
            return
        self._disturbed_share += _DISTURBED_GAIN * (is_disturbed - self._disturbed_share)
        if self._leaves_out(is_disturbed):
            return
        self._errors.observe((step_s if cycle_s is None else cycle_s) / (predicted_s * self._bias.mean))
        self._bias.observe(predicted_s, step_s)
        gain = _AVERAGE_GAIN if self.average_step_s else 1.0
        self.average_step_s += gain * (step_s - self.average_step_s)

    def _leaves_out(self, is_disturbed: bool) -> bool:
        return is_disturbed and self._disturbed_share < _MOST_DISTURBED

    def set_cost_model(self, cost: CostModel) -> None:
        """Predict with this model from now on. The spread of errors is kept, and their mean starts at 1."""
        self.measured = cost
        self.stream(self._bounds)
        self._bias.restart()

    def stream(self, bounds: StepBounds | StagesBounds | None) -> None:
        """Steps wait for weights like this from now on; None: as in the steps that were measured."""
        self._bounds = bounds
        self.cost = self.measured if bounds is None else StreamedCost.of(self.measured, bounds)


def decode_load(requests: Iterable[RequestView]) -> StepLoad:
    """Of a step that decodes these requests, also those that have yet to begin."""
    load = StepLoad()
    load.put_decodes([each.num_computed_tokens or 1 for each in requests])
    return load
