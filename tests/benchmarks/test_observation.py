from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observation import ObservedExecutor, noise_of_ratios, observed_behaviour

from backfill.core.block import SlotCopy, pack_block_ref
from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import AdmittedRequest, BlockCopies, Compute, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.costs.behaviour import DeviceBehaviour, StepNoise
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.costs.profile import CopySpeed, FitError
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.replay import Lengths, Replay
from backfill.simulation.workloads import gamma_workload
from tests.builders import linear_cost, make_info, make_profile
from tests.costs.test_behaviour import draws

PROFILE = make_profile(linear_cost(token_s=1e-4, step_s=5e-3, context_s=1e-6))
TRUE_COST = linear_cost(token_s=1.3e-4, step_s=6e-3, context_s=1e-6)
GRID = [StepLoad.of([(0, 2**power, True)]) for power in range(11)]


def observed(
    behaviour: DeviceBehaviour, *, num_blocks: int = 600
) -> tuple[DeviceBehaviour, ObservedExecutor]:
    """What is seen of this device while it serves."""
    clock = VirtualClock()
    info = replace(
        make_info(num_blocks, block_size=16, num_host_blocks=4000, num_layers=32, can_stop=True),
        block_bytes=100_000,
    )
    executor = SimulatedExecutor(info, behaviour, clock, seed=5)
    watched = ObservedExecutor(executor, clock, behaviour.copies)
    config = SchedulerConfig(policy="slo", ttft_slo=1.0, tpot_slo=0.15, checkpointing="adaptive")
    load = gamma_workload(2.0, 1.0, 40.0, Lengths(200, 20), offline=(Lengths(600, 40),), seed=3)
    replay = Replay(Engine(config, watched, clock, PROFILE), clock, load, host_s=behaviour.host_s)
    executor.events = replay
    replay.run()
    found = observed_behaviour(
        watched.steps, watched.gaps_s, PROFILE, GRID, safepoint_s=behaviour.safepoint_s
    )
    return found, watched


def typical_ratio(found: CostModel, true: CostModel, watched: ObservedExecutor) -> float:
    loads = [StepLoad.of_slices(step.plan.slices) for step in watched.steps]
    return float(np.median([found.step_time_s(load) / true.step_time_s(load) for load in loads]))


def test_what_a_device_does_is_found_from_its_steps() -> None:
    noise = replace(StepNoise.of_error(FitError(0.04, 0.12, 100)), correlation=0.5)
    truth = DeviceBehaviour(
        TRUE_COST, CopySpeed(1e10, 1e10), noise=noise, host_s=0.002, safepoint_s=2e-5, copy_slowdown=0.0
    )
    found, watched = observed(truth)
    assert len(watched.steps) > 500
    assert typical_ratio(found.cost, TRUE_COST, watched) == pytest.approx(1.0, abs=0.04)
    at = [0.05, 0.25, 0.5, 0.75, 0.95]
    spread = np.interp(at, found.noise.probabilities, found.noise.ratios)
    assert spread == pytest.approx(np.interp(at, noise.probabilities, noise.ratios), abs=0.06)
    assert found.noise.correlation > 0.2
    assert found.host_s == pytest.approx(0.002)
    assert found.safepoint_s == 2e-5
    assert found.copies == PROFILE.copies


def test_a_device_three_times_slower_than_its_profile_is_observed_too() -> None:
    slow = linear_cost(token_s=3e-4, step_s=15e-3, context_s=3e-6)
    found, watched = observed(DeviceBehaviour(slow, PROFILE.copies))
    assert typical_ratio(found.cost, slow, watched) == pytest.approx(1.0, abs=0.05)
    assert np.interp(0.5, found.noise.probabilities, found.noise.ratios) == pytest.approx(1.0, abs=0.05)


def test_steps_beside_copies_show_how_much_copies_slow_them() -> None:
    truth = DeviceBehaviour(TRUE_COST, CopySpeed(1e8, 1e8), copy_slowdown=0.4)
    found, watched = observed(truth)
    assert any(step.copying_s for step in watched.steps)
    assert found.copy_slowdown == pytest.approx(0.4, abs=0.12)


def test_without_copies_nothing_is_slowed() -> None:
    found, watched = observed(DeviceBehaviour(TRUE_COST, PROFILE.copies), num_blocks=4000)
    assert not any(step.copying_s for step in watched.steps)
    assert found.copy_slowdown == 0.0


def test_copies_of_slots_count_as_their_share_of_a_block() -> None:
    clock = VirtualClock()
    info = replace(make_info(num_blocks=8, num_host_blocks=8, can_stop=True), block_bytes=20_000_000)
    device = SimulatedExecutor(info, DeviceBehaviour(TRUE_COST, PROFILE.copies), clock)
    watched = ObservedExecutor(device, clock, PROFILE.copies)
    admitted = (AdmittedRequest(RequestId("r"), (5,) * 4, SamplingParams(max_tokens=1)),)
    work = Compute((ScheduledSlice(RequestId("r"), 0, 4, (pack_block_ref(0),), samples=False),))
    half = (SlotCopy(1, 1, 0, info.block_size // 2),)
    copies = BlockCopies(slot_checkpoint=half, slot_restore=half)
    watched.run(StepPlan(0, work, admitted=admitted, copies=copies))
    watched.run(StepPlan(1, work))
    assert [step.copying_s for step in watched.steps] == [pytest.approx(1.5e-3), 0.0]


def test_stopped_and_resumed_steps_are_left_out() -> None:
    _, watched = observed(DeviceBehaviour(TRUE_COST, PROFILE.copies))
    assert all(step.plan.slices and step.seconds > 0 for step in watched.steps)
    assert len(watched.steps) < len(watched.gaps_s) + 1


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="two or more steps"):
        observed_behaviour([], [0.1], PROFILE, GRID, safepoint_s=0.0)


@pytest.mark.parametrize("correlation", [0.0, 0.4, 0.8])
def test_noise_of_what_a_noise_drew_is_that_noise(correlation: float) -> None:
    truth = replace(StepNoise.of_error(FitError(0.05, 0.15, 100)), correlation=correlation)
    found = noise_of_ratios(draws(truth, 20_000).tolist())
    assert found.correlation == pytest.approx(correlation, abs=0.03)
    at = [0.05, 0.25, 0.5, 0.75, 0.95]
    quantiles = [np.interp(at, each.probabilities, each.ratios) for each in (truth, found)]
    assert quantiles[1] == pytest.approx(quantiles[0], abs=0.01)


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=60), st.integers(0, 5))
def test_no_draw_is_outside_of_what_was_measured(ratios: list[float], seed: int) -> None:
    noise = noise_of_ratios(ratios)
    drawn = draws(noise, 20, seed)
    assert min(ratios) * (1 - 1e-9) <= drawn.min() and drawn.max() <= max(ratios) * (1 + 1e-9)
