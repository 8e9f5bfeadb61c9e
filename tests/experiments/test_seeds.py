from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.scenarios import Scenario
from backfill.simulation.seeds import (
    FIRST_REPORTED_SEED,
    TUNING_SEED,
    SeededResult,
    Spread,
    run_seeds,
    spread_of,
)
from experiments.__main__ import app
from experiments.conserve.figures import Inputs, build_scenario
from tests.cli.running import run_cli_here

POLICIES = ("online-only", "slo")
SEEDS = (1, 2, 3)


def short(seed: int) -> Scenario:
    """The first seconds of two points of figure 7."""
    scenario = build_scenario("conserve-fig7", Inputs(seed=seed))
    points = [
        replace(
            point,
            workload=replace(
                point.workload,
                online=tuple(each for each in point.workload.online if each.at_s < 10.0),
                duration_s=10.0,
            ),
        )
        for point in scenario.points[:2]
    ]
    return replace(scenario, points=tuple(points))


@pytest.fixture(scope="module")
def done() -> list[tuple[int, str]]:
    return []


@pytest.fixture(scope="module")
def result(done: list[tuple[int, str]]) -> SeededResult:
    def on_done(seed: int, _: Mapping[str, float], policy: str, __: PolicyMetrics) -> None:
        done.append((seed, policy))

    return run_seeds(short, SEEDS, POLICIES, on_done)


def test_nothing_reported_comes_from_the_seed_that_was_tuned_with() -> None:
    assert TUNING_SEED < FIRST_REPORTED_SEED
    assert Inputs().seed == TUNING_SEED


def test_each_seed_has_a_workload_and_a_noise_of_its_own(
    result: SeededResult, done: list[tuple[int, str]]
) -> None:
    assert done == [(seed, policy) for seed in SEEDS for _ in range(2) for policy in POLICIES]
    assert {run.scenario.seed for run in result.runs.values()} == set(SEEDS)
    assert len({run.scenario.points[0].workload.online for run in result.runs.values()}) == len(SEEDS)
    assert len({run.points[0].metrics["slo"].ttft_p50_s for run in result.runs.values()}) == len(SEEDS)


def test_a_seed_gives_the_same_figures_again(result: SeededResult) -> None:
    again = run_seeds(short, (2,), POLICIES, lambda *_: None)
    for point, before in zip(again.first.points, result.runs[2].points, strict=True):
        for policy, metrics in point.metrics.items():
            assert replace(metrics, scheduling_time_share=0.0) == replace(
                before.metrics[policy], scheduling_time_share=0.0
            )


def test_figures_are_medians_with_the_least_and_the_most(result: SeededResult) -> None:
    values = [run.points[1].metrics["slo"].ttft_p99_s for run in result.runs.values()]
    spread = result.spreads(1)["slo"]["ttft_p99_s"]
    assert spread == Spread(statistics.median(values), min(values), max(values))
    assert spread.least < spread.most
    assert spread_of([3.0]) == Spread(3.0, 3.0, 3.0)


def test_json_has_medians_and_every_run(result: SeededResult) -> None:
    content = result.as_json()
    assert content["seeds"] == list(SEEDS)
    assert [run["seed"] for run in content["runs"]] == list(SEEDS)
    for index, point in enumerate(content["points"]):
        for policy in POLICIES:
            of_runs = [run["points"][index]["policies"][policy]["offline_tok_s"] for run in content["runs"]]
            assert point["policies"][policy]["offline_tok_s"] == statistics.median(of_runs)
    assert content["policies"] == content["points"][0]["policies"]
    kept = content["runs"][0]["points"][0]["policies"]["slo"]
    assert kept == asdict(result.runs[1].points[0].metrics["slo"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--first-seed", "-1"], "--first-seed must be at least 0, got -1"),
    ],
)
def test_bad_seeds_are_refused(arguments: list[str], message: str) -> None:
    refused = run_cli_here("conserve", "fig6", *arguments, commands=app)
    assert refused.returncode == 1
    assert message in refused.stderr
