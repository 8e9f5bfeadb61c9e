"""What BROS promises: the trade-off, its KV cache, what deciding costs, and how full the pool is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.costs.hardware import HardwareProfile
from backfill.engine.engine import Engine
from backfill.scheduling.prediction import StepPredictor
from backfill.simulation.replay import Lengths, simulate
from backfill.simulation.study import run_study
from backfill.simulation.variants import VARIANTS
from backfill.simulation.workloads import SHAREGPT
from experiments.__main__ import app
from experiments.bros import cache
from experiments.bros.alone import Alone, comparisons
from experiments.bros.cache import (
    BASELINES,
    BIDIRECTIONAL,
    CACHE_POLICIES,
    LATE,
    PAPER_RATIOS,
    WITHOUT,
    Cache,
    CachePoint,
)
from experiments.bros.engine import LateBros, late_bros, observed_by
from experiments.bros.kv_usage import SAMPLE_S, KVSample, KVUsage
from experiments.bros.overhead import GROUPS, Overhead, OverheadStudy, run_repeatedly
from experiments.bros.tradeoff import (
    FIGURES,
    LMSYS,
    POLICIES,
    BrosPoint,
    Setting,
    Tradeoff,
    compare,
    summary,
)
from experiments.workloads import gamma_workload
from tests.builders import make_profile
from tests.cli.running import assert_fits, run_to_json

TINY = Tradeoff(models="opt-13b", workloads="sharegpt", rates="4,1", duration=8.0)


@pytest.fixture(scope="module")
def tiny() -> list[BrosPoint]:
    return run_study(TINY)


@pytest.mark.slow  # a point of all policies: test_tradeoff_prints_tables_and_ends_with_json
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


@pytest.mark.slow
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
    printed, content = run_to_json(
        "bros", "tradeoff", "--models", "opt-13b", "--workloads", "lmsys", "--rates", "2",
        "--duration", "2", "--json", "--plot", str(plot), commands=app,
    )  # fmt: skip
    (point,) = content["points"]
    assert point["is_feasible"] is True
    assert set(point["policies"]["slo"]) == set(FIGURES)
    assert content["summary"]["lmsys"]["slo"]["over round-robin"]["latency_reduction"] is not None
    assert content["paper"]["lmsys"]["bros"]["over fcfs"]["latency_reduction"] == 0.6961
    assert "(paper)" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # comparisons are made below
def test_alone_has_no_offline_requests_and_ratios_over_fcfs(tmp_path: Path) -> None:
    plot = tmp_path / "alone.png"
    printed, content = run_to_json(
        "bros", "alone", "--models", "opt-13b", "--workloads", "lmsys", "--rates", "40",
        "--duration", "2", "--json", "--plot", str(plot), commands=app,
    )  # fmt: skip
    (point,) = content["points"]
    fcfs, bros = point["policies"]["fcfs"], point["policies"]["bros"]
    reduction = 1 - bros["normalized_latency_s"] / fcfs["normalized_latency_s"]
    assert content["over fcfs"]["bros"]["latency_reduction"] == pytest.approx(reduction)
    assert content["over fcfs"]["slo"]["throughput_ratio"] == pytest.approx(
        point["policies"]["slo"]["online_tok_s"] / fcfs["online_tok_s"]
    )
    assert "bros (paper)" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    alone = Alone(policies="bros", rates="1", duration=1.0)
    simulation = alone.simulation(Setting("opt-13b", "lmsys", 1.0), "bros", LMSYS, 1)
    assert simulation.workload.online and not simulation.workload.offline


@pytest.mark.parametrize(("policies", "rates"), [("bros", "1"), ("fcfs,bros", "0.001")])
def test_alone_without_requests_of_the_baseline_compares_nothing(policies: str, rates: str) -> None:
    study = Alone(models="opt-13b", workloads="lmsys", policies=policies, rates=rates, duration=1.0)
    assert comparisons(run_study(study)) == {}


SHARED = Cache(workloads="lmsys", rates="4", policies="bros", duration=2.0)


def test_ratios_are_over_the_baselines_share_of_requests() -> None:
    point = CachePoint(Setting("opt-30b", "sharegpt", 10.0))
    point.policies[BASELINES[1]] = {"ttft_attainment": 0.4, "tpot_attainment": 0.0}
    point.policies[BIDIRECTIONAL] = {"ttft_attainment": 0.5, "tpot_attainment": 1.0}
    assert point.over(BIDIRECTIONAL, BASELINES[1]) == {"ttft_attainment": pytest.approx(1.25)}
    assert point.over(BASELINES[1], BASELINES[1]) == {}
    assert point.over(BIDIRECTIONAL, "bros-checkpoint") == {}


def test_the_policies_differ_in_the_kv_cache_alone() -> None:
    assert BASELINES == (LATE, WITHOUT)
    configs = {policy: VARIANTS[policy] for policy in CACHE_POLICIES if policy != LATE}
    assert {config.policy for config in configs.values()} == {"bros"}
    assert configs[WITHOUT].checkpointing == "none"
    assert [name for name, each in configs.items() if each.shares_blocks] == [BIDIRECTIONAL]
    assert configs[BIDIRECTIONAL] == SchedulerConfig(policy="bros")
    shipped = EngineConfig(scheduler=configs[BIDIRECTIONAL]).with_checkpointing().scheduler
    assert shipped.checkpointing == "lazy"


@pytest.mark.slow
def test_late_recomputation_has_a_policy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def creating(config: SchedulerConfig, predictor: StepPredictor | None) -> LateBros:
        made.append(late_bros(config, predictor))
        return made[-1]

    monkeypatch.setattr(cache, "late_bros", creating)
    run_study(replace(SHARED, policies=f"{LATE},bros"))
    (policy,) = made
    assert not policy.may_preempt


@pytest.mark.slow  # a command as test_tradeoff_prints_tables_and_ends_with_json
def test_cache_prints_tables_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "cache.png"
    printed, content = run_to_json(
        "bros", "cache", "--workloads", "sharegpt", "--duration", "2", "--rates", "14",
        "--policies", f"{BASELINES[1]},{BIDIRECTIONAL}", "--json", "--plot", str(plot), commands=app,
    )  # fmt: skip
    (point,) = content["points"]
    assert (point["model"], point["rate_per_s"]) == ("opt-30b", 14)
    assert point["policies"][BASELINES[1]]["shared"] == 0
    shared = point["policies"][BIDIRECTIONAL]
    assert set(shared[f"over {BASELINES[1]}"]) == set(PAPER_RATIOS)
    assert_fits(printed)
    assert f"attainments over those of {BASELINES[1]}" in " ".join(printed.split())
    assert "(paper)" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


SHORT = OverheadStudy(models="opt-13b", workloads="sharegpt", rates="4", policies="bros", duration=2.0)


def test_the_share_is_of_decisions_and_steps_together() -> None:
    overhead = Overhead.of(np.array([0.001, 0.003]), np.array([0.010, 0.026]), copy_s=0.009)
    assert overhead.share == pytest.approx(0.1)
    assert overhead.copy_share == pytest.approx(0.25)
    assert [overhead.decision_ms, overhead.step_ms] == pytest.approx([2.0, 18.0])


@pytest.mark.slow
def test_a_step_has_the_median_of_its_decisions() -> None:
    simulation = SHORT.simulation(Setting("opt-13b", "sharegpt", 4.0), "bros", SHAREGPT, 1)
    run = run_repeatedly(simulation, repeats=2)
    assert len(run.decision_s) == len(run.step_s) == len(run.num_running) > 10
    assert (run.decision_s > 0).all()
    assert 1.5 < run.step_s.sum() < 2.5, "steps are those of the device: they fill the trace"
    assert run.copy_s >= 0


def test_steps_are_grouped_by_the_requests_that_hold_blocks() -> None:
    (point,) = run_study(replace(SHORT, repeats=1))
    groups = point.groups["bros"]
    assert set(groups) <= set(GROUPS)
    assert sum(each.num_steps for each in groups.values()) == point.policies["bros"].num_steps


def test_a_trace_without_a_step_is_refused() -> None:
    alone = replace(SHORT, workloads="lmsys", rates="0.001", policies="online-only", duration=1.0)
    with pytest.raises(ConfigError, match="`duration`: no step begins within"):
        run_study(alone)


@pytest.mark.slow  # a command as test_tradeoff_prints_tables_and_ends_with_json
def test_overhead_prints_tables_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "overhead.png"
    printed, content = run_to_json(
        "bros", "overhead", "--models", "opt-13b", "--workloads", "lmsys", "--rates", "4",
        "--duration", "1", "--repeats", "1", "--json", "--plot", str(plot), commands=app,
    )  # fmt: skip
    (point,) = content["points"]
    assert set(point["policies"]) == {"bros", "bros-checkpoint"}
    assert 0 < point["policies"]["bros"]["share"] < 1
    assert content["paper"]["opt-30b"]["share"] == [0.0756, 0.0842]
    assert "9.12% to 9.52%" in printed
    assert_fits(printed)
    assert plot.read_bytes().startswith(b"\x89PNG")


DURATION_S = 6.0
NUM_BLOCKS = 60


class CheckedUsage(KVUsage):
    """Compares each step's sample with the pool's blocks, one by one."""

    __slots__ = ()

    def on_step(self, engine: Engine, began_s: float, ended_s: float) -> None:
        KVUsage.on_step(self, engine, began_s, ended_s)
        kv = engine.scheduler.kv
        sample = KVSample.of(kv)
        assert min(sample.use) >= 0
        assert sum(sample.use) == kv.num_blocks
        assert sample.use.shared == kv.sharing.num_shared
        requests = engine.scheduler.requests
        holders = [*requests.running, *requests.restoring]
        assert sample.num_table_blocks == sum(map(kv.counts.held, holders))


def observe(layout: str, **settings: Any) -> KVUsage:
    """Online and offline requests whose KV does not fit a pool of 60 blocks."""
    workload = gamma_workload(
        8.0, 1.0, DURATION_S, Lengths(60, 60), offline=(Lengths(100, 60), Lengths(90, 90)), seed=3
    )
    hardware = HardwareProfile("test", make_profile(), 16 * NUM_BLOCKS, 1000, max_model_len=400)
    config = SchedulerConfig(policy="slo", kv_layout=layout, **settings)  # type: ignore[arg-type]
    usage = CheckedUsage(DURATION_S)
    simulate(config, workload, hardware, 32 * NUM_BLOCKS, create_engine=observed_by(usage))
    return usage


@pytest.fixture(scope="module")
def both() -> dict[str, KVUsage]:
    return {layout: observe(layout, checkpointing="none") for layout in ("unidirectional", "bidirectional")}


@pytest.mark.slow
def test_a_pool_is_sampled_to_the_end_of_the_trace(both: dict[str, KVUsage]) -> None:
    for usage in both.values():
        assert usage.num_blocks == NUM_BLOCKS
        assert len(usage.samples) == DURATION_S / SAMPLE_S
        figures = usage.figures()
        classes = ("online", "offline", "shared", "preempted", "cached", "empty")
        assert sum(figures[name] for name in classes) == pytest.approx(1.0)
        assert figures["online"] > 0.1
        assert figures["offline"] > 0.1


@pytest.mark.slow
def test_blocks_are_shared_in_one_layout_only(both: dict[str, KVUsage]) -> None:
    alone, shared = (both[layout].figures() for layout in ("unidirectional", "bidirectional"))
    assert alone["shared"] == alone["sharing_steps"] == alone["num_entered_blocks"] == 0
    assert shared["num_entered_blocks"] > 0
    assert 0 < shared["sharing_steps"] < 1
    assert shared["num_copied_slots"] == 0, "what is recomputed is not copied"


def test_a_replay_without_steps_has_figures() -> None:
    assert set(KVUsage(1.0).figures().values()) == {0}
