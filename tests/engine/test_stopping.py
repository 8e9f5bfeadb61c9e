from __future__ import annotations

from dataclasses import dataclass, field

from backfill.core.config import SchedulerConfig
from backfill.core.plan import Compute, Resume, Safepoints, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.engine.stopping import StepStopper, SubmittedStep
from backfill.execution.executor import ExecutorInfo
from backfill.kvcache.create import create_kv_cache
from backfill.scheduling.policies.baselines import FcfsPolicy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler
from tests.builders import linear_cost, make_info, make_request

NUM_LAYERS = 10


@dataclass
class StoppedExecutor:
    info: ExecutorInfo
    stopped: list[int] = field(default_factory=list)

    def request_stop(self, step: int) -> None:
        self.stopped.append(step)


def stop_after(work: Compute | Resume) -> list[int]:
    """The steps that an online prompt stops which arrives when nothing may be spent on stops yet."""
    config = SchedulerConfig()
    scheduler = Scheduler(
        config,
        create_kv_cache(config, 64, 16, 0),
        FcfsPolicy(),
        predictor=StepPredictor(linear_cost(step_s=0.5)),
        num_layers=NUM_LAYERS,
    )
    executor = StoppedExecutor(make_info(num_layers=NUM_LAYERS))
    stopper = StepStopper(scheduler, executor)  # type: ignore[arg-type]
    step = SubmittedStep(StepPlan(0, work), "offline", 0.0, 0.0, 0.0, is_alone=True)
    stopper.maybe_stop([step], [make_request(prompt_tokens=8)], 0.0)
    return executor.stopped


SAFEPOINTS = Safepoints(1, suspends=True)
OFFLINE = ScheduledSlice(RequestId("job"), 0, 100, (), False, True)
ONLINE = ScheduledSlice(RequestId("chat"), 0, 100, (), False, False)


def test_a_step_of_offline_slices_alone_is_stopped_without_a_budget() -> None:
    assert stop_after(Compute((OFFLINE,), 0.6, SAFEPOINTS)) == [0]


def test_a_stop_that_costs_offline_work_time_needs_a_budget() -> None:
    assert stop_after(Compute((ONLINE, OFFLINE), 0.7, SAFEPOINTS)) == []


def test_a_resumed_step_is_charged_for_the_layers_that_it_runs() -> None:
    """Charged for all layers, a stop of its offline slices alone would seem to cost time."""
    assert stop_after(Resume((OFFLINE,), 4, 0.6 * 4 / NUM_LAYERS, SAFEPOINTS)) == [0]
