from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace

import numpy as np
import overload_scenarios as scenarios
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_replay import LiveReplay
from mixed_replay import Flood, Kind, KindFigures, Load, Outcome, figures_of, replay
from observation import ObservedExecutor, noise_of_ratios, observed_behaviour

from backfill.core.block import SlotCopy, pack_block_ref
from backfill.core.clock import VirtualClock, WallClock
from backfill.core.config import PolicyName, SchedulerConfig
from backfill.core.plan import AdmittedRequest, BlockCopies, Compute, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.costs.behaviour import StepNoise
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.costs.profile import CopySpeed, FitError
from backfill.engine.engine import Engine
from backfill.simulation.replay import Arrival, Lengths, Replay, Workload
from experiments.layered_device import LayeredDevice, LayeredExecutor
from experiments.workloads import gamma_workload
from tests.builders import ScriptedExecutor, linear_cost, make_info, make_profile
from tests.costs.test_behaviour import draws

OFFLINE = (Lengths(20, 4),)
WORKLOAD = Workload(tuple(Arrival(0.5 + 0.01 * i, Lengths(10, 3)) for i in range(8)), 0.7, OFFLINE)
SOON = Workload(tuple(Arrival(0.01 * i, Lengths(10, 3)) for i in range(8)), 0.1, ())


class Arriving(Engine):
    """Notes whether a step ran when a request arrived."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        super().__init__(SchedulerConfig(policy="priority"), executor, WallClock())
        self.arrived_in_step: list[bool] = []
        self.has_arrived = threading.Event()

    def arrive(self, request: Request) -> None:
        self.arrived_in_step.append(bool(self._in_flight))
        super().arrive(request)
        self.has_arrived.set()


class Waiting(ScriptedExecutor):
    """Its first step with a slice waits for an arrival."""

    def __init__(self) -> None:
        super().__init__(make_info(num_blocks=4000, block_size=16))
        self.engine: Arriving | None = None

    def run(self, plan: StepPlan) -> StepOutcome:
        if plan.slices:
            assert self.engine is not None
            assert self.engine.has_arrived.wait(60.0)
        return super().run(plan)


def test_requests_arrive_while_a_step_runs_and_each_is_recorded() -> None:
    executor = Waiting()
    engine = executor.engine = Arriving(executor)
    result = LiveReplay(engine, WallClock(), WORKLOAD).run()
    assert engine.arrived_in_step[0]  # the flood's first step waited for it
    assert [len(record.token_at_s) for record in result.online] == [3] * 8
    assert all(record.ttft_s > 0 for record in result.online)
    assert result.num_prefix_hit_tokens == 0


def test_the_replay_waits_for_arrivals_when_nothing_runs() -> None:
    executor = ScriptedExecutor(make_info(num_blocks=4000, block_size=16))
    result = LiveReplay(Arriving(executor), WallClock(), SOON).run()
    assert [len(record.token_at_s) for record in result.online] == [3] * 8
    assert not [each for each in threading.enumerate() if each.name == "arrivals"]


def test_a_request_that_cannot_arrive_ends_the_replay() -> None:
    class Refusing(Arriving):
        def arrive(self, request: Request) -> None:
            raise KeyError("no room")

    engine = Refusing(ScriptedExecutor(make_info(num_blocks=4000, block_size=16)))
    with pytest.raises(RuntimeError, match="could not arrive"):
        LiveReplay(engine, WallClock(), replace(SOON, offline=OFFLINE)).run()
    assert not [each for each in threading.enumerate() if each.name == "arrivals"]


PROFILE = make_profile(linear_cost(token_s=1e-4, step_s=5e-3, context_s=1e-6))
TRUE_COST = linear_cost(token_s=1.3e-4, step_s=6e-3, context_s=1e-6)
GRID = [StepLoad.of([(0, 2**power, True)]) for power in range(11)]


def observed(
    behaviour: LayeredDevice, *, num_blocks: int = 600, seconds: float = 20.0
) -> tuple[LayeredDevice, ObservedExecutor]:
    """What is seen of this device while it serves."""
    clock = VirtualClock()
    info = replace(
        make_info(num_blocks, block_size=16, num_host_blocks=4000, num_layers=32),
        block_bytes=100_000,
    )
    executor = LayeredExecutor(info, behaviour, clock, seed=5)
    watched = ObservedExecutor(executor, clock, behaviour.copies)
    config = SchedulerConfig(policy="slo", ttft_slo=1.0, tpot_slo=0.15, checkpointing="adaptive")
    load = gamma_workload(2.0, 1.0, seconds, Lengths(200, 20), offline=(Lengths(600, 40),), seed=3)
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
    truth = LayeredDevice(
        TRUE_COST, CopySpeed(1e10, 1e10), noise=noise, host_s=0.002, safepoint_s=2e-5, copy_slowdown=0.0
    )
    found, watched = observed(truth)
    assert len(watched.steps) > 250
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
    found, watched = observed(LayeredDevice(slow, PROFILE.copies), seconds=10.0)
    assert all(step.plan.slices and step.seconds > 0 for step in watched.steps)
    assert len(watched.steps) < len(watched.gaps_s) + 1, "stopped and resumed steps are left out"
    assert typical_ratio(found.cost, slow, watched) == pytest.approx(1.0, abs=0.05)
    assert np.interp(0.5, found.noise.probabilities, found.noise.ratios) == pytest.approx(1.0, abs=0.05)


def test_steps_beside_copies_show_how_much_copies_slow_them() -> None:
    truth = LayeredDevice(TRUE_COST, CopySpeed(1e8, 1e8), copy_slowdown=0.4)
    found, watched = observed(truth)
    assert any(step.copying_s for step in watched.steps)
    assert found.copy_slowdown == pytest.approx(0.4, abs=0.12)


def test_without_copies_nothing_is_slowed() -> None:
    found, watched = observed(LayeredDevice(TRUE_COST, PROFILE.copies), num_blocks=4000, seconds=4.0)
    assert not any(step.copying_s for step in watched.steps)
    assert found.copy_slowdown == 0.0


def test_copies_of_slots_count_as_their_share_of_a_block() -> None:
    clock = VirtualClock()
    info = replace(make_info(num_blocks=8, num_host_blocks=8), block_bytes=20_000_000)
    device = LayeredExecutor(info, LayeredDevice(TRUE_COST, PROFILE.copies), clock)
    watched = ObservedExecutor(device, clock, PROFILE.copies)
    admitted = (AdmittedRequest(RequestId("r"), (5,) * 4, SamplingParams(max_tokens=1)),)
    work = Compute((ScheduledSlice(RequestId("r"), 0, 4, (pack_block_ref(0),), samples=False),))
    half = (SlotCopy(1, 1, 0, info.block_size // 2),)
    copies = BlockCopies(slot_checkpoint=half, slot_restore=half)
    watched.run(StepPlan(0, work, admitted=admitted, copies=copies))
    watched.run(StepPlan(1, work))
    assert [step.copying_s for step in watched.steps] == [pytest.approx(1.5e-3), 0.0]


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


FIGURES = KindFigures(0.1, 0.2, 0.01, 0.02, 1.0, 0.5, 100.0, 0.0)


def run_main(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["overload_scenarios.py", *options])
    scenarios.main()


def serve(policy: PolicyName, load: Load) -> Outcome:
    config = scenarios.scheduler_config(policy)
    return replay(config, load, scenarios.HARDWARE, scenarios.behaviour_of(0.0), seed=1)


@pytest.mark.slow
def test_each_scenario_prints_a_table_and_the_figures_end_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scenarios, "_CHAT", Lengths(64, 8))
    options = ("--scale", "0.01", "--noise", "0.06", "--policies", "online-only,slo")
    run_main(monkeypatch, *options)
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["best_static_limit"] in scenarios.static_limits()
    titles = [line.split()[0] for line in lines if "TTFT P50" in line]
    assert titles == list(scenarios.SCENARIOS)
    for name in scenarios.SCENARIOS:
        for row, by_name in result[name].items():
            assert {"online-only", "slo"} <= by_name.keys()
            assert f"  {row}" in lines
            alone = by_name["online-only"]
            assert alone["offline_tok_s"] == 0.0
            for figures in by_name.values():
                assert 0.0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"]
                assert 0.0 <= figures["attainment"] <= figures["ttft_attainment"] <= 1.0
                ratio = figures["ttft_p99_s"] / alone["ttft_p99_s"]
                assert figures["ttft_p99_s_over_online_only"] == ratio
                assert figures["offline_tok_s_over_fcfs"] is None


def test_a_run_is_repeated_exactly_and_another_seed_is_another_run() -> None:
    chat = Kind("chat", [Arrival(0.1 * number, Lengths(32, 8)) for number in range(8)])
    load = Load([chat], 1.0, Flood((Lengths(64, 4),), window_s=0.01))

    def ends(seed: int) -> list[float]:
        config, behaviour = scenarios.scheduler_config("slo"), scenarios.behaviour_of(0.06)
        records = replay(config, load, scenarios.HARDWARE, behaviour, seed=seed).records["chat"]
        return [record.token_at_s[-1] for record in records]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)


def test_a_closed_loop_sends_the_next_when_one_ends_until_the_duration() -> None:
    lengths = (Lengths(32, 8), Lengths(32, 4))
    loop = Kind("loop", [Arrival(0.0, lengths[0])] * 2, follow=lengths)
    single = Kind("single", [Arrival(1.0, Lengths(16, 2))])
    records = serve("fcfs", Load([loop, single], duration_s=2.0)).records
    assert len(records["single"]) == 1
    looped = records["loop"]
    assert len(looped) > 4
    assert {len(record.token_at_s) for record in looped} == {4, 8}
    ends = sorted(record.token_at_s[-1] for record in looped)
    starts = sorted(record.arrived_at_s for record in looped)
    assert starts[:2] == [0.0, 0.0]
    assert starts[2:] == [end for end in ends if end < 2.0]
    assert ends[-1] >= 2.0


def test_a_kind_is_served_and_measured_by_its_own_objectives() -> None:
    urgent = Kind("urgent", [Arrival(0.0, Lengths(50, 8))], slo=SLO(0.1, 0.15))
    long_prompt = Kind("long", [Arrival(0.0, Lengths(2040, 8))])
    first = serve("slo", Load([long_prompt, urgent], 1.0)).records
    assert first["urgent"][0].ttft_s < 0.1 < first["long"][0].ttft_s
    same = serve("slo", Load([long_prompt, replace(urgent, slo=None)], 1.0)).records
    assert same["urgent"][0].ttft_s > 0.1


def test_online_only_gets_no_offline_work_and_tokens_of_it_are_counted_apart() -> None:
    chat = Kind("chat", [Arrival(0.0, Lengths(32, 8))])
    load = Load([chat], 1.0, Flood((Lengths(64, 4),), window_s=0.01))
    for outcome, has_offline in ((serve("online-only", load), False), (serve("slo", load), True)):
        assert outcome.tok_s[ServiceClass.ONLINE] == 32 + 8 - 1
        assert (outcome.tok_s[ServiceClass.OFFLINE] > 0) is has_offline
        figures = figures_of(outcome, chat, SLO(1.0, 0.15))
        assert figures.attainment == figures.ttft_attainment == 1.0
        assert figures_of(outcome, chat, SLO(1.0, 1e-6)).attainment == 0.0
        assert figures_of(outcome, chat, SLO(1e-6, 0.15)).ttft_attainment == 0.0
