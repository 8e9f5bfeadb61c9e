from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.block import BlockCopy, SlotCopy, pack_block_ref
from backfill.core.clock import VirtualClock
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    CopyDirections,
    Resume,
    Safepoints,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WaitForCopies,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.costs.behaviour import DeviceBehaviour, StepNoise
from backfill.costs.profile import CopySpeed
from backfill.execution.simulated_executor import SimulatedExecutor, hashed_token
from tests.builders import linear_cost, make_info

ONLINE, OFFLINE = RequestId("chat"), RequestId("job")
NUM_LAYERS = 10


def plan(*, online: int = 0, offline: int = 0, safepoints: Safepoints | None = None) -> StepPlan:
    """So many tokens of an online and of an offline request, each in blocks of its own."""
    slices, admitted, first = [], [], 0
    for request_id, num_tokens in ((ONLINE, online), (OFFLINE, offline)):
        if num_tokens:
            blocks = tuple(pack_block_ref(first + index) for index in range(-(-num_tokens // 4)))
            first += len(blocks)
            slices.append(ScheduledSlice(request_id, 0, num_tokens, blocks, True, request_id is OFFLINE))
            admitted.append(AdmittedRequest(request_id, (5,) * num_tokens, SamplingParams(max_tokens=4)))
    return StepPlan(0, Compute(tuple(slices), safepoints=safepoints), admitted=tuple(admitted))


class StopAt:
    """An event at an instant that asks for a stop."""

    def __init__(self, clock: VirtualClock, at_s: float) -> None:
        self.clock, self.at_s = clock, at_s
        self.executor: SimulatedExecutor | None = None
        self.delivered_at_s: list[float] = []

    def next_at_s(self) -> float:
        return math.inf if self.delivered_at_s else self.at_s

    def deliver(self) -> None:
        self.delivered_at_s.append(self.clock.now_s())
        assert self.executor is not None
        self.executor.request_stop(0)


def make_executor(stop_at_s: float) -> tuple[SimulatedExecutor, VirtualClock, StopAt]:
    """Tokens cost 1 ms each."""
    clock = VirtualClock(10.0)
    events = StopAt(clock, stop_at_s)
    info = replace(make_info(num_blocks=100), num_layers=NUM_LAYERS)
    executor = SimulatedExecutor(info, DeviceBehaviour(linear_cost()), clock)
    executor.events = events
    events.executor = executor
    return executor, clock, events


@pytest.mark.parametrize(
    ("stop_at_s", "layers_apart", "online", "layers_done", "ends_at_s"),
    [
        (math.inf, None, 0, 0, 10.1),
        (10.033, None, 0, 0, 10.1),  # without safepoints, events wait
        (10.033, 2, 0, 4, 10.04),
        (10.085, 2, 0, 0, 10.1),  # behind the last safepoint
        (10.051, 1, 20, 6, 10.06 + 0.4 * 0.02),  # the online rows go on alone
    ],
)
def test_a_stopped_step_ends_at_its_next_safepoint(
    stop_at_s: float, layers_apart: int | None, online: int, layers_done: int, ends_at_s: float
) -> None:
    executor, clock, events = make_executor(stop_at_s)
    points = None if layers_apart is None else Safepoints(layers_apart, suspends=True)
    outcome = executor.run(plan(online=online, offline=100 - online, safepoints=points))
    assert clock.now_s() == pytest.approx(ends_at_s)
    assert outcome.layers_done == layers_done
    assert outcome.stopped == ((OFFLINE,) if layers_done else ())
    sampled = {each.request_id for each in outcome.sampled}
    assert sampled == ({ONLINE} if online else set()) | (set() if layers_done else {OFFLINE})
    if layers_done:
        assert events.delivered_at_s == [pytest.approx(stop_at_s)]
        assert outcome.stopped_at_s == pytest.approx(10.0 + layers_done / 100)
    elif points is None:
        assert events.delivered_at_s == []


def test_a_suspended_step_goes_on_for_the_layers_it_is_given() -> None:
    executor, clock, _ = make_executor(10.033)
    points = Safepoints(2, suspends=True)
    stopped = plan(offline=100, safepoints=points)
    executor.run(stopped)
    first = executor.run(StepPlan(1, Resume(stopped.slices, 3, 0.03, points)))
    assert (first.stopped, first.layers_done) == ((OFFLINE,), 7)
    assert clock.now_s() == pytest.approx(10.07)
    last = executor.run(StepPlan(2, Resume(stopped.slices, NUM_LAYERS - 7, 0.03, points)))
    assert last.stopped == ()
    assert [each.request_id for each in last.sampled] == [OFFLINE]
    assert clock.now_s() == pytest.approx(10.1)


def test_sampled_tokens_depend_on_request_and_position_and_are_the_same_in_every_process() -> None:
    info = make_info(end_token_ids=(2, 3))
    sampled = [hashed_token(request_id, at, info) for request_id in (ONLINE, OFFLINE) for at in range(16)]
    assert sampled[:4] == [495, 913, 307, 885]
    assert sampled[:16] != sampled[16:] and len(set(sampled)) > 28
    assert all(0 <= token_id < info.vocab_size for token_id in sampled)


def test_no_sampled_token_ends_an_output() -> None:
    info = replace(make_info(end_token_ids=(0, 2, 3)), vocab_size=4)
    assert {hashed_token(ONLINE, at, info) for at in range(50)} == {1}


def test_a_request_samples_the_tokens_of_its_positions() -> None:
    executor, _, _ = make_executor(math.inf)
    outcome = executor.run(plan(online=20, offline=100))
    assert [each.token_id for each in outcome.sampled] == [
        hashed_token(ONLINE, 20, executor.info),
        hashed_token(OFFLINE, 100, executor.info),
    ]
    decode = ScheduledSlice(ONLINE, 20, 1, tuple(map(pack_block_ref, range(6))), True)
    (sampled,) = executor.run(StepPlan(step=1, work=Compute((decode,)))).sampled
    assert sampled.token_id == hashed_token(ONLINE, 21, executor.info)


COPIES = CopySpeed(to_host_bytes_per_s=1e6, to_device_bytes_per_s=1e6)


def make_device(**settings: float) -> DeviceBehaviour:
    """Tokens cost 1 ms each, and a block of 10 kB is copied in 10 ms."""
    return DeviceBehaviour(linear_cost(), COPIES, **settings)  # type: ignore[arg-type]


def executor_of(device: DeviceBehaviour, seed: int = 0) -> tuple[SimulatedExecutor, VirtualClock]:
    clock = VirtualClock(10.0)
    info = replace(
        make_info(num_blocks=100, num_host_blocks=100, num_layers=NUM_LAYERS),
        block_bytes=10_000,
    )
    return SimulatedExecutor(info, device, clock, seed=seed), clock


def step_times(device: DeviceBehaviour, count: int, seed: int = 0) -> list[float]:
    executor, clock = executor_of(device, seed)
    found = []
    for _ in range(count):
        began_s = clock.now_s()
        executor.run(plan(offline=100))
        found.append(clock.now_s() - began_s)
    return found


def test_noise_scales_steps_and_is_the_same_for_one_seed() -> None:
    device = replace(make_device(), noise=StepNoise((0.0, 1.0), (0.9, 1.3)))
    times = step_times(device, 200)
    assert all(0.09 - 1e-9 <= each <= 0.13 + 1e-9 for each in times)
    assert max(times) - min(times) > 0.03
    assert times == step_times(device, 200)
    assert times != step_times(device, 200, seed=1)


def test_host_time_is_no_part_of_a_step() -> None:
    assert step_times(make_device(host_s=1.0), 1) == [pytest.approx(0.1)]


def copying(step: StepPlan, num_blocks: int) -> StepPlan:
    copies = tuple(BlockCopy(index, index) for index in range(num_blocks))
    return replace(step, copies=BlockCopies(checkpoint=copies))


def test_an_arrival_during_a_blocking_copy_stops_the_step_at_its_first_safepoint() -> None:
    executor, clock = executor_of(make_device())
    events = StopAt(clock, 10.01)
    executor.events, events.executor = events, executor
    step = copying(plan(offline=100, safepoints=Safepoints(2, suspends=True)), 3)
    step = replace(step, copies=replace(step.copies, blocking=CopyDirections.CHECKPOINT))
    assert executor.run(step).layers_done == 2
    assert clock.now_s() == pytest.approx(10.03 + 0.02)


@pytest.mark.parametrize("direction", [CopyDirections.CHECKPOINT, CopyDirections.RESTORE])
def test_a_copy_of_slots_takes_its_share_of_a_block(direction: CopyDirections) -> None:
    executor, clock = executor_of(make_device())
    size = executor.info.block_size
    block, slots = (BlockCopy(0, 0),), (SlotCopy(1, 1, 0, 1), SlotCopy(2, 2, size // 2, size // 2))
    copies = BlockCopies(checkpoint=block, slot_checkpoint=slots)
    if direction is CopyDirections.RESTORE:
        copies = BlockCopies(restore=block, slot_restore=slots)
    executor.run(replace(plan(), copies=replace(copies, blocking=direction)))
    assert clock.now_s() == pytest.approx(10.0 + 0.01 * (1 + 1 / size + 1 / 2))
    waits = StepPlan(1, WaitForCopies(), copies=copies)
    assert executor.run(waits) == StepOutcome((), completed_copies=block)
    waits = replace(waits, copies=BlockCopies())
    assert executor.run(waits) == StepOutcome((), completed_slot_copies=slots[:1])
    assert executor.run(waits) == StepOutcome((), completed_slot_copies=slots[1:])
    assert clock.now_s() == pytest.approx(10.0 + 0.02 * (1 + 1 / size + 1 / 2))


@given(
    stop_at_s=st.floats(10.0, 10.25),
    num_blocks=st.integers(0, 30),
    layers_apart=st.integers(1, 4),
    ratio=st.sampled_from([0.8, 1.0, 1.5]),
)
def test_a_stop_waits_for_one_group_of_layers_at_most_and_no_work_is_lost(
    stop_at_s: float, num_blocks: int, layers_apart: int, ratio: float
) -> None:
    device = replace(make_device(), noise=StepNoise(ratios=(ratio, ratio)))
    executor, clock = executor_of(device)
    events = StopAt(clock, stop_at_s)
    executor.events, events.executor = events, executor
    points = Safepoints(layers_apart, suspends=True)
    step = plan(offline=100, safepoints=points)
    outcome = executor.run(copying(step, num_blocks))
    group_s = ratio * 0.1 * layers_apart / NUM_LAYERS
    if outcome.stopped:
        assert outcome.stopped_at_s == clock.now_s()
        assert stop_at_s - 1e-9 <= clock.now_s() <= stop_at_s + group_s + 1e-9
        assert 0 < outcome.layers_done < NUM_LAYERS and outcome.layers_done % layers_apart == 0
        executor.run(StepPlan(1, Resume(step.slices, NUM_LAYERS - outcome.layers_done, 0.1, points)))
    assert clock.now_s() == pytest.approx(10.0 + ratio * 0.1)
