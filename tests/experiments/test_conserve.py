"""ConServe's figures, and chats beside a batch on slower and slower devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from backfill.core.config import SchedulerConfig
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.scheduling.objectives import server_slo
from backfill.simulation.goodput import Goodput
from backfill.simulation.policy_study import Scenario
from backfill.simulation.replay import Lengths
from backfill.simulation.study import TUNING_SEED, run_study
from backfill.simulation.variants import VARIANTS
from experiments.__main__ import app
from experiments.conserve.figures import (
    STUDIES,
    Fig5,
    Fig6,
    Fig7,
    Fig8,
    Figure,
    Slow1,
    Slow10,
    Slow100,
    conversation_workload,
)
from experiments.phases import Phase
from tests.cli.running import run_cli_here


def shortened(kind: type[Figure], duration_s: float, *, last_point: bool = False) -> type[Figure]:
    """The study on the first part of its workloads."""

    @dataclass(frozen=True, kw_only=True)
    class Short(kind):  # type: ignore[misc, valid-type]
        def scenario_of(self, seed: int) -> Scenario:
            scenario: Scenario = super().scenario_of(seed)
            points = {
                setting: replace(
                    workload,
                    online=tuple(each for each in workload.online if each.at_s < duration_s),
                    duration_s=duration_s,
                )
                for setting, workload in scenario.points.items()
            }
            if last_point:
                points = dict([points.popitem()])
            return replace(scenario, points=points)

    return Short


@pytest.mark.parametrize("kind", STUDIES)
def test_every_scenario_builds_and_each_request_fits_the_model(kind: type[Figure]) -> None:
    scenario = kind().scenario_of(TUNING_SEED)
    most = scenario.hardware.max_model_len
    for workload in scenario.points.values():
        assert len(workload.online) > 50
        assert max(sum(arrival.lengths) for arrival in workload.online) <= most
        assert max(sum(lengths) for lengths in workload.offline) <= most
        instants = [arrival.at_s for arrival in workload.online]
        assert instants == sorted(instants)
        assert instants[-1] <= workload.duration_s


def test_a_trace_is_sampled_and_its_burst_is_three_times_the_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    times = np.sort(np.random.default_rng(0).uniform(0, 1000, 4000))
    rows = "\n".join(f"{t:.4f},{100 + i % 7},{20 + i % 3}" for i, t in enumerate(times))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    phases = [Phase(100, 1.0), Phase(100, 3.0)]
    load = conversation_workload(2.0, phases, trace=path, offline=(Lengths(1, 1),), max_len=4096, seed=0)
    early = sum(arrival.at_s < 100 for arrival in load.online)
    assert len(load.online) == 400
    assert early == pytest.approx(100, rel=0.2)


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


@pytest.mark.parametrize(
    ("kind", "policies"),
    [(Fig5, ",".join(VARIANTS)), *((kind, kind().policies) for kind in (Fig6, Fig7, Fig8, Slow1))],
)
def test_no_figure_of_a_scenario_comes_from_the_prefix_cache(kind: type[Figure], policies: str) -> None:
    """With the cache on: ``Simulation.replay`` asserts that there is no hit."""
    (point,) = run_study(shortened(kind, 6.0, last_point=True)(policies=policies), (TUNING_SEED,))
    for policy, (run,) in point.runs.items():
        assert VARIANTS[policy].prefix_caching
        assert sum(each.num_computed_tokens for each in run.replay.counters.values()) > 5_000


def test_figure_8_has_an_entry_for_each_step_and_all_on_reaches_the_paper() -> None:
    """On the first part of its ten minutes."""
    (point,) = run_study(shortened(Fig8, 80.0)(), (TUNING_SEED,))
    policies = {policy: run.metrics for policy, (run,) in point.runs.items()}
    assert list(policies) == ["online-only", "priority", "slo-swap", "slo-checkpoint", "slo"]
    offline = [policies[name].offline_tok_s for name in ("slo-swap", "slo-checkpoint", "slo")]
    assert offline == sorted(offline), "each step adds to the one before"
    assert offline[-1] >= 1.04 * policies["priority"].offline_tok_s
    assert policies["slo"].ttft_p99_s <= (1 - 0.76) * policies["priority"].ttft_p99_s
    assert policies["slo"].recomputed_token_share < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Slow1, Slow10, Slow100])
def test_the_default_keeps_up_with_no_safepoints(kind: type[Slow1]) -> None:
    """A P99 of 150 chats is the second slowest: it moves by a tenth from seed to seed (docs/coserving.md)."""
    points = run_study(kind())
    assert len(points) == 5
    for point in points:
        default, unstopped = (point.runs[policy][0].metrics for policy in ("slo", "slo-no-safepoints"))
        assert default.ttft_p99_s <= 1.15 * unstopped.ttft_p99_s, point.setting
        assert default.itl_attainment >= min(0.99, unstopped.itl_attainment), point.setting
        assert default.offline_tok_s >= 0.95 * unstopped.offline_tok_s, point.setting
    lightest, alone = (points[0].runs[policy][0].metrics for policy in ("slo", "online-only"))
    assert lightest.ttft_p99_s <= 1.3 * alone.ttft_p99_s
    assert lightest.itl_attainment >= 0.99


def test_a_slower_device_takes_longer_for_everything() -> None:
    fast = load_hardware_profile("a100-40g-llama-2-7b")
    slow = fast.slowed(10)
    assert slow.slowness == 10 and slow.kv_tokens == fast.kv_tokens
    assert slow.costs.cost.rows_s(100) == pytest.approx(10 * fast.costs.cost.rows_s(100))
    assert slow.costs.cost.decode_context_s == pytest.approx(10 * fast.costs.cost.decode_context_s)
    assert slow.costs.copies is not None and fast.costs.copies is not None
    assert slow.costs.copies.to_host_bytes_per_s == pytest.approx(fast.costs.copies.to_host_bytes_per_s / 10)


def test_default_objectives_of_a_slow_device_are_attainable_by_ordinary_prompts() -> None:
    fast, config = load_hardware_profile("a100-40g-llama-2-7b"), SchedulerConfig(policy="slo")
    slow = fast.slowed(100).costs.cost
    assert server_slo(config, slow).ttft_s >= 4 * slow.prefill_time_s(512, 2048)
    assert server_slo(config, fast.costs.cost) == SLO(1.0, 0.15)


@pytest.mark.slow  # the sweep itself is in tests/simulation/test_goodput.py
def test_the_goodput_of_a_slow_device_falls_with_its_speed() -> None:
    sweep = Goodput(
        workloads="conversation", cvs="1", loads="0.5", policies="slo", num_requests=60, num_for_capacity=300
    )
    ((fast, _),), ((slow, beside),) = (run_study(each) for each in (sweep, replace(sweep, slowness=10.0)))
    assert slow.capacity_rps == pytest.approx(fast.capacity_rps / 10, rel=0.05)
    figures = beside.policies["slo"]
    assert figures["attainment"] == 1.0 and figures["itl_attainment"] >= 0.99
