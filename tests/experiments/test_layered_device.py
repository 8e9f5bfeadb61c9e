"""Offloaded layers, safepoints that take time, and copies that slow down, on the virtual clock."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.plan import DeviceMemory, Resume, Safepoints, StepOutcome, StepPlan, WeightTransfers
from backfill.costs.behaviour import StepNoise
from backfill.offloading.interval import LayerTimes, offloaded_layers, step_time_s
from experiments.layered_device import LayeredDevice, LayeredExecutor
from tests.builders import linear_cost, make_info
from tests.execution.test_simulated_executor import COPIES, NUM_LAYERS, StopAt, copying, executor_of, plan
from tests.shared import examples

LAYER_BYTES = 1000


def make(
    num_layers: int, interval: int | None, layer_s: float, transfer_s: float
) -> tuple[LayeredExecutor, VirtualClock]:
    """Steps of one token take ``num_layers * layer_s``, and each further token as long again."""
    clock = VirtualClock(10.0)
    info = replace(make_info(num_blocks=100), num_layers=num_layers, offload_interval=interval)
    info = replace(info, layer_bytes=LAYER_BYTES)
    cost = linear_cost(token_s=num_layers * layer_s, step_s=0.0)
    return LayeredExecutor(info, LayeredDevice(cost, layer_transfer_s=transfer_s), clock), clock


def timed(executor: LayeredExecutor, clock: VirtualClock, other_s: float = 0.0) -> tuple[float, StepOutcome]:
    began_s = clock.now_s()
    outcome = executor.run(plan(online=1))
    clock.advance(other_s)
    return clock.now_s() - began_s, outcome


@settings(max_examples=examples(40))
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
        memory = DeviceMemory(num_blocks=100, interval=interval)
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


@pytest.mark.parametrize("field", ["safepoint_s", "copy_slowdown", "layer_transfer_s"])
@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan])
def test_a_device_takes_no_time_below_zero(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        LayeredDevice(linear_cost(), **{field: value})


def layered(device: LayeredDevice) -> tuple[LayeredExecutor, VirtualClock]:
    executor, clock = executor_of(device)
    return LayeredExecutor(executor.info, device, clock), clock


@pytest.mark.parametrize(("layers_apart", "added"), [(1, 10), (2, 5), (5, 2)])
def test_safepoints_take_time_in_steps_that_have_them(layers_apart: int, added: int) -> None:
    executor, clock = layered(LayeredDevice(linear_cost(), COPIES, safepoint_s=0.001))
    executor.run(plan(offline=100))
    assert clock.now_s() == pytest.approx(10.1)
    executor.run(replace(plan(offline=100, safepoints=Safepoints(layers_apart, suspends=True)), step=1))
    assert clock.now_s() == pytest.approx(10.2 + added * 0.001)


@pytest.mark.parametrize(
    ("num_blocks", "seconds"),
    [
        (0, 0.1),
        (3, 0.03 + (0.1 - 0.03 / 1.5)),  # the first 30 ms compute what takes 20 ms alone
        (15, 0.15),
        (40, 0.15),
    ],
)
def test_steps_are_slower_while_blocks_are_copied(num_blocks: int, seconds: float) -> None:
    executor, clock = layered(LayeredDevice(linear_cost(), COPIES, copy_slowdown=0.5))
    executor.run(copying(plan(offline=100), num_blocks))
    assert clock.now_s() == pytest.approx(10.0 + seconds)
    rest_s = max(0.0, num_blocks * 0.01 - seconds)  # copies that the next step runs beside
    executor.run(replace(plan(offline=100), step=1))
    assert clock.now_s() == pytest.approx(10.0 + seconds + 0.1 + min(0.05, rest_s / 3))


@given(
    stop_at_s=st.floats(10.0, 10.25),
    slowdown=st.sampled_from([0.0, 0.5, 1.0]),
    num_blocks=st.integers(0, 30),
    layers_apart=st.integers(1, 4),
    ratio=st.sampled_from([0.8, 1.0, 1.5]),
)
def test_beside_slowing_copies_a_stop_waits_for_one_group_at_most_and_no_work_is_lost(
    stop_at_s: float, slowdown: float, num_blocks: int, layers_apart: int, ratio: float
) -> None:
    device = replace(
        LayeredDevice(linear_cost(), COPIES, copy_slowdown=slowdown), noise=StepNoise(ratios=(ratio, ratio))
    )
    executor, clock = layered(device)
    events = StopAt(clock, stop_at_s)
    executor.events, events.executor = events, executor
    points = Safepoints(layers_apart, suspends=True)
    step = plan(offline=100, safepoints=points)
    outcome = executor.run(copying(step, num_blocks))
    group_s = ratio * 0.1 * layers_apart / NUM_LAYERS * (1 + slowdown)
    if outcome.stopped:
        assert outcome.stopped_at_s == clock.now_s()
        assert stop_at_s - 1e-9 <= clock.now_s() <= stop_at_s + group_s + 1e-9
        assert 0 < outcome.layers_done < NUM_LAYERS and outcome.layers_done % layers_apart == 0
        executor.run(StepPlan(1, Resume(step.slices, NUM_LAYERS - outcome.layers_done, 0.1, points)))
    copying_s = 0.01 * num_blocks
    beside_s = min(copying_s, ratio * 0.1 * (1 + slowdown))
    whole_s = beside_s + ratio * 0.1 - beside_s / (1 + slowdown)
    assert clock.now_s() == pytest.approx(10.0 + whole_s)
