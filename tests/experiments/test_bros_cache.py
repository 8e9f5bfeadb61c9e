from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.scheduling.policies.bros import BrosPolicy
from backfill.scheduling.policy import Policy
from backfill.scheduling.prediction import StepPredictor
from backfill.simulation.study import run_study
from backfill.simulation.variants import OWN_POLICIES, VARIANTS
from experiments.__main__ import app
from experiments.bros.cache import (
    BASELINES,
    BIDIRECTIONAL,
    CACHE_POLICIES,
    PAPER_RATIOS,
    Cache,
    CachePoint,
)
from experiments.bros.tradeoff import Setting
from tests.cli.running import assert_fits, run_cli_here

TINY = Cache(workloads="lmsys", rates="4", policies="bros", duration=2.0)


def test_ratios_are_over_the_baselines_share_of_requests() -> None:
    point = CachePoint(Setting("opt-30b", "sharegpt", 10.0))
    point.policies[BASELINES[1]] = {"ttft_attainment": 0.4, "tpot_attainment": 0.0}
    point.policies[BIDIRECTIONAL] = {"ttft_attainment": 0.5, "tpot_attainment": 1.0}
    assert point.over(BIDIRECTIONAL, BASELINES[1]) == {"ttft_attainment": pytest.approx(1.25)}
    assert point.over(BASELINES[1], BASELINES[1]) == {}
    assert point.over(BIDIRECTIONAL, "bros-checkpoint") == {}


def test_the_policies_differ_in_the_kv_cache_alone() -> None:
    late, without = BASELINES
    assert VARIANTS[late] == VARIANTS[without]
    assert OWN_POLICIES.keys() == {late}
    configs = {policy: VARIANTS[policy] for policy in CACHE_POLICIES}
    assert {config.policy for config in configs.values()} == {"bros"}
    assert configs[without].checkpointing == "none"
    assert [name for name, each in configs.items() if each.shares_blocks] == [BIDIRECTIONAL]
    shipped = EngineConfig(scheduler=SchedulerConfig(policy="bros")).with_checkpointing().scheduler
    assert configs[BIDIRECTIONAL].checkpointing == shipped.checkpointing == "lazy"
    assert shipped.shares_blocks


def test_a_variant_with_a_policy_of_its_own_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    late, made = BASELINES[0], list[Policy]()
    create = OWN_POLICIES[late]

    def creating(config: SchedulerConfig, predictor: StepPredictor | None) -> Policy:
        made.append(create(config, predictor))
        return made[-1]

    monkeypatch.setitem(OWN_POLICIES, late, creating)
    run_study(replace(TINY, policies=f"{late},bros"))
    (policy,) = made
    assert isinstance(policy, BrosPolicy)
    assert not policy._may_preempt


def test_cache_prints_tables_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "cache.png"
    done = run_cli_here(
        "bros", "cache", "--workloads", "sharegpt", "--duration", "8", "--rates", "14",
        "--policies", f"{BASELINES[1]},{BIDIRECTIONAL}", "--json", "--plot", str(plot), commands=app,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    (point,) = content["points"]
    assert (point["model"], point["rate_per_s"]) == ("opt-30b", 14)
    assert point["policies"][BASELINES[1]]["shared"] == 0
    shared = point["policies"][BIDIRECTIONAL]
    assert set(shared[f"over {BASELINES[1]}"]) == set(PAPER_RATIOS)
    assert_fits(done.stdout)
    assert f"attainments over those of {BASELINES[1]}" in " ".join(done.stdout.split())
    assert "(paper)" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
