"""Stages on the virtual clock, and steps with offloaded layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.plan import (
    AdmittedRequest,
    Compute,
    DeviceMemory,
    Resume,
    Safepoints,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WeightTransfers,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.model import CostModel
from backfill.execution.simulated_executor import SimulatedExecutor, hashed_token
from backfill.execution.simulated_pipeline import SimulatedPipeline
from backfill.offloading.interval import LayerTimes, num_device_layers, offloaded_layers, step_time_s
from tests.builders import flat_cost, linear_cost, make_info
from tests.execution.test_simulated_executor import StopAt, plan

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


def plan_of(step: int, *, preemptible: bool = False, safepoints: Safepoints | None = None) -> StepPlan:
    """One prompt of a request of its own."""
    name = RequestId(f"r{step}")
    admitted = AdmittedRequest(name, (5, 6, 7), SamplingParams(max_tokens=4))
    scheduled = ScheduledSlice(name, 0, 3, (), samples=True, preemptible=preemptible)
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
    plan = plan_of(0, preemptible=True, safepoints=SUSPENDS)
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
    pipeline.submit(plan_of(1, preemptible=True, safepoints=Safepoints(apart, suspends=True)))
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
    plans = [plan_of(step, preemptible=True, safepoints=Safepoints(1, suspends=True)) for step in range(2)]
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
    pipeline.submit(plan_of(0, preemptible=True, safepoints=SUSPENDS))
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


LAYER_BYTES = 1000


def make(
    num_layers: int, interval: int | None, layer_s: float, transfer_s: float
) -> tuple[SimulatedExecutor, VirtualClock]:
    """Steps of one token take ``num_layers * layer_s``, and each further token as long again."""
    clock = VirtualClock(10.0)
    info = replace(make_info(num_blocks=100), num_layers=num_layers, offload_interval=interval)
    device = DeviceBehaviour(
        linear_cost(token_s=num_layers * layer_s, step_s=0.0),
        layer_transfer_s=transfer_s,
        layer_bytes=LAYER_BYTES,
    )
    return SimulatedExecutor(info, device, clock), clock


def timed(
    executor: SimulatedExecutor, clock: VirtualClock, other_s: float = 0.0
) -> tuple[float, StepOutcome]:
    began_s = clock.now_s()
    outcome = executor.run(plan(online=1))
    clock.advance(other_s)
    return clock.now_s() - began_s, outcome


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 30), st.integers(0, 60), st.integers(0, 60))
def test_mean_steps_take_what_the_formula_says(
    num_layers: int, interval: int, layer_ms: int, transfer_ms: int, other_ms: int
) -> None:
    """What the executor decides to transfer when is the pipeline that the formula is derived from."""
    interval = min(interval, num_layers)
    times = LayerTimes(num_layers, layer_ms / 1e3, transfer_ms / 1e3, other_ms / 1e3)
    executor, clock = make(num_layers, interval, times.compute_s, times.transfer_s)
    steps = [timed(executor, clock, times.other_s)[0] for _ in range(480)]
    assert sum(steps[240:]) / 240 == pytest.approx(step_time_s(times, interval), rel=1e-6, abs=1e-9)


def test_outcomes_report_transfers_and_stalls() -> None:
    executor, clock = make(num_layers=12, interval=3, layer_s=0.001, transfer_s=0.01)
    for _ in range(10):
        seconds, outcome = timed(executor, clock)
    assert seconds == pytest.approx(0.040)
    found = outcome.weight_transfers
    assert (found.interval, found.num_bytes) == (3, 4 * LAYER_BYTES)
    assert found.stall_s == pytest.approx(0.040 - 0.012)


def test_without_offloading_nothing_is_transferred() -> None:
    executor, clock = make(num_layers=12, interval=None, layer_s=0.001, transfer_s=0.01)
    seconds, outcome = timed(executor, clock)
    assert seconds == pytest.approx(0.012)
    assert outcome.weight_transfers == WeightTransfers()


def test_a_step_stops_at_a_safepoint_while_layers_wait_for_weights() -> None:
    executor, clock = make(num_layers=12, interval=1, layer_s=0.001, transfer_s=0.01)
    for _ in range(3):
        timed(executor, clock)
    executor.events = events = StopAt(clock, clock.now_s() + 0.035)
    events.executor = executor
    points = Safepoints(layers_apart=1, suspends=True)
    began_s = clock.now_s()
    mixed = plan(offline=1, safepoints=points)
    outcome = executor.run(mixed)
    assert 0.035 <= clock.now_s() - began_s <= 0.035 + 0.011
    assert 3 <= outcome.layers_done <= 5
    assert outcome.suspended == ("job",)
    # Another step runs from the first layer; then the suspended one goes on at its layer.
    timed(executor, clock)
    began_s = clock.now_s()
    left = 12 - outcome.layers_done
    resumed = executor.run(replace(mixed, step=1, work=Resume(mixed.slices, left, 0.0, points), admitted=()))
    assert [each.request_id for each in resumed.sampled] == ["job"]
    # Two transfers for the next pass were begun, and come first.
    assert clock.now_s() - began_s <= (left + 2) * 0.011


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 15))
def test_whatever_stops_later_steps_take_their_usual_time(num_layers: int, interval: int, stop: int) -> None:
    interval = min(interval, num_layers)
    times = LayerTimes(num_layers, 0.001, 0.004)
    executor, clock = make(num_layers, interval, times.compute_s, times.transfer_s)
    executor.events = events = StopAt(clock, clock.now_s() + stop / 1e3)
    events.executor = executor
    points = Safepoints(layers_apart=1, suspends=False)
    executor.run(plan(offline=1, safepoints=points))
    steps = [timed(executor, clock) for _ in range(60)]
    mean_s = sum(seconds for seconds, _ in steps[30:]) / 30
    # An interval with n transfers may repeat after more than 30 steps, so a mean of 30 is only close.
    assert mean_s == pytest.approx(step_time_s(times, interval), rel=0.02)
    num_offloaded = len(offloaded_layers(num_layers, interval))
    assert steps[-1][1].weight_transfers.num_bytes == num_offloaded * LAYER_BYTES


def test_a_plan_changes_the_interval_and_how_many_layers_have_memory() -> None:
    """From the interval that the memory was divided for to a smaller one with less memory, and back."""
    executor, clock = make(num_layers=12, interval=6, layer_s=0.001, transfer_s=0.002)
    for interval, usual in ((3, False), (3, True), (1, False), (1, True), (6, False), (6, True)):
        memory = DeviceMemory(num_blocks=100, num_layers=num_device_layers(12, interval))
        changed = replace(plan(online=1), offload_interval=interval, memory=None if usual else memory)
        executor.run(changed)
        steps = [timed(executor, clock) for _ in range(60)]
        mean_s = sum(seconds for seconds, _ in steps[20:]) / 40
        assert mean_s == pytest.approx(step_time_s(LayerTimes(12, 0.001, 0.002), interval), rel=0.02)
        transfers = steps[-1][1].weight_transfers
        assert (transfers.interval, transfers.transfer_s) == (interval, 0.002)
        assert transfers.num_bytes == len(offloaded_layers(12, interval)) * LAYER_BYTES


def test_an_interval_that_the_memory_has_no_room_for_is_refused() -> None:
    executor, _ = make(num_layers=12, interval=3, layer_s=0.001, transfer_s=0.002)
    with pytest.raises(ValueError, match="interval 6 needs 12 layers in memory, and 10 fit"):
        executor.run(replace(plan(online=1), offload_interval=6))
