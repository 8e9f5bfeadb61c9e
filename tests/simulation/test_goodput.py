from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.simulation.goodput import HARDWARE, Goodput, Setting, capacity_rps, completed_per_s
from backfill.simulation.goodput_figures import FIGURES, GoodputPoint, Pair, Panel, PolicySummary, summarize
from backfill.simulation.replay import Arrival, Lengths, Workload
from backfill.simulation.study import run_study
from backfill.simulation.variants import Simulation, figures_of
from tests.cli.running import run_cli_here, run_to_json

TINY = Goodput(
    workloads="code",
    cvs="1",
    loads="1.2,0.5",
    policies="online-only,fcfs,priority,slo",
    num_requests=30,
    num_for_capacity=200,
)
AT_HALF = Setting("code", 1.0, 0.5)


@pytest.fixture(scope="module")
def tiny() -> list[Pair]:
    return run_study(TINY)


@pytest.mark.slow  # a smaller one: test_simulate_goodput_prints_tables_and_ends_with_json
def test_a_sweep_has_every_policy_at_every_point(tiny: list[Pair]) -> None:
    assert [alone.load for alone, _ in tiny] == [0.5, 1.2]
    for pair in tiny:
        assert [point.panel.has_offline for point in pair] == [False, True]
        for point in pair:
            assert tuple(point.policies) == TINY.all_policies
            assert point.capacity_rps == capacity_rps(TINY, "code")
            for policy, figures in point.policies.items():
                assert tuple(figures) == tuple(FIGURES)
                assert 0 <= figures["goodput_rps"] <= 1.001 * point.rate_per_s
                takes_offline = point.panel.has_offline and policy != "online-only"
                assert (figures["offline_tok_s"] > 0) == takes_offline


@pytest.mark.slow
def test_online_only_is_the_same_with_offline_requests_and_the_others_are_not(tiny: list[Pair]) -> None:
    for alone, beside in tiny:
        assert alone.policies["online-only"] == beside.policies["online-only"]
        assert alone.policies["priority"] != beside.policies["priority"]
    light = tiny[0][1].policies
    assert light["slo"]["goodput_rps"] > light["priority"]["goodput_rps"]
    assert light["fcfs"]["goodput_rps"] == 0


def test_runs_left_out_would_be_those_of_online_only() -> None:
    """Without offline requests policies that serve in order of arrival do the same."""
    figures = [
        replace(
            figures_of(TINY.simulation(Setting("code", 1.0, 1.2), policy, False, 6.0, 1)),
            scheduling_time_share=0.0,
        )
        for policy in ("online-only", "fcfs", "round-robin")
    ]
    assert figures[0] == figures[1] == figures[2]


@pytest.mark.slow
def test_figures_do_not_depend_on_the_number_of_processes(tiny: list[Pair]) -> None:
    few = replace(TINY, loads="0.5", policies="online-only,slo")
    ((alone, beside),) = run_study(few, num_processes=2)
    for found, point in zip((alone, beside), tiny[0], strict=True):
        assert found == point._replace(policies={name: point.policies[name] for name in found.policies})


@pytest.mark.slow  # of other studies: test_policy_study.py
def test_figures_are_means_over_the_seeds() -> None:
    one = replace(TINY, loads="0.5", policies="online-only", num_requests=20, num_for_capacity=100)
    ((_, point),) = run_study(one, (1, 2))
    metrics = [
        figures_of(one.simulation(AT_HALF, "online-only", False, point.capacity_rps, seed)) for seed in (1, 2)
    ]
    assert metrics[0].ttft_p99_s != metrics[1].ttft_p99_s
    mean = (metrics[0].ttft_p99_s + metrics[1].ttft_p99_s) / 2
    assert point.policies["online-only"]["ttft_p99_s"] == pytest.approx(mean)


def test_requests_of_a_seed_are_the_same_at_every_load() -> None:
    low, high = (
        TINY.simulation(Setting("code", 4.0, load), "slo", True, 5.0, 1).workload for load in (0.5, 1.0)
    )
    assert [arrival.lengths for arrival in low.online] == [arrival.lengths for arrival in high.online]
    assert [each.at_s for each in low.online] == pytest.approx([2 * each.at_s for each in high.online])
    assert low.duration_s == 2 * high.duration_s == 30 / 2.5


def capacity(*lengths: Lengths) -> float:
    workload = Workload(tuple(Arrival(0.0, each) for each in lengths), 1.0, ())
    hardware = load_hardware_profile(HARDWARE)
    return completed_per_s(Simulation(hardware, "fcfs", workload, SLO(1.0, 0.1), 1024, 0))


def test_capacity_is_that_of_the_device() -> None:
    short = capacity(*[Lengths(1000, 2)] * 100)
    # 1,024 tokens take 71 ms, so the device computes about 14 prompts of 1,000 tokens a second.
    assert short == pytest.approx(13.7, rel=0.07)


@pytest.mark.slow
def test_capacity_is_what_is_completed_while_others_wait() -> None:
    """Equal requests, half of them long: at the end the long ones run alone, which does not count."""
    once, twice = (capacity(*[Lengths(400, 100), Lengths(200, 20)] * number) for number in (300, 600))
    assert once == pytest.approx(twice, rel=0.05)


def test_too_few_requests_have_no_capacity() -> None:
    with pytest.raises(ConfigError, match="too few to measure a capacity"):
        capacity_rps(replace(TINY, num_for_capacity=1), "code")


def point(load: float, panel: str = "code", **policies: tuple[float, float]) -> GoodputPoint:
    """Goodput and offline requests that ended per second, by policy."""
    figures = {
        policy.replace("_", "-"): {"goodput_rps": goodput, "offline_rps": offline}
        for policy, (goodput, offline) in policies.items()
    }
    return GoodputPoint(Panel(panel, 1.0, has_offline=True), load, 1.0, figures)


POINTS = [
    point(0.5, online_only=(4.0, 0.0), bros=(3.97, 50.0), priority=(2.0, 100.0), slo=(4.0, 45.0)),
    point(0.7, online_only=(6.0, 0.0), priority=(5.4, 50.0), slo=(5.1, 40.0)),
    point(1.0, online_only=(5.0, 0.0), priority=(1.0, 10.0), slo=(6.0, 1.0)),
    point(1.5, online_only=(0.0, 0.0), priority=(0.0, 10.0), slo=(3.0, 1.0)),
    point(1.0, "document", online_only=(1.0, 0.0), priority=(1.0, 0.0), slo=(0.9, 0.0)),
    point(1.5, "document", online_only=(0.8, 0.0), priority=(0.9, 0.0), slo=(0.9, 0.0)),
]


@pytest.mark.parametrize(
    ("policy", "points", "expected"),
    [
        ("slo", POINTS, (5.1 / 6.0, 0.9, 45.0 / 50.0, 3.0 / 6.0)),
        ("priority", POINTS, (1.0 / 5.0, 0.0, 100.0 / 50.0, 0.0)),
        ("slo", [point(0.5, slo=(0.0, 5.0))], (None, None, 1.0, None)),
        ("slo", [point(0.8, slo=(2.0, 5.0))], (None, 1.0, None, None)),
    ],
)
def test_a_summary_has_the_worst_ratios_and_the_stability(
    policy: str, points: list[GoodputPoint], expected: tuple[float | None, ...]
) -> None:
    assert summarize(policy, points) == PolicySummary(*map(pytest.approx, expected))


def test_simulate_goodput_prints_tables_and_ends_with_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backfill.simulation.goodput.capacity_rps", lambda *_: 12.5)
    plot = tmp_path / "goodput.png"
    printed, content = run_to_json(
        "simulate", "goodput", "--workloads", "code", "--loads", "0.5", "--cvs", "1", "--num-requests",
        "20", "--policies", "online-only,priority", "--jobs", "1", "--json", "--plot", str(plot),
    )  # fmt: skip
    assert content["workloads"]["code"]["capacity_rps"] == 12.5
    assert [each["has_offline"] for each in content["points"]] == [False, True]
    assert set(content["points"][0]["policies"]["priority"]) == set(FIGURES)
    assert content["summary"]["with_offline"]["online-only"]["over_online_only"] == 1.0
    for heading in ("goodput", "Summary, with an offline flood", "capacity of code"):
        assert heading in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loads", "0.5,x"], "--loads must be numbers separated by commas, got '0.5,x'"),
        (["--loads", "0"], "--loads must be between 0.001 and 1000000, got 0"),
        (["--cvs", "inf"], "--cvs must be finite and between 0.001 and 1000000, got inf"),
        (["--workloads", "sharegpt"], "no 'sharegpt'; there are conversation, code, document"),
        (["--workloads", ","], "--workloads names none; there are conversation"),
        (["--num-requests", "0"], "--num-requests must be between 1 and 10000000, got 0"),
        (["--policies", "lifo"], "--policies: there is no 'lifo'; there are online-only"),
        (["--jobs", "0"], "--jobs must be between 1 and 64, got 0"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    done = run_cli_here("simulate", "goodput", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
