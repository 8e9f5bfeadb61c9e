"""Stops steps in flight for the requests that arrive meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backfill.core.plan import Resume, Safepoints, StepOutcome, StepPlan, max_in_flight
from backfill.core.request import PriorityLevel, Request, RequestId, ServiceClass
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.engine.messages import StepKind
from backfill.execution.executor import Executor
from backfill.scheduling.arrival import ArrivedPrompt, RunningStep, StopBudget, online_load, should_stop
from backfill.scheduling.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class SubmittedStep:
    """A step in flight.

    Attributes:
        waits_s: seconds, as predicted, for which it waits behind the steps before it.
        is_alone: no step was in flight before it.
        cost: predicted it; None where nothing does.
        stop_asked_at_s: when it was asked to stop, if it was.
    """

    plan: StepPlan
    kind: StepKind
    planned_at_s: float
    submitted_at_s: float
    waits_s: float
    is_alone: bool
    cost: CostModel | None = None
    stop_asked_at_s: float | None = None


class StepStopper:
    """Decides at an arrival, in any thread, which steps in flight to stop."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        info = executor.info
        self._scheduler = scheduler
        self._executor = executor
        # The part of a step that runs beside the one in front of it, if it is submitted before that one ends.
        self._overlap = 1.0 - max(info.stage_layers, default=1) / max(1, sum(info.stage_layers))
        self._online_load = StepLoad()  # of the step after those in flight, without those that arrive
        self._budget = StopBudget()
        self._num_cached: dict[RequestId, int] = {}  # of the latest arrivals (``_look_up``)
        self._deciding = threading.Lock()

    def prepare(self, plan: StepPlan) -> None:
        """The plan is about to be submitted. Not called when a request arrives: that is in another thread."""
        if plan.safepoints is None:
            return
        yielding_owner = self._yielding_owner(plan)
        if yielding_owner is None:
            predictor = self._scheduler.predictor
            assert predictor is not None
            alone = StepLoad.of_slices(each for each in plan.slices if not each.stoppable)
            self._budget.earn(predictor.time_scale * (plan.predicted_s - predictor.cost.step_time_s(alone)))
        requests = self._scheduler.requests
        held = (*requests.running.values(), *requests.restoring.values())
        online = [each for each in held if each.priority_level is PriorityLevel.ONLINE]
        waiting = requests.waiting[PriorityLevel.ONLINE].requests
        if yielding_owner is not None:  # whose requests are not in the next step
            online, waiting = _of_others(online, yielding_owner), _of_others(waiting, yielding_owner)
        slices = self._scheduler.in_flight.slices.values()
        most = self._scheduler.config.max_num_seqs  # no step has more of those that wait
        self._online_load = online_load(online, waiting[:most], slices)

    def maybe_stop(
        self, in_flight: Sequence[SubmittedStep], arrived: Iterable[Request], now_s: float
    ) -> None:
        """Stop those steps for which the requests that arrived meanwhile gain enough (``should_stop``).

        A step is stopped, and charged, once.
        """
        with self._deciding:
            self._stop(in_flight, arrived, now_s)

    def _stop(self, in_flight: Sequence[SubmittedStep], arrived: Iterable[Request], now_s: float) -> None:
        most = max_in_flight(self._executor.info.max_steps_in_flight, (each.plan for each in in_flight))
        is_full = len(in_flight) == most
        may_stop = [
            # What arrived is submitted once there is room: beside all but the oldest step.
            (each, each.plan.safepoints, self._overlap if index or not is_full else 0.0)
            for index, each in enumerate(in_flight)
            if each.plan.safepoints is not None and each.stop_asked_at_s is None
        ]
        if not may_stop:
            return
        predictor = self._scheduler.predictor
        assert predictor is not None
        online = [each for each in arrived if each.service_class is ServiceClass.ONLINE]
        cost, scale = predictor.cost, predictor.time_scale
        cached = self._num_cached = self._look_up(online)
        for submitted, points, overlap in may_stop:
            yielding_owner = self._yielding_owner(submitted.plan)
            prompts = [
                ArrivedPrompt(each.num_tokens, each.next_token_by_s, cached[each.request_id])
                for each in online
                if each.owner != yielding_owner
            ]
            step = self._running_step(submitted, points, overlap, yields=yielding_owner is not None)
            if should_stop(step, prompts, self._online_load, now_s, cost, scale, self._budget):
                if not step.yields:
                    self._budget.spend(step.stop_costs_s(now_s))
                submitted.stop_asked_at_s = now_s
                self._scheduler.in_flight.stop(submitted.plan.step)
                self._executor.request_stop(submitted.plan.step)

    @staticmethod
    def latency_s(submitted: SubmittedStep, outcome: StepOutcome) -> float | None:
        """From the stop request to its safepoint; None where nothing was stopped, or not by a request."""
        asked_at_s, stopped_at_s = submitted.stop_asked_at_s, outcome.stopped_at_s
        if asked_at_s is None or stopped_at_s is None or stopped_at_s < asked_at_s:
            return None
        return stopped_at_s - asked_at_s

    def _look_up(self, arrived: Iterable[Request]) -> dict[RequestId, int]:
        """Tokens that the cache has of each, as of when it came."""
        known, num_cached = self._num_cached, self._scheduler.kv.num_cached_tokens
        return {
            (name := each.request_id): known[name] if name in known else num_cached(each) for each in arrived
        }

    def _yielding_owner(self, plan: StepPlan) -> str | None:
        """Whose online slices of the step may be stopped for other owners' requests; None for nobody's."""
        yielding = self._scheduler.giving.yielding
        owners = (yielding.get(each.request_id) for each in plan.slices if each.stoppable)
        return next((owner for owner in owners if owner is not None), None)

    def _running_step(
        self, submitted: SubmittedStep, points: Safepoints, overlap: float, *, yields: bool
    ) -> RunningStep:
        predictor, plan = self._scheduler.predictor, submitted.plan
        assert predictor is not None
        cost = predictor.cost
        online, offline = (
            cost.step_time_s(StepLoad.of_slices(each for each in plan.slices if each.stoppable is stoppable))
            for stoppable in (False, True)
        )
        num_layers = self._executor.info.num_layers
        if isinstance(plan.work, Resume):  # predicted for the layers that it runs
            share = plan.work.num_layers / num_layers
            online, offline, num_layers = share * online, share * offline, plan.work.num_layers
        scale = predictor.time_scale
        return RunningStep(
            started_at_s=submitted.submitted_at_s + submitted.waits_s,
            predicted_s=scale * plan.predicted_s,
            online_s=scale * online,
            offline_s=scale * offline,
            stop_s=scale * points.layers_apart * plan.predicted_s / num_layers,
            suspends=points.suspends,
            overlap=overlap,
            yields=yields,
        )


def _of_others(requests: Iterable[Request], owner: str) -> list[Request]:
    return [each for each in requests if each.owner != owner]
