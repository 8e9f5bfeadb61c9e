from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.core.request import ServiceClass
from backfill.simulation.plot import save_plot
from backfill.simulation.scenarios import (
    COLOURS,
    VARIANTS,
    Point,
    Scenario,
    run_scenario,
)
from backfill.simulation.workloads import Lengths, conversation_workload, summarization_lengths
from backfill.workloads.arrivals import Phase, reshaped
from experiments.__main__ import app
from experiments.conserve.figures import Inputs, build_scenario, scenario_names
from tests.cli.running import run_cli_here

FIGURE_8_S = 100.0


def shortened(point: Point, duration_s: float) -> Point:
    """The first part of a workload."""
    online = tuple(arrival for arrival in point.workload.online if arrival.at_s < duration_s)
    return replace(point, workload=replace(point.workload, online=online, duration_s=duration_s))


def first_seconds(name: str, inputs: Inputs) -> Scenario:
    scenario = build_scenario(name, inputs)
    return replace(scenario, points=tuple(shortened(point, 20.0) for point in scenario.points))


def test_every_scenario_builds_and_each_request_fits_the_model() -> None:
    for name in scenario_names():
        scenario = build_scenario(name, Inputs())
        most = scenario.hardware.max_model_len
        for point in scenario.points:
            assert len(point.workload.online) > 50
            assert max(sum(arrival.lengths) for arrival in point.workload.online) <= most
            assert max(sum(lengths) for lengths in point.workload.offline) <= most
            instants = [arrival.at_s for arrival in point.workload.online]
            assert instants == sorted(instants)
            assert instants[-1] <= point.workload.duration_s


def test_an_unknown_scenario_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="conserve-fig5, conserve-fig6, conserve-fig7"):
        build_scenario("fig5", Inputs())


def test_a_trace_is_sampled_and_its_burst_is_three_times_the_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0, 1000, 4000))
    rows = "\n".join(f"{t:.4f},{100 + i % 7},{20 + i % 3}" for i, t in enumerate(times))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    phases = [Phase(100, 1.0), Phase(100, 3.0)]
    load = conversation_workload(2.0, phases, trace=path, offline=(Lengths(1, 1),), max_len=4096, seed=0)
    early = sum(arrival.at_s < 100 for arrival in load.online)
    assert len(load.online) == 400
    assert early == pytest.approx(100, rel=0.2)


def test_reshaping_keeps_order_and_leaves_off_phases_empty() -> None:
    instants = np.linspace(0.0, 10.0, 101)
    moved = reshaped(instants, [Phase(10, 1.0), Phase(20, 0.0), Phase(10, 1.0)])
    assert np.all(np.diff(moved) >= 0)
    assert moved[0] == 0.0
    assert moved[-1] == pytest.approx(40.0)
    assert not np.any((moved > 10.0) & (moved < 30.0))


def test_drawn_summaries_have_the_published_means() -> None:
    lengths = summarization_lengths(None, count=4000, max_len=4096, seed=0)
    assert np.mean([each.input_len for each in lengths]) == pytest.approx(2588, rel=0.05)
    assert np.mean([each.output_len for each in lengths]) == pytest.approx(291, rel=0.05)
    assert max(sum(each) for each in lengths) <= 4096


def test_simulate_ends_with_one_json_object_and_writes_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "fig6.png"
    done = run_cli_here(
        "conserve", "fig6", "--policies", "online-only", "--json", "--plot", str(plot), commands=app
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    assert content["scenario"] == "conserve-fig6"
    figures = content["policies"]["online-only"]
    assert figures["ttft_attainment"] == 1.0
    assert {"ttft_p50_s", "itl_p99_s", "total_tok_s", "recomputed_token_share"} <= set(figures)
    assert content["paper"]["slo"]["ttft_p99_s"] == 0.35
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig5", "--policies", "lifo"], "there is no policy 'lifo'"),
        (["fig5", "--policies", ","], "--policies names none"),
        (["fig5", "--online-trace", "missing.csv"], "missing.csv cannot be read"),
        (["fig5", "--plot", "/no/such/folder/x.png"], "there is no folder /no/such/folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    done = run_cli_here("conserve", *arguments, commands=app)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_trace_without_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "10,10\n" * 3000)
    done = run_cli_here("conserve", "fig5", "--online-trace", str(path), commands=app)
    assert done.returncode == 1
    assert "has no arrival times" in done.stderr


@pytest.mark.parametrize(
    ("option", "file"),
    [
        ("--online-trace", "splitwise_conv.csv"),
        ("--offline-lengths", "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"),
    ],
)
def test_a_trace_that_is_missing_says_where_it_is_published(option: str, file: str) -> None:
    done = run_cli_here("conserve", "fig5", option, "missing.csv", commands=app)
    assert done.returncode == 1
    assert f"{option} missing.csv cannot be read" in done.stderr
    assert f"{file} of https://github.com/microsoft/vidur/" in done.stderr


def test_figures_are_printed_without_matplotlib_and_a_plot_asked_for_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("experiments.conserve.figures.build_scenario", first_seconds)
    command = ("conserve", "fig6", "--policies", "online-only")
    done = run_cli_here(*command, commands=app)
    assert done.returncode == 0, done.stderr
    before_the_work = done.stdout.split("online-only done")[0]
    assert (
        "No plot: it needs matplotlib, which is not installed: pip install 'backfill[plot]'."
        in before_the_work
    )
    assert "TTFT P99 s" in done.stdout
    assert not list(tmp_path.iterdir())
    refused = run_cli_here(*command, "--plot", "a.png", commands=app)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "--plot needs matplotlib" in refused.stderr


def test_every_variant_has_a_colour() -> None:
    assert set(COLOURS) == set(VARIANTS)


@pytest.mark.parametrize("name", scenario_names())
def test_no_figure_of_a_scenario_comes_from_the_prefix_cache(name: str) -> None:
    """Under every policy, with the cache on: no prompt token was computed for another request."""
    scenario = build_scenario(name, Inputs())
    duration_s = 6.0 * scenario.hardware.slowness
    short = replace(scenario, points=(shortened(scenario.points[-1], duration_s),))
    (point,) = run_scenario(short, list(VARIANTS), lambda *_: None).points
    assert all(VARIANTS[policy].prefix_caching for policy in point.replays)
    for policy, replay in point.replays.items():
        assert replay.num_prefix_hit_tokens == 0, policy
        for service_class in ServiceClass:
            counters = replay.counters[service_class]
            assert (counters.num_prefix_hit_tokens, counters.num_host_prefix_hit_tokens) == (0, 0), policy
        assert sum(each.num_computed_tokens for each in replay.counters.values()) > 5_000


def test_figure_8_has_an_entry_for_each_step_and_all_on_reaches_the_paper(tmp_path: Path) -> None:
    """On the first part of its ten minutes."""
    scenario = build_scenario("conserve-fig8", Inputs())
    (point,) = scenario.points
    done: list[str] = []
    result = run_scenario(
        replace(scenario, points=(shortened(point, FIGURE_8_S),)),
        scenario.policies,
        lambda _, policy, __: done.append(policy),
    )
    policies = result.as_json()["policies"]
    assert list(policies) == done == ["online-only", "priority", "slo-swap", "slo-checkpoint", "slo"]
    offline = [policies[name]["offline_tok_s"] for name in ("slo-swap", "slo-checkpoint", "slo")]
    assert offline == sorted(offline), "each step adds to the one before"
    assert offline[-1] >= 1.04 * policies["priority"]["offline_tok_s"]
    assert policies["slo"]["ttft_p99_s"] <= (1 - 0.76) * policies["priority"]["ttft_p99_s"]
    assert policies["slo"]["recomputed_token_share"] < 0.01
    save_plot(tmp_path / "fig8.png", result)
    assert (tmp_path / "fig8.png").read_bytes().startswith(b"\x89PNG")
