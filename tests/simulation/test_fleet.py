from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from backfill.core.block import pack_block_ref
from backfill.core.clock import VirtualClock
from backfill.core.errors import ConfigError
from backfill.core.plan import AdmittedRequest, Compute, Safepoints, ScheduledSlice, StepPlan
from backfill.core.request import RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.costs.behaviour import DeviceBehaviour, StepNoise
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.fleet import FleetResult
from backfill.simulation.fleet_figures import ONE_ENGINE, Comparison, figures_of
from backfill.simulation.fleet_replica import FleetClock, ReplicaDevice
from backfill.simulation.fleet_study import FleetStudy
from backfill.simulation.fleet_traffic import answer_token
from backfill.simulation.study import run_study
from tests.builders import linear_cost, make_info
from tests.cli.running import run_cli_here, run_to_json
from tests.integrity import check_scheduler

STUDY = FleetStudy(
    hardware="a100-80g-llama-3-8b",
    tensor_parallel_size=1,
    replicas=2,
    kv_tokens=40_000,
    max_num_seqs=8,
    routers=f"slo,round-robin,{ONE_ENGINE}",
    rate=12.0,
    duration=4.0,
    speed=10.0,
    applications=4,
    zipf=1.0,
    turns=0.5,
    ttft_slo=1.5,
    tpot_slo=0.11,
)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    (outcomes,) = run_study(STUDY)
    return outcomes


class StopAt:
    """Asks for a stop at an instant, which falls into a step."""

    def __init__(self, executor: SimulatedExecutor, at_s: float) -> None:
        self.executor, self.at_s = executor, at_s

    def next_at_s(self) -> float:
        return self.at_s

    def deliver(self) -> None:
        self.at_s = math.inf
        self.executor.request_stop(7)


def step_of_two(*, suspends: bool) -> StepPlan:
    """An online request of 100 tokens and an offline one of 300, which may be stopped."""
    slices, admitted = [], []
    for number, num_tokens in ((0, 100), (1, 300)):
        request_id = RequestId(str(number))
        blocks = (pack_block_ref(number),)
        slices.append(ScheduledSlice(request_id, 0, num_tokens, blocks, True, number == 1))
        admitted.append(AdmittedRequest(request_id, (5,) * num_tokens, SamplingParams(max_tokens=4)))
    work = Compute(tuple(slices), safepoints=Safepoints(1, suspends=suspends))
    return StepPlan(7, work, admitted=tuple(admitted))


@pytest.mark.parametrize("suspends", [True, False])
@pytest.mark.parametrize("at_s", [0.0, 0.1234, 0.39, 0.3999])
def test_a_split_step_stops_as_one_that_runs_at_once(at_s: float, suspends: bool) -> None:
    info = make_info(num_layers=10)
    device = DeviceBehaviour(linear_cost(token_s=0.001), noise=StepNoise((0.0, 1.0), (0.9, 1.1)))
    whole_clock, clock = VirtualClock(), FleetClock()
    whole = SimulatedExecutor(info, device, whole_clock, seed=3)
    whole.events = StopAt(whole, at_s)
    expected = whole.run(step_of_two(suspends=suspends))

    split = ReplicaDevice(info, device, clock, seed=3)
    split.submit(step_of_two(suspends=suspends))
    clock.move_to(at_s)
    split.request_stop(7)
    assert split.ends_at_s == pytest.approx(whole_clock.now_s())
    clock.move_to(split.ends_at_s)
    outcome = split.collect()
    assert (outcome.stopped, outcome.layers_done) == (expected.stopped, expected.layers_done)
    assert outcome.stopped_at_s == pytest.approx(expected.stopped_at_s)
    sampled = [(each.request_id, each.token_id) for each in outcome.sampled]
    assert sampled == [(each.request_id, answer_token(int(each.request_id), 0)) for each in expected.sampled]


def fleet_result(router: str, **changes: object) -> FleetResult:
    """Of a run whose fleet's invariants are checked at the end."""
    fleet = replace(STUDY, **changes).fleet(router, 1)  # type: ignore[arg-type]
    result = fleet.run()
    for replica in fleet.replicas:
        check_scheduler(replica.engine.scheduler)
    return result


@pytest.mark.parametrize(
    "router", ["slo", *(pytest.param(each, marks=pytest.mark.slow) for each in ("least-loaded", "prefix"))]
)
def test_every_online_request_ends_on_one_replica(router: str) -> None:
    result = fleet_result(router)
    assert len(result.online) == 48
    assert all(each.ttft_s > 0 and each.tpot_s >= 0 for each in result.online)
    assert {each.replica for each in result.online} == {0, 1}
    assert len(result.counters) == len(result.offline_done) == 2
    computed = [each[ServiceClass.OFFLINE].num_computed_tokens for each in result.counters]
    assert min(computed) > 0.5 * max(computed)


def test_round_robin_takes_turns() -> None:
    result = fleet_result("round-robin", online_only=True, duration=1.0)
    assert [each.replica for each in result.online] == [0, 1] * 6
    assert not any(each[ServiceClass.OFFLINE].num_computed_tokens for each in result.counters)


@pytest.mark.slow  # of one engine: test_replay.py
def test_a_run_depends_on_its_seed_alone() -> None:
    brief = replace(STUDY, duration=1.0)
    first, again, other = (brief.run("slo", seed) for seed in (1, 1, 2))
    assert again.ttft_s.tolist() == first.ttft_s.tolist() != other.ttft_s.tolist()
    assert replace(again.figures, scheduling_s=0.0) == replace(first.figures, scheduling_s=0.0)


@pytest.mark.slow  # of a router alone: tests/router
def test_the_prefixes_of_one_engine_are_found_and_no_more_elsewhere(comparison: Comparison) -> None:
    figures = figures_of(comparison)
    one = figures[ONE_ENGINE]["hit_rate"]
    assert 0.05 < figures["round-robin"]["hit_rate"] < one
    assert figures["slo"]["hit_rate"] <= 1.05 * one
    assert figures["slo"]["hit_rate_over_one-engine"] == pytest.approx(figures["slo"]["hit_rate"] / one)
    assert "ttft_p99_s_over_round-robin" in figures["slo"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routers": "best"}, "`routers`: there is no 'best'"),
        ({"replicas": 0}, "`replicas` must be between 1 and 256"),
        ({"tensor_parallel_size": 8, "hardware": "a100-80g-opt-13b"}, "cannot be put on several devices"),
        ({"turns": 1.5}, "`turns` must be between 0 and 1"),
        ({"zipf": -1.0}, "`zipf` must be at least 0"),
        ({"rate": 1e-300}, "`rate` must be between 0.001 and 1000000"),
        ({"speed": 0.0}, "`speed` must be between 0.001 and 1000000"),
        ({"online_only": True, "offline": Path("a.csv")}, "`offline` is of no use with `online_only`"),
    ],
)
def test_studies_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(STUDY, **changes).validate()  # type: ignore[arg-type]


@pytest.mark.slow  # a command as test_simulate_goodput_prints_tables_and_ends_with_json
def test_the_command_compares_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    size = ["--replicas", "2", "--rate", "6", "--duration", "1",
            "--kv-tokens", "40000", "--max-num-seqs", "8"]  # fmt: skip
    _, content = run_to_json("simulate", "fleet", *size, "--routers", "slo,round-robin", "--json",
                             "--plot", "fleet.png")  # fmt: skip
    assert list(content["routers"]) == ["slo", "round-robin"]
    assert content["hardware"] == "a100-80g-llama-3-70b-tp4"
    assert content["kv_tokens_per_replica"] == 40_000
    assert content["routers"]["slo"]["num_online"] == 6
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
    refused = run_cli_here("simulate", "fleet", "--plot", "absent/fleet.png")
    assert refused.returncode == 1
    assert "--plot absent/fleet.png cannot be written: there is no folder absent" in refused.stderr
    refused = run_cli_here("simulate", "fleet", "--tensor-parallel-size", "3")
    assert refused.returncode == 1
    assert "--tensor-parallel-size must be one of 1, 2, 4, 8" in refused.stderr
