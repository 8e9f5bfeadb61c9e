"""Where steps may be stopped, and the suspended step: what is kept of it, and when it resumes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from backfill.core.config import SchedulerConfig
from backfill.core.plan import Resume, Safepoints, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import PriorityLevel, RequestId
from backfill.costs.load import StepLoad
from backfill.scheduling.batch import Batch
from backfill.scheduling.prediction import StepPredictor

# After this many plans in which not one layer of the suspended step fitted beside the online requests, it is
# discarded: smaller offline steps may fit, and none starts before it.
_MAX_REFUSALS = 16


@dataclass(slots=True, eq=False)
class Suspension:
    """At most one suspended step: slices that were stopped between two layers and resume in a later step.

    Args:
        predictor: predicts steps; without one no step is stopped.
        num_layers: of the model.
        can_stop: the executor can stop a step.
        on_discarded: called with a request and its discarded work, which will be computed again: tokens times
            the share of the layers that they had passed.
        stage_layers: layers of each stage of a pipeline, whose steps stop between two stages; else empty.

    Attributes:
        is_resuming: the suspended slices are in a step in flight.
    """

    config: SchedulerConfig
    predictor: StepPredictor | None
    num_layers: int
    can_stop: bool
    on_discarded: Callable[[RequestId, float], None]
    stage_layers: Sequence[int] = ()
    is_resuming: bool = field(init=False, default=False)
    _slices: dict[RequestId, ScheduledSlice] = field(init=False, default_factory=dict)
    _layers_done: int = field(init=False, default=0)
    _num_refusals: int = field(init=False, default=0)  # plans in a row that had time, but not for one layer

    @property
    def requests(self) -> Collection[RequestId]:
        """Requests with a suspended slice."""
        return self._slices.keys()

    @property
    def may_resume(self) -> bool:
        return bool(self._slices) and not self.is_resuming

    def left_s(self) -> float:
        """Predicted seconds of the layers that suspended slices still have to run; 0 while they resume."""
        if not self.may_resume:
            return 0.0
        assert self.predictor is not None
        load = StepLoad.of_slices(self._slices.values())
        return self.predictor.cost.step_time_s(load) * (1.0 - self._layers_done / self.num_layers)

    def lost_tokens(self, request_id: RequestId) -> float:
        """Work that discarding the request's suspended slice would lose; unit as for ``on_discarded``."""
        scheduled = self._slices.get(request_id)
        return 0.0 if scheduled is None else self._work(scheduled, self._layers_done)

    def safepoints(self, batch: Batch, predicted_s: float, may_suspend: bool = False) -> Safepoints | None:
        """Safepoints of the step; None if an arrival could stop nothing, or a step is suspended already.

        Args:
            may_suspend: a step in flight may be suspended; then this one has none.
        """
        can_stop = self.can_stop and self.config.safepoints and self.predictor is not None
        if not can_stop or predicted_s == 0.0 or self._slices or may_suspend:
            return None
        if all(request.priority_level is PriorityLevel.ONLINE for request, _ in batch.members.values()):
            return None
        suspends = self.config.preemption == "suspend"
        return Safepoints(self._layers_apart(predicted_s / self.num_layers), suspends)

    def resume(self, allowed_s: float) -> Resume | None:
        """As many layers of the suspended step as fit the time; None if not one does."""
        left, left_s = self.num_layers - self._layers_done, self.left_s()
        layer_s = left_s / left
        num_layers = left if allowed_s >= left_s else self._whole_stages(int(allowed_s / layer_s))
        if num_layers == 0:
            self._num_refusals += allowed_s > 0
            if self._num_refusals >= _MAX_REFUSALS:
                for request_id in list(self._slices):
                    self.discard(request_id)
            return None
        self.is_resuming = True
        return Resume(
            tuple(self._slices.values()),
            num_layers,
            layer_s * num_layers,
            Safepoints(self._layers_apart(layer_s), suspends=True),
        )

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Keep the slices that the step suspended; count those that it discarded."""
        if isinstance(plan.work, Resume):
            self._slices, self.is_resuming = {}, False
        if not outcome.stopped:
            return
        assert plan.safepoints is not None, "a step without safepoints was stopped"
        slices = {scheduled.request_id: scheduled for scheduled in plan.slices}
        if outcome.suspended:
            assert not self._slices, "a second step is suspended"
            self._slices = {each: slices[each] for each in outcome.suspended}
            self._layers_done, self._num_refusals = outcome.layers_done, 0
        for request_id in outcome.discarded:
            self.on_discarded(request_id, self._work(slices[request_id], outcome.layers_done))

    def fail(self, plan: StepPlan) -> None:
        """The plan has failed: its slices are discarded one by one."""
        if isinstance(plan.work, Resume):
            self.is_resuming = False

    def discard(self, request_id: RequestId) -> None:
        """Discard the request's suspended slice, if it has one."""
        scheduled = self._slices.pop(request_id, None)
        if scheduled is not None:
            self.on_discarded(request_id, self._work(scheduled, self._layers_done))

    def _work(self, scheduled: ScheduledSlice, layers_done: int) -> float:
        return scheduled.num_tokens * layers_done / self.num_layers

    def _whole_stages(self, num_layers: int) -> int:
        """Of the next so many layers, those up to the last place where a step can stop."""
        if not self.stage_layers:
            return num_layers
        ends = (end - self._layers_done for end in accumulate(self.stage_layers))
        return max((end for end in ends if 0 < end <= num_layers), default=0)

    def _layers_apart(self, layer_s: float) -> int:
        if self.stage_layers:
            return max(self.stage_layers)
        assert self.predictor is not None
        return max(1, int(self.config.max_stop_s / (layer_s * self.predictor.time_scale)))
