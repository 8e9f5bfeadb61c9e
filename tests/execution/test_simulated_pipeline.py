"""Stages on the virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.plan import (
    AdmittedRequest,
    Compute,
    Resume,
    Safepoints,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.model import CostModel
from backfill.execution.simulated_executor import SimulatedExecutor, hashed_token
from backfill.execution.simulated_pipeline import SimulatedPipeline
from tests.builders import flat_cost, linear_cost, make_info

STEP_S = 4.0
SUSPENDS = Safepoints(2, suspends=True)


def make_pipeline(
    *stage_layers: int, cost: CostModel | None = None
) -> tuple[SimulatedPipeline, VirtualClock]:
    """Every step takes 4 s in all stages together, or what ``cost`` says."""
    clock = VirtualClock()
    info = replace(
        make_info(num_layers=sum(stage_layers)),
        stage_layers=stage_layers,
        max_steps_in_flight=len(stage_layers),
    )
    return SimulatedPipeline(info, DeviceBehaviour(cost or flat_cost(STEP_S)), clock), clock


def plan_of(step: int, *, stoppable: bool = False, safepoints: Safepoints | None = None) -> StepPlan:
    """One prompt of a request of its own."""
    name = RequestId(f"r{step}")
    admitted = AdmittedRequest(name, (5, 6, 7), SamplingParams(max_tokens=4))
    scheduled = ScheduledSlice(name, 0, 3, (), samples=True, stoppable=stoppable)
    return StepPlan(step, Compute((scheduled,), STEP_S, safepoints), admitted=(admitted,))


def test_steps_follow_each_other_by_the_slowest_stage() -> None:
    pipeline, clock = make_pipeline(3, 1)
    ends = []
    pipeline.submit(plan_of(0))
    for step in range(1, 5):
        pipeline.submit(plan_of(step))
        pipeline.collect()
        ends.append(clock.now_s())
    assert ends == [4.0, 7.0, 10.0, 13.0]


def test_a_step_alone_takes_all_stages() -> None:
    pipeline, clock = make_pipeline(2, 2)
    for step in range(2):
        outcome = pipeline.run(plan_of(step))
        token = hashed_token(RequestId(f"r{step}"), 3, pipeline.info)
        assert [sampled.token_id for sampled in outcome.sampled] == [token]
    assert clock.now_s() == 2 * STEP_S


def test_a_stopped_step_is_suspended_within_its_stage_and_resumes_there() -> None:
    """Half a second a layer."""
    pipeline, clock = make_pipeline(2, 4, 2)
    plan = plan_of(0, stoppable=True, safepoints=SUSPENDS)
    pipeline.submit(plan)
    pipeline.submit(plan_of(1))
    clock.advance(1.75)  # in the second stage
    pipeline.request_stop(0)
    outcome = pipeline.collect()
    assert (outcome.suspended, outcome.layers_done, outcome.stopped_at_s) == (("r0",), 4, 2.0)
    assert clock.now_s() == 2.0
    pipeline.collect()
    assert clock.now_s() == 5.0, "the step behind it enters the second stage then"
    outcome = pipeline.run(StepPlan(2, Resume(plan.slices, 1, STEP_S / 8, SUSPENDS)))
    assert (outcome.suspended, outcome.layers_done, outcome.stopped_at_s) == (("r0",), 5, 5.5)
    outcome = pipeline.run(StepPlan(3, Resume(plan.slices, 3, STEP_S * 3 / 8, SUSPENDS)))
    assert [sampled.request_id for sampled in outcome.sampled] == ["r0"]
    assert clock.now_s() == 7.0


@pytest.mark.parametrize(("apart", "layers_done"), [(1, 2), (2, 3), (4, 4)])
def test_a_step_that_waits_for_a_stage_stops_within_it(apart: int, layers_done: int) -> None:
    """Not before its first layer, nor behind its last one: ranks agree while they compute."""
    pipeline, clock = make_pipeline(1, 3)
    pipeline.submit(plan_of(0))
    pipeline.submit(plan_of(1, stoppable=True, safepoints=Safepoints(apart, suspends=True)))
    clock.advance(2.5)
    pipeline.request_stop(1)
    pipeline.collect()
    outcome = pipeline.collect()
    if layers_done == 4:
        assert outcome.stopped == () and clock.now_s() == 7.0
    else:
        stopped_at_s = 4.0 + layers_done - 1
        assert (outcome.layers_done, outcome.stopped_at_s) == (layers_done, stopped_at_s)
        assert clock.now_s() == stopped_at_s


def test_online_slices_go_on_behind_a_stop() -> None:
    pipeline, clock = make_pipeline(2, 2, cost=linear_cost(token_s=1.0, step_s=0.0))
    names = [RequestId("offline"), RequestId("online")]
    slices = tuple(ScheduledSlice(name, 0, 2, (), True, name == "offline") for name in names)
    admitted = tuple(AdmittedRequest(name, (5, 6), SamplingParams(max_tokens=4)) for name in names)
    pipeline.submit(StepPlan(0, Compute(slices, 4.0, Safepoints(1, suspends=True)), admitted=admitted))
    clock.advance(0.5)
    pipeline.request_stop(0)
    outcome = pipeline.collect()
    assert (outcome.suspended, outcome.layers_done, outcome.stopped_at_s) == (("offline",), 1, 1.0)
    assert [sampled.request_id for sampled in outcome.sampled] == ["online"]
    assert clock.now_s() == 1.0 + 3 * 0.5


def test_all_steps_in_flight_can_be_stopped() -> None:
    pipeline, clock = make_pipeline(2, 2)
    plans = [plan_of(step, stoppable=True, safepoints=Safepoints(1, suspends=True)) for step in range(2)]
    for each in plans:
        pipeline.submit(each)
    clock.advance(2.5)
    for step in range(2):
        pipeline.request_stop(step)
    outcomes = [pipeline.collect(), pipeline.collect()]
    assert [each.layers_done for each in outcomes] == [3, 1]
    assert [each.stopped_at_s for each in outcomes] == [3.0, 3.0]
    for step, num_layers in ((2, 1), (3, 3)):
        pipeline.submit(StepPlan(step, Resume(plans[step - 2].slices, num_layers, 1.0, SUSPENDS)))
    for name in ("r0", "r1"):
        assert [sampled.request_id for sampled in pipeline.collect().sampled] == [name]
    assert clock.now_s() == 3.0 + 3.0, "one is in the second stage while the other is in the first"


def test_a_step_in_its_last_stage_is_not_stopped() -> None:
    pipeline, clock = make_pipeline(2, 2)
    pipeline.submit(plan_of(0, stoppable=True, safepoints=SUSPENDS))
    clock.advance(2.5)
    pipeline.request_stop(0)
    assert pipeline.collect().stopped == ()
    assert clock.now_s() == STEP_S


def test_an_executor_with_run_alone_has_one_step_in_flight() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(make_info(), DeviceBehaviour(flat_cost(STEP_S)), clock)
    executor.submit(plan_of(0))
    assert clock.now_s() == 0.0
    outcome: StepOutcome = executor.collect()
    assert len(outcome.sampled) == 1 and clock.now_s() == STEP_S
    pipeline, _ = make_pipeline(1, 1)
    for step in range(2):
        pipeline.submit(plan_of(step))
    with pytest.raises(AssertionError, match="2 steps are in flight"):
        pipeline.submit(plan_of(2))
