from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backfill.core.errors import ConfigError
from backfill.simulation.study import run_study
from experiments.__main__ import app
from experiments.bros.tradeoff import (
    FIGURES,
    POLICIES,
    BrosPoint,
    Setting,
    Tradeoff,
    compare,
    summary,
)
from tests.cli.running import run_cli_here

TINY = Tradeoff(models="opt-13b", workloads="sharegpt", rates="4,1", duration=8.0)


@pytest.fixture(scope="module")
def tiny() -> list[BrosPoint]:
    return run_study(TINY)


def test_an_experiment_has_every_policy_at_every_point(tiny: list[BrosPoint]) -> None:
    assert [point.setting.rate_per_s for point in tiny] == [1.0, 4.0]
    for point in tiny:
        assert tuple(point.policies) == POLICIES
        assert all(tuple(figures) == FIGURES for figures in point.policies.values())
        assert point.is_feasible
        figures = point.policies
        assert figures["online-only"]["offline_rps"] == 0
        assert figures["fcfs"]["offline_rps"] > 1
        latencies = [figures[name]["normalized_latency_s"] for name in ("online-only", "slo", "fcfs")]
        assert latencies == sorted(latencies)
    assert compare(tiny, "slo", "fcfs").latency_reduction > 0.2


def figures(latency_s: float, ttft: float, tpot: float, offline_rps: float) -> dict[str, float]:
    return {
        "normalized_latency_s": latency_s,
        "ttft_attainment": ttft,
        "tpot_attainment": tpot,
        "offline_rps": offline_rps,
        "attainment": ttft,
    }


def test_reductions_are_averaged_and_attainments_are_ratios_of_averages() -> None:
    points = [
        BrosPoint(Setting("opt-13b", "sharegpt", 1.0), {
            "fcfs": figures(0.4, 0.1, 0.5, 10.0), "slo": figures(0.1, 1.0, 1.0, 9.0)}),
        BrosPoint(Setting("opt-30b", "sharegpt", 1.0), {
            "fcfs": figures(0.2, 0.0, 0.3, 0.0), "slo": figures(0.1, 0.6, 0.6, 5.0)}),
    ]  # fmt: skip
    compared = compare(points, "slo", "fcfs")
    assert compared.latency_reduction == pytest.approx((0.75 + 0.5) / 2)
    assert compared.offline_reduction == pytest.approx(0.1)  # only where fcfs has any
    assert compared.ttft_attainment_ratio == pytest.approx(16.0)
    assert compared.tpot_attainment_ratio == pytest.approx(2.0)
    found = summary(points)
    assert found["slo"]["ttft_attainment"] == pytest.approx(0.8)
    assert set(found["slo"]) == {"ttft_attainment", "tpot_attainment", "over fcfs"}
    assert set(found["fcfs"]) == {"ttft_attainment", "tpot_attainment"}


def test_nothing_is_compared_with_nought() -> None:
    nought = BrosPoint(Setting("opt-13b", "sharegpt", 1.0), {
        "fcfs": figures(0.4, 0.0, 0.0, 0.0), "slo": figures(0.1, 1.0, 1.0, 9.0)})  # fmt: skip
    compared = compare([nought], "slo", "fcfs")
    assert compared.offline_reduction is None
    assert compared.ttft_attainment_ratio is None
    assert compared.tpot_attainment_ratio is None


def test_a_load_is_feasible_if_online_requests_alone_meet_their_objectives() -> None:
    setting = Setting("opt-13b", "sharegpt", 1.0)
    for attainment, expected in ((0.95, True), (0.9, True), (0.89, False)):
        point = BrosPoint(setting, {"online-only": figures(0.1, attainment, 1.0, 0.0)})
        assert point.is_feasible is expected
    assert BrosPoint(setting, {"fcfs": figures(0.1, 1.0, 1.0, 0.0)}).is_feasible is None


def test_online_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "XXX,10,3\n" * 10)
    short = replace(TINY, rates="2", policies="online-only", online_lengths=path)
    drawn = run_study(replace(short, online_lengths=None))[0].policies["online-only"]
    read = run_study(short)[0].policies["online-only"]
    assert read["normalized_latency_s"] != drawn["normalized_latency_s"]
    with pytest.raises(ConfigError, match=r"missing\.csv cannot be read"):
        run_study(replace(short, online_lengths=tmp_path / "missing.csv"))


def test_tradeoff_prints_tables_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "bros.png"
    done = run_cli_here(
        "bros", "tradeoff", "--models", "opt-13b", "--workloads", "lmsys", "--rates", "2",
        "--duration", "5", "--json", "--plot", str(plot), commands=app,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    (point,) = content["points"]
    assert point["is_feasible"] is True
    assert set(point["policies"]["slo"]) == set(FIGURES)
    assert content["summary"]["lmsys"]["slo"]["over round-robin"]["latency_reduction"] is not None
    assert content["paper"]["lmsys"]["bros"]["over fcfs"]["latency_reduction"] == 0.6961
    assert "(paper)" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
