"""Where steps may be stopped, and the suspended slices: what is kept of them, and when they resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from backfill.core.config import SchedulerConfig
from backfill.core.plan import Resume, Safepoints, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.costs.load import StepLoad
from backfill.scheduling.prediction import StepPredictor

# The slices suspended first are discarded after this many plans that had time for offline work, but not for
# one layer of any suspended slice: computed again, in smaller chunks, they may fit.
_MAX_REFUSALS = 16
# No step is suspended once so many times the tokens of the largest step are: hidden states take memory.
_MAX_SUSPENDED_STEPS = 2
# A suspended slice waits for so many other steps at most, the one of the prompt that stopped it among them.
# Where prompts are short, it resumes before that and nothing is lost.
_MAX_STEPS_MISSED = 3


@dataclass(frozen=True, slots=True)
class _Group:
    """Slices of one step that were stopped before the same layer, in the order of the step."""

    slices: tuple[ScheduledSlice, ...]
    layers_done: int
    steps_missed: int = 0  # that computed other slices

    def without(self, request_ids: Collection[RequestId]) -> _Group:
        slices = tuple(each for each in self.slices if each.request_id not in request_ids)
        return replace(self, slices=slices)


@dataclass(slots=True, eq=False)
class Suspension:
    """The suspended slices: they were stopped between two layers and resume there in later steps.

    Of those of one step as many resume together as fit the time with at least one layer, for as many layers
    as fit. Those that were suspended first are the first to resume.

    A slice that other steps have gone before for some time is computed again by the next one that has time
    for it. Else it would wait for as long as any online prompt is there, while requests that were not stopped
    go on beside these.

    Args:
        predictor: predicts steps; None where none is stopped.
        num_layers: of the model.
        on_discarded: called with a request and its discarded work, which will be computed again: tokens times
            the share of the layers that they had passed.
        stops_online_steps: steps with online requests have safepoints too.
    """

    config: SchedulerConfig
    predictor: StepPredictor | None
    num_layers: int
    on_discarded: Callable[[RequestId, float], None]
    stops_online_steps: bool = True
    _groups: list[_Group] = field(init=False, default_factory=list)  # those suspended first come first
    _resuming: list[_Group] = field(init=False, default_factory=list)  # in steps in flight, the oldest first
    _num_refusals: int = field(init=False, default=0)
    _dropped: list[RequestId] = field(init=False, default_factory=list)

    @property
    def requests(self) -> Collection[RequestId]:
        """Requests with a suspended slice."""
        groups = [*self._groups, *self._resuming]
        return {scheduled.request_id for group in groups for scheduled in group.slices}

    @property
    def waiting(self) -> Collection[RequestId]:
        """Those of them whose slices no other step may compute again: all, while one group resumes."""
        if self._resuming:
            return self.requests
        free = {
            scheduled.request_id
            for group in self._groups
            if group.steps_missed >= _MAX_STEPS_MISSED
            for scheduled in group.slices
        }
        return set(self.requests) - free

    @property
    def _num_tokens(self) -> int:
        return sum(scheduled.num_tokens for group in self._groups for scheduled in group.slices)

    @property
    def may_resume(self) -> bool:
        return bool(self._groups)

    @property
    def layers_resumed(self) -> int:
        """Layers that the slices of the last ``resume`` have passed before."""
        return self._resuming[-1].layers_done

    def lost_tokens(self, request_id: RequestId) -> float:
        """Work that discarding the request's suspended slice would lose; unit as for ``on_discarded``."""
        for group in self._groups:
            for scheduled in group.slices:
                if scheduled.request_id == request_id:
                    return self._work(scheduled, group.layers_done)
        return 0.0

    def safepoints(
        self, slices: Sequence[ScheduledSlice], predicted_s: float, num_suspendable: int = 0
    ) -> Safepoints | None:
        """Safepoints of the step; None if an arrival could stop nothing, or too much is suspended already.

        Args:
            num_suspendable: tokens that steps in flight may suspend.
        """
        if not self.config.safepoints or self.predictor is None or predicted_s == 0.0:
            return None
        most = _MAX_SUSPENDED_STEPS * self.config.max_num_batched_tokens
        if self._num_tokens + num_suspendable >= most:
            return None
        may_stop = [each.stoppable for each in slices]
        if not any(may_stop) or not (all(may_stop) or self.stops_online_steps):
            return None
        return Safepoints(self._layers_apart(predicted_s / self.num_layers), self.config.suspends)

    def resume(self, allowed_s: float, stopped: Collection[RequestId] = ()) -> Resume | None:
        """Suspended slices and as many of their layers as fit the time; None if not one layer of one does.

        Args: stopped: if there are any, only those of one step with any of these requests.
        """
        if allowed_s <= 0.0:
            return None
        first: _Group | None = None
        for index, group in enumerate(self._groups):
            if stopped and not any(each.request_id in stopped for each in group.slices):
                continue
            first = first or group
            resumed = self._fitting(group, allowed_s)
            if resumed is not None:
                if group is first:
                    self._num_refusals = 0
                names = {scheduled.request_id for scheduled in resumed.slices}
                self._groups[index : index + 1] = [each for each in (group.without(names),) if each.slices]
                self._resuming.append(_Group(resumed.slices, group.layers_done))
                return resumed
        self._num_refusals += first is not None
        if first is not None and self._num_refusals >= _MAX_REFUSALS:
            self._num_refusals = 0
            for scheduled in first.slices:
                self.discard(scheduled.request_id)
        return None

    def _fitting(self, group: _Group, allowed_s: float) -> Resume | None:
        """The slices of a group that fit the time with a layer at least."""
        assert self.predictor is not None
        left = self.num_layers - group.layers_done
        slices, load, num_layers, layer_s = [], StepLoad(), 0, 0.0
        for scheduled in group.slices:
            load.put(scheduled.start, scheduled.num_tokens, scheduled.samples)
            with_s = self.predictor.cost.step_time_s(load) / self.num_layers
            fitting = left if allowed_s >= with_s * left else int(allowed_s / with_s)
            if fitting:
                slices.append(scheduled)
                num_layers, layer_s = fitting, with_s
            else:
                load.take(scheduled.start, scheduled.num_tokens, scheduled.samples)
        if not slices:
            return None
        points = Safepoints(self._layers_apart(layer_s), suspends=True)
        return Resume(tuple(slices), num_layers, layer_s * num_layers, points)

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Keep the slices that the step suspended; count those that it discarded."""
        if isinstance(plan.work, Resume):
            del self._resuming[0]
        elif plan.slices:
            self._groups = [replace(each, steps_missed=each.steps_missed + 1) for each in self._groups]
        if not outcome.stopped:
            return
        assert plan.safepoints is not None, "a step without safepoints was stopped"
        slices = {scheduled.request_id: scheduled for scheduled in plan.slices}
        if outcome.suspended:
            suspended = _Group(tuple(slices[each] for each in outcome.suspended), outcome.layers_done)
            self._groups.insert(0 if isinstance(plan.work, Resume) else len(self._groups), suspended)
        for request_id in outcome.discarded:
            self.on_discarded(request_id, self._work(slices[request_id], outcome.layers_done))

    def fail(self, plan: StepPlan) -> None:
        """The plan has failed: its slices are discarded one by one.

        The executor may have suspended them before it failed.
        """
        if plan.safepoints is not None:
            self._dropped += [scheduled.request_id for scheduled in plan.slices]
        if isinstance(plan.work, Resume):
            self._groups.insert(0, self._resuming.pop(0))

    def discard(self, request_id: RequestId) -> None:
        """Discard the request's suspended slice, if it has one."""
        for index, group in enumerate(self._groups):
            for scheduled in group.slices:
                if scheduled.request_id == request_id:
                    rest = group.without({request_id})
                    self._groups[index : index + 1] = [rest] if rest.slices else []
                    self._dropped.append(request_id)
                    self.on_discarded(request_id, self._work(scheduled, group.layers_done))
                    return

    def take_dropped(self) -> tuple[RequestId, ...]:
        """Requests whose slices were discarded since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _work(self, scheduled: ScheduledSlice, layers_done: int) -> float:
        return scheduled.num_tokens * layers_done / self.num_layers

    def _layers_apart(self, layer_s: float) -> int:
        assert self.predictor is not None
        return max(1, int(self.config.max_stop_s / (layer_s * self.predictor.time_scale)))
