from __future__ import annotations

import inspect
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from cyclopts import App
from matplotlib.figure import Figure

from backfill.cli.serve import serve
from backfill.cli.studies import command_of
from backfill.core.clock import Clock
from backfill.core.config import SchedulerConfig
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.execution.executor import Executor
from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.policy_study import PolicyPoint, PolicyStudy, Scenario, Spread
from backfill.simulation.replay import Arrival, Lengths, Workload
from backfill.simulation.study import FIRST_REPORTED_SEED, TUNING_SEED, Run, run_study
from backfill.simulation.variants import COLOURS, VARIANTS, Simulation
from experiments.workloads import gamma_workload
from tests.cli.running import run_cli_here, run_to_json

SEEDS = (1, 2, 3)
OFFLINE = (Lengths(2000, 200), Lengths(600, 40))


@dataclass(frozen=True, kw_only=True)
class Tiny(PolicyStudy):
    """Two rates for three seconds."""

    policies: str = "online-only,slo"
    rates: ClassVar[Sequence[float]] = (2.0, 3.0)
    scenario: ClassVar[str] = "tiny"
    figures: ClassVar[str] = "ttft_p99_s offline_tok_s"

    def scenario_of(self, seed: int) -> Scenario:
        hardware = load_hardware_profile("a100-40g-llama-2-7b")
        points = {
            (("rate", rate),): gamma_workload(rate, 1.0, 3.0, Lengths(500, 20), offline=OFFLINE, seed=seed)
            for rate in self.rates
        }
        return Scenario("Tiny", points, hardware, SLO(1.5, 0.11), 1024, seed)


@dataclass(frozen=True, kw_only=True)
class OneRate(Tiny):
    """One rate, with a paper."""

    rates = (2.0,)
    paper = {"slo": {"ttft_p99_s": 12.345}}  # noqa: RUF012


def test_a_plot_over_time_has_one_axis_and_shows_lone_windows() -> None:
    (point,) = run_study(OneRate(), (TUNING_SEED,))
    figure = Figure()
    OneRate().draw(figure, [point])
    assert {axis.get_xlim() for axis in figure.axes} == {(0.0, point.of_seeds[0].replay.duration_s)}
    for axis in figure.axes[:2]:
        lines = [line for line in axis.lines if line.get_label() in COLOURS]
        assert lines and all(line.get_marker() == "." for line in lines)


APP = App(name="tests")
APP.command(command_of(OneRate, "TESTS_"), name="tiny")


@pytest.fixture(scope="module")
def done() -> list[tuple[int, str]]:
    return []


@pytest.fixture(scope="module")
def points(done: list[tuple[int, str]]) -> list[PolicyPoint]:
    return run_study(Tiny(), SEEDS, on_done=lambda run, _: done.append((run.seed, run.system)))


def metrics(point: PolicyPoint, policy: str = "slo") -> list[PolicyMetrics]:
    """Without what depends on the machine's speed."""
    return [replace(run.metrics, scheduling_time_share=0.0) for run in point.runs[policy]]


def test_nothing_reported_comes_from_the_seed_that_was_tuned_with() -> None:
    assert TUNING_SEED < FIRST_REPORTED_SEED


def test_each_seed_has_a_workload_and_a_noise_of_its_own(
    points: list[PolicyPoint], done: list[tuple[int, str]]
) -> None:
    assert done == [(seed, policy) for seed in SEEDS for _ in range(2) for policy in ("online-only", "slo")]
    runs = points[0].runs["slo"]
    assert [run.scenario.seed for run in runs] == list(SEEDS)
    assert len({run.scenario.points[points[0].setting].online for run in runs}) == len(SEEDS)
    assert len({each.ttft_p50_s for each in metrics(points[0])}) == len(SEEDS)


def test_a_seed_gives_the_same_figures_again(points: list[PolicyPoint]) -> None:
    for again, before in zip(run_study(Tiny(), (2,)), points, strict=True):
        for policy in ("online-only", "slo"):
            assert metrics(again, policy) == [metrics(before, policy)[1]]


def test_figures_are_medians_with_the_least_and_the_most(points: list[PolicyPoint]) -> None:
    values = [each.ttft_p99_s for each in metrics(points[1])]
    spread = points[1].spreads()["slo"]["ttft_p99_s"]
    assert spread == Spread(statistics.median(values), min(values), max(values))
    assert spread.least < spread.most


def test_json_has_medians_and_every_run(points: list[PolicyPoint]) -> None:
    content = json.loads(json.dumps(Tiny().as_json(points)))
    assert content["seeds"] == [run["seed"] for run in content["runs"]] == list(SEEDS)
    for index, point in enumerate(content["points"]):
        for policy in ("online-only", "slo"):
            of_runs = [run["points"][index]["policies"][policy]["offline_tok_s"] for run in content["runs"]]
            assert point["policies"][policy]["offline_tok_s"] == statistics.median(of_runs)
    assert content["policies"] == content["points"][0]["policies"]
    assert content["runs"][0]["points"][0]["policies"]["slo"] == asdict(points[0].runs["slo"][0].metrics)


def test_a_run_says_its_setting_and_its_steps(points: list[PolicyPoint]) -> None:
    outcome = points[0].runs["slo"][0]
    line = Tiny().describe(Run(points[0].setting, "slo", 1, lambda: None), outcome)
    assert line == f"rate 2, seed 1: slo done, {outcome.metrics.num_steps} steps"


@pytest.mark.slow  # a command as test_simulate_goodput_prints_tables_and_ends_with_json
def test_the_command_prints_a_table_beside_the_papers_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "tiny.png"
    printed, content = run_to_json("tiny", "--seeds", "2", "--json", "--plot", str(plot), commands=APP)
    assert content["scenario"] == "tiny"
    assert "points" not in content and content["paper"] == OneRate.paper
    assert "rate 2, 2 seeds: median (least to most)" in printed
    assert "12.345" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_plot_is_written_only_where_it_is_asked_for_and_refused_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_cli_here("tiny", "--policies", "online-only", commands=APP)
    assert done.returncode == 0, done.stderr
    assert "TTFT P99 s" in done.stdout
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = run_cli_here("tiny", "--plot", "a.png", commands=APP)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "--plot needs matplotlib" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be between 1 and 10000, got 0"),
        (["--first-seed", "-1"], "--first-seed must be at least 0, got -1"),
        (["--policies", "lifo"], "--policies: there is no 'lifo'; there are online-only"),
        (["--policies", ","], "--policies names none"),
        (["--plot", "/no/such/folder/x.png"], "there is no folder /no/such/folder"),
        (["--plot", __file__], "test_policy_study.py exists and is no PNG; give another file."),
        (["--plot", "/"], "--plot / exists and is no PNG; give another file."),
        (["--plot", 300 * "x"], "cannot be written: File name too long."),
        (["--seeds", "9999999999"], "--seeds must be between 1 and 10000, got 9999999999"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    refused = run_cli_here("tiny", *arguments, commands=APP)
    assert refused.returncode == 1
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_every_variant_has_a_colour() -> None:
    assert set(COLOURS) == set(VARIANTS)


def test_slo_is_what_the_server_does_without_an_option() -> None:
    made = []

    def create(config: SchedulerConfig, executor: Executor, clock: Clock, profile: CostProfile) -> Engine:
        made.append((config, executor.info))
        return Engine(config, executor, clock, profile)

    hardware = load_hardware_profile("a100-40g-llama-2-7b")
    workload = Workload((Arrival(0.0, Lengths(100, 2)),), 1.0, ())
    Simulation(hardware, "slo", workload, SLO(1.0, 0.15), 2048, TUNING_SEED).replay(create)
    ((config, info),) = made
    server = inspect.signature(serve).parameters["engine"].default.with_checkpointing()
    assert config == replace(server.scheduler, ttft_slo=1.0, tpot_slo=0.15)
    assert config.shares_blocks and config.checkpointing == "adaptive"
    assert info.num_host_blocks == info.num_blocks == hardware.kv_tokens // info.block_size
