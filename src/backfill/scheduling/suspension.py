"""Where steps may be stopped, and the step that was: what of it is kept, and when it goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from backfill.core.config import SchedulerConfig
from backfill.core.plan import Safepoints, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import PriorityLevel, RequestId
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.scheduling.batch import Batch
from backfill.scheduling.policy import Policy

# A suspended step of which not one layer fits beside the online requests is dropped after so many plans:
# smaller offline steps may fit, and none starts before it.
_MAX_REFUSALS = 16


@dataclass(frozen=True, slots=True)
class Resumption:
    """How far the suspended step goes on in the next one."""

    slices: tuple[ScheduledSlice, ...]
    num_layers: int
    predicted_s: float
    safepoints: Safepoints


class Suspension:
    """At most one step whose slices were stopped between two layers and go on in a later one.

    Args:
        num_layers: of the model.
        on_lost: told of a request and of work on it that will be done again, in tokens taken through all
            layers.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        cost: CostModel,
        num_layers: int,
        on_lost: Callable[[RequestId, float], None],
    ) -> None:
        self._config = config
        self._policy = policy
        self._cost = cost
        self._num_layers = num_layers
        self._on_lost = on_lost
        self._slices: dict[RequestId, ScheduledSlice] = {}
        self._layers_done = 0
        self._num_refusals = 0  # plans in a row in which there was time, but not for one layer

    @property
    def requests(self) -> Collection[RequestId]:
        """Those with a slice in the suspended step; none where nothing is suspended."""
        return self._slices.keys()

    def set_cost_model(self, cost: CostModel) -> None:
        """Predict with this model from now on."""
        self._cost = cost

    def left_s(self) -> float:
        """Predicted seconds of the layers that are still before it."""
        if not self._slices:
            return 0.0
        load = StepLoad.of_slices(self._slices.values())
        return self._cost.step_time_s(load) * (1.0 - self._layers_done / self._num_layers)

    def lost_tokens(self, request_id: RequestId) -> float:
        """Work that dropping the request would lose."""
        scheduled = self._slices.get(request_id)
        return 0.0 if scheduled is None else self._work(scheduled, self._layers_done)

    def safepoints(self, batch: Batch, predicted_s: float) -> Safepoints | None:
        """Armed where an arrival may stop a part of the step; one step at a time is suspended."""
        if predicted_s == 0.0 or self._slices:
            return None
        if all(request.priority_level is PriorityLevel.ONLINE for request, _ in batch.members.values()):
            return None
        suspends = self._config.preemption == "suspend"
        return Safepoints(self._layers_apart(predicted_s / self._num_layers), suspends)

    def resume(self, allowed_s: float) -> Resumption | None:
        """The suspended step as the next one, as far as the time goes; None for not now."""
        left, left_s = self._num_layers - self._layers_done, self.left_s()
        layer_s = left_s / left
        num_layers = left if allowed_s >= left_s else int(allowed_s / layer_s)
        if num_layers == 0:
            self._num_refusals += allowed_s > 0
            if self._num_refusals >= _MAX_REFUSALS:
                for request_id in list(self._slices):
                    self.drop(request_id)
            return None
        return Resumption(
            tuple(self._slices.values()),
            num_layers,
            layer_s * num_layers,
            Safepoints(self._layers_apart(layer_s), suspends=True),
        )

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Keep the slices that the step suspended; count those that it discarded."""
        if plan.resumes:
            self._slices = {}
        if not outcome.stopped:
            return
        assert plan.safepoints is not None, "a step without safepoints was stopped"
        slices = {scheduled.request_id: scheduled for scheduled in plan.slices}
        if outcome.suspended:
            self._slices = {each: slices[each] for each in outcome.suspended}
            self._layers_done, self._num_refusals = outcome.layers_done, 0
        for request_id in outcome.discarded:
            self._on_lost(request_id, self._work(slices[request_id], outcome.layers_done))

    def drop(self, request_id: RequestId) -> None:
        """Give up a request's part of the suspended step, if it has one."""
        scheduled = self._slices.pop(request_id, None)
        if scheduled is not None:
            self._on_lost(request_id, self._work(scheduled, self._layers_done))

    def _work(self, scheduled: ScheduledSlice, layers_done: int) -> float:
        return scheduled.num_tokens * layers_done / self._num_layers

    def _layers_apart(self, layer_s: float) -> int:
        return max(1, int(self._config.max_stop_s / (layer_s * self._policy.time_scale)))
