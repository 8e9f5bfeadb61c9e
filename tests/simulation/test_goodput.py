from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.simulation.goodput import (
    FIGURES,
    LOADS,
    POLICIES,
    GoodputPoint,
    GoodputResult,
    GoodputSweep,
    Panel,
    PolicySummary,
    Setting,
    capacity_per_s,
    capacity_simulation,
    point_simulation,
    run_goodput,
    summarize,
)
from backfill.simulation.replay import Arrival, Lengths, Workload
from backfill.simulation.scenarios import VARIANTS
from backfill.simulation.sweep import Simulation, figures_of
from backfill.simulation.sweep_plot import save_goodput_plot
from tests.cli.running import run_cli, run_cli_here

TINY = GoodputSweep(
    workloads=("code",),
    cvs=(1.0,),
    loads=(1.2, 0.5),
    policies=("online-only", "fcfs", "priority", "slo"),
    num_requests=60,
    num_for_capacity=400,
)


@pytest.fixture(scope="module")
def tiny() -> GoodputResult:
    return run_goodput(TINY)


def test_a_sweep_has_every_policy_at_every_point(tiny: GoodputResult) -> None:
    assert [point.setting.load for point in tiny.points] == [0.5, 1.2, 0.5, 1.2]
    assert [point.setting.panel.has_offline for point in tiny.points] == [False, False, True, True]
    for point in tiny.points:
        assert tuple(point.policies) == TINY.policies
        assert point.rate_per_s == pytest.approx(point.setting.load * tiny.capacities["code"])
        for policy, figures in point.policies.items():
            assert tuple(figures) == FIGURES
            assert 0 <= figures["goodput_rps"] <= 1.001 * point.rate_per_s
            takes_offline = point.setting.panel.has_offline and policy != "online-only"
            assert (figures["offline_tok_s"] > 0) == takes_offline


def test_online_only_is_the_same_with_offline_requests_and_the_others_are_not(tiny: GoodputResult) -> None:
    alone, beside = tiny.panels().values()
    for one, other in zip(alone, beside, strict=True):
        assert one.policies["online-only"] == other.policies["online-only"]
        assert one.policies["priority"] != other.policies["priority"]
    light = beside[0].policies
    assert light["slo"]["goodput_rps"] > light["priority"]["goodput_rps"]
    assert light["fcfs"]["goodput_rps"] == 0


def test_runs_left_out_would_be_those_of_online_only() -> None:
    """Without offline requests policies that serve in order of arrival do the same."""
    setting = Setting(Panel("code", 1.0, has_offline=False), 1.2)
    figures = []
    for policy in ("online-only", "fcfs", "round-robin"):
        metrics = figures_of(point_simulation(TINY, setting, policy, 6.0, 1))
        figures.append(replace(metrics, scheduling_time_share=0.0))
    assert figures[0] == figures[1] == figures[2]


def test_figures_do_not_depend_on_the_number_of_processes(tiny: GoodputResult) -> None:
    assert run_goodput(TINY, num_processes=2).points == tiny.points


def test_figures_are_means_over_the_seeds_from_1(tiny: GoodputResult) -> None:
    one = replace(TINY, loads=(0.5,), policies=("online-only",))
    capacity = tiny.capacities["code"]
    setting = one.settings()[0]
    metrics = [figures_of(point_simulation(one, setting, "online-only", capacity, seed)) for seed in (1, 2)]
    assert metrics[0].ttft_p99_s != metrics[1].ttft_p99_s
    (point, _) = run_goodput(replace(one, num_seeds=2)).points
    mean = (metrics[0].ttft_p99_s + metrics[1].ttft_p99_s) / 2
    assert point.policies["online-only"]["ttft_p99_s"] == pytest.approx(mean)


def test_requests_of_a_seed_are_the_same_at_every_load() -> None:
    low, high = (
        point_simulation(TINY, Setting(Panel("code", 4.0, True), load), "slo", 5.0, 1).workload
        for load in (0.5, 1.0)
    )
    assert [arrival.lengths for arrival in low.online] == [arrival.lengths for arrival in high.online]
    assert [each.at_s for each in low.online] == pytest.approx([2 * each.at_s for each in high.online])
    assert low.duration_s == 2 * high.duration_s == 60 / 2.5


def test_capacity_is_what_is_completed_while_others_wait() -> None:
    """Equal requests, half of them long: at the end the long ones run alone, which does not count."""
    slo = SLO(1.0, 0.1)

    def capacity(*lengths: Lengths) -> float:
        arrivals = tuple(Arrival(0.0, each) for each in lengths)
        return capacity_per_s(
            Simulation("a100-40g-llama-2-7b", "fcfs", Workload(arrivals, 1.0, ()), slo, 1024, 0)
        )

    short = capacity(*[Lengths(1000, 2)] * 200)
    # 1,024 tokens take 71 ms, so the device computes about 14 prompts of 1,000 tokens a second.
    assert short == pytest.approx(13.7, rel=0.07)
    once, twice = (capacity(*[Lengths(400, 100), Lengths(200, 20)] * number) for number in (300, 600))
    assert once == pytest.approx(twice, rel=0.05)


def test_too_few_requests_have_no_capacity() -> None:
    few = replace(TINY, num_for_capacity=1)
    with pytest.raises(ConfigError, match="too few to measure a capacity"):
        capacity_per_s(capacity_simulation(few, "code"))


def point(load: float, panel: str = "code", **policies: tuple[float, float]) -> GoodputPoint:
    """Goodput and offline tokens per second by policy."""
    figures = {
        policy.replace("_", "-"): {"goodput_rps": goodput, "offline_tok_s": offline}
        for policy, (goodput, offline) in policies.items()
    }
    return GoodputPoint(Setting(Panel(panel, 1.0, has_offline=True), load), load, figures)


POINTS = [
    point(0.5, online_only=(4.0, 0.0), priority=(2.0, 100.0), slo=(3.0, 110.0)),
    point(0.7, online_only=(6.0, 0.0), priority=(5.4, 50.0), slo=(5.1, 40.0)),
    point(1.0, online_only=(5.0, 0.0), priority=(1.0, 10.0), slo=(6.0, 1.0)),
    point(1.5, online_only=(0.0, 0.0), priority=(0.0, 10.0), slo=(3.0, 1.0)),
    point(1.0, "document", online_only=(1.0, 0.0), priority=(1.0, 0.0), slo=(0.9, 0.0)),
    point(1.5, "document", online_only=(0.8, 0.0), priority=(0.9, 0.0), slo=(0.9, 0.0)),
]


def test_a_summary_has_the_worst_ratios_and_the_stability() -> None:
    slo, priority = summarize("slo", POINTS), summarize("priority", POINTS)
    assert slo == PolicySummary(
        over_online_only=pytest.approx(3.0 / 4.0),
        over_best=pytest.approx(0.9),
        offline_over_priority=pytest.approx((1.1 + 0.8) / 2),
        stability=pytest.approx(3.0 / 6.0),
    )
    assert priority == PolicySummary(
        over_online_only=pytest.approx(1.0 / 5.0),
        over_best=pytest.approx(0.0),
        offline_over_priority=pytest.approx(1.0),
        stability=pytest.approx(0.0),
    )


def test_a_summary_without_what_it_compares_with_is_empty() -> None:
    only = [point(0.5, slo=(0.0, 5.0))]
    assert summarize("slo", only) == PolicySummary(None, None, None, None)
    light = [point(0.5, slo=(2.0, 5.0))]
    assert summarize("slo", light) == PolicySummary(None, 1.0, None, None)


def test_the_plot_has_a_row_for_each_workload_and_cv(tiny: GoodputResult, tmp_path: Path) -> None:
    save_goodput_plot(tmp_path / "goodput.png", tiny)
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_goodput_plot(tmp_path, tiny)


def test_by_default_all_is_run() -> None:
    sweep = GoodputSweep()
    assert len(sweep.settings()) == 3 * 2 * 2 * len(LOADS)
    assert sweep.num_requests >= 1000
    assert set(POLICIES) <= set(VARIANTS)
    assert {"online-only", "priority", "slo"} <= set(POLICIES)


def test_simulate_goodput_prints_tables_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "goodput.png"
    done = run_cli(
        "simulate", "goodput", "--workloads", "code", "--loads", "0.5", "--cvs", "1", "--num-requests",
        "20", "--policies", "online-only,priority", "--jobs", "2", "--json", "--plot", str(plot),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    assert content["workloads"]["code"]["capacity_rps"] > 1
    assert [each["has_offline"] for each in content["points"]] == [False, True]
    assert set(content["points"][0]["policies"]["priority"]) == set(FIGURES)
    assert content["summary"]["with_offline"]["online-only"]["over_online_only"] == 1.0
    for heading in ("goodput", "Summary, with an offline flood", "capacity of code"):
        assert heading in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["goodput", "--loads", "0.5,x"], "--loads must be numbers separated by commas, got '0.5,x'"),
        (["goodput", "--loads", "0"], "--loads must be above 0, got 0"),
        (["goodput", "--cvs", "inf"], "--cvs must be finite, got inf"),
        (["goodput", "--workloads", "sharegpt"], "no 'sharegpt'; there are conversation, code, document"),
        (["goodput", "--workloads", ","], "--workloads names none; there are conversation"),
        (["goodput", "--num-requests", "0"], "--num-requests must be above 0, got 0"),
        (["goodput", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["goodput", "--policies", "lifo"], "--policies: there is no 'lifo'; there are online-only"),
        (["goodput", "--plot", "/no/such/folder/x.png"], "there is no folder /no/such/folder"),
        (["goodput", "--jobs", "0"], "--jobs must be 1 to 64, got 0"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    done = run_cli_here("simulate", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
