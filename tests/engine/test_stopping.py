from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from backfill.core.config import SchedulerConfig
from backfill.core.plan import Compute, Resume, Safepoints, ScheduledSlice, StepPlan
from backfill.core.request import Request, RequestId
from backfill.engine.stopping import StepStopper, SubmittedStep
from backfill.execution.executor import ExecutorInfo
from backfill.kvcache.create import create_kv_cache
from backfill.kvcache.manager import KVCacheManager
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


def stop_after(work: Compute | Resume, owner: str = "") -> list[int]:
    """The steps that an online prompt stops which arrives when nothing may be spent on stops yet.

    An owner "flood" gives way with requests of that name.
    """
    stopper, step, executor = running(work)
    stopper.maybe_stop([step], [make_request(prompt_tokens=8, owner=owner)], 0.0)
    return executor.stopped


def running(work: Compute | Resume) -> tuple[StepStopper, SubmittedStep, StoppedExecutor]:
    config = SchedulerConfig()
    scheduler = Scheduler(
        config,
        create_kv_cache(config, 64, 16, 0),
        FcfsPolicy(),
        predictor=StepPredictor(linear_cost(step_s=0.5)),
        num_layers=NUM_LAYERS,
    )
    executor = StoppedExecutor(make_info(num_layers=NUM_LAYERS))
    scheduler._planner.giving.yielding = {RequestId("flood"): "flood"}
    stopper = StepStopper(scheduler, executor)  # type: ignore[arg-type]
    plan = StepPlan(0, work)
    stopper.prepare(plan)
    return stopper, SubmittedStep(plan, "offline", 0.0, 0.0, 0.0, is_alone=True), executor


SAFEPOINTS = Safepoints(1, suspends=True)
OFFLINE = ScheduledSlice(RequestId("job"), 0, 100, (), False, True)
ONLINE = ScheduledSlice(RequestId("chat"), 0, 100, (), False, False)


@pytest.mark.parametrize(
    ("work", "stopped"),
    [
        pytest.param(Compute((OFFLINE,), 0.6, SAFEPOINTS), [0], id="offline slices alone cost nothing"),
        pytest.param(
            Compute((ONLINE, OFFLINE), 0.7, SAFEPOINTS), [], id="a stop that costs time needs a budget"
        ),
        # Charged for all layers, a stop of its offline slices alone would seem to cost time.
        pytest.param(
            Resume((OFFLINE,), 4, 0.6 * 4 / NUM_LAYERS, SAFEPOINTS), [0], id="resumed: charged for its layers"
        ),
    ],
)
def test_which_steps_stop_before_anything_may_be_spent_on_stops(
    work: Compute | Resume, stopped: list[int]
) -> None:
    assert stop_after(work) == stopped


FLOOD = ScheduledSlice(RequestId("flood"), 0, 100, (), False, True)


@pytest.mark.parametrize(("owner", "stopped"), [("chat", [0]), ("flood", [])])
@pytest.mark.parametrize("slices", [(FLOOD,), (ONLINE, FLOOD), (OFFLINE, FLOOD)])
def test_a_step_of_an_owner_that_gives_way_stops_for_others_whatever_that_costs(
    slices: tuple[ScheduledSlice, ...], owner: str, stopped: list[int]
) -> None:
    assert stop_after(Compute(slices, 0.7, SAFEPOINTS), owner) == stopped


def test_an_arrival_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[RequestId] = []

    def num_cached_tokens(_: KVCacheManager, request: Request) -> int:
        looked_up.append(request.request_id)
        return 0

    monkeypatch.setattr(KVCacheManager, "num_cached_tokens", num_cached_tokens)
    stopper, step, _ = running(Compute((ONLINE, OFFLINE), 0.7, SAFEPOINTS))
    arrived = [make_request(8, request_id=name) for name in "abc"]
    for count in (1, 2, 2, 3):
        stopper.maybe_stop([step], arrived[:count], 0.0)
    assert looked_up == ["a", "b", "c"]


def test_two_arrivals_at_once_stop_a_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stopper, step, executor = running(Compute((OFFLINE,), 0.6, SAFEPOINTS))
    both = threading.Barrier(2)

    def slow(*args: object) -> bool:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # the other arrival, if it decides too
        return True

    monkeypatch.setattr("backfill.engine.stopping.should_stop", slow)
    threads = [threading.Thread(target=stopper.maybe_stop, args=([step], [], 0.0)) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert executor.stopped == [0]
