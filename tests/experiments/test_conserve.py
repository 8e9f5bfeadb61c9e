"""ConServe's figures, and chats beside a batch on slower and slower devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.scheduling.objectives import server_slo
from backfill.simulation.goodput import Goodput
from backfill.simulation.policy_study import Scenario
from backfill.simulation.replay import Lengths
from backfill.simulation.study import TUNING_SEED, run_study
from backfill.simulation.variants import VARIANTS
from backfill.workloads.arrivals import gamma_arrivals
from experiments.__main__ import app
from experiments.conserve import figures
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
from experiments.phases import Phase, phased_arrivals, reshaped
from tests.cli.running import run_cli_here
from tests.workloads.test_traces import gap_cv, rng

# Of each study, and on the workload of figure 5 of all others.
POLICIES: dict[type[Figure], list[str]] = {
    kind: kind().policies.split(",") for kind in (Fig6, Fig7, Fig8, Slow1)
}
POLICIES[Fig5] = [name for name in VARIANTS if not any(name in names for names in POLICIES.values())]


def shortened(kind: type[Figure], duration_s: float = math.inf, points: slice = slice(None)) -> type[Figure]:
    """The study on the first part of its workloads, at some of its points."""

    @dataclass(frozen=True, kw_only=True)
    class Short(kind):  # type: ignore[misc, valid-type]
        def scenario_of(self, seed: int) -> Scenario:
            scenario: Scenario = super().scenario_of(seed)
            workloads = {
                setting: replace(
                    workload,
                    online=tuple(each for each in workload.online if each.at_s < duration_s),
                    duration_s=min(duration_s, workload.duration_s),
                )
                for setting, workload in list(scenario.points.items())[points]
            }
            return replace(scenario, points=workloads)

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_no_figure_of_a_scenario_comes_from_the_prefix_cache(kind: type[Figure]) -> None:
    """With the cache on: ``Simulation.replay`` asserts that there is no hit."""
    short = shortened(kind, 3.0, slice(-1, None))
    (point,) = run_study(short(policies=",".join(POLICIES[kind])), (TUNING_SEED,))
    for policy, (run,) in point.runs.items():
        assert VARIANTS[policy].prefix_caching
        assert sum(each.num_computed_tokens for each in run.replay.counters.values()) > 5_000


@pytest.mark.slow
def test_figure_8_has_an_entry_for_each_step_and_all_on_reaches_the_paper() -> None:
    """On the first part of its ten minutes."""
    (point,) = run_study(shortened(Fig8, 60.0)(), (TUNING_SEED,))
    policies = {policy: run.metrics for policy, (run,) in point.runs.items()}
    assert list(policies) == ["online-only", "priority", "slo-swap", "slo-checkpoint", "slo"]
    offline = [policies[name].offline_tok_s for name in ("slo-swap", "slo-checkpoint", "slo")]
    assert offline == sorted(offline), "each step adds to the one before"
    assert offline[-1] >= 1.04 * policies["priority"].offline_tok_s
    assert policies["slo"].ttft_p99_s <= (1 - 0.76) * policies["priority"].ttft_p99_s
    assert policies["slo"].recomputed_token_share < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Slow10, Slow100])
def test_the_default_keeps_up_with_no_safepoints(kind: type[Slow1], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the lightest load and the heaviest.

    A P99 of 75 chats is the slowest: it moves by up to a fifth from seed to seed (docs/coserving.md).
    """
    monkeypatch.setattr(figures, "_NUM_CHATS", 75)
    points = run_study(shortened(kind, points=slice(None, None, 4))())
    assert len(points) == 2
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
    assert slow.kv_tokens == fast.kv_tokens
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
        workloads="conversation", cvs="1", loads="0.5", policies="slo", num_requests=30, num_for_capacity=100
    )
    ((fast, _),), ((slow, beside),) = (run_study(each) for each in (sweep, replace(sweep, slowness=10.0)))
    assert slow.capacity_rps == pytest.approx(fast.capacity_rps / 10, rel=0.05)
    slo = beside.policies["slo"]
    assert slo["attainment"] == 1.0 and slo["itl_attainment"] >= 0.99


def test_phases_have_their_rates_and_off_phases_nothing() -> None:
    instants = phased_arrivals(20_000, [Phase(10, 8), Phase(20, 0), Phase(5, 2)], 1.0, rng())
    assert np.all(np.diff(instants) >= 0)
    in_cycle = instants % 35
    num_cycles = instants[-1] / 35
    assert np.sum(in_cycle < 10) / num_cycles / 10 == pytest.approx(8, rel=0.02)
    assert np.sum((in_cycle > 10 + 1e-6) & (in_cycle < 30 - 1e-6)) == 0
    assert np.sum(in_cycle >= 30) / num_cycles / 5 == pytest.approx(2, rel=0.05)


def test_constant_phases_are_exact() -> None:
    instants = phased_arrivals(6, [Phase(1, 2), Phase(3, 0)], math.inf, rng())
    assert instants == pytest.approx([0.5, 1.0, 4.5, 5.0, 8.5, 9.0])


phases_with_a_rate = st.lists(
    st.builds(Phase, st.integers(1, 600).map(float), st.one_of(st.just(0.0), st.integers(1, 50).map(float))),
    min_size=1,
    max_size=6,
).filter(lambda phases: any(phase.rate_per_s > 0 for phase in phases))


def edges(phases: list[Phase]) -> list[tuple[Phase, float, float]]:
    """Each phase with its begin and its end."""
    ends = np.cumsum([phase.duration_s for phase in phases])
    return [(phase, end - phase.duration_s, end) for phase, end in zip(phases, ends, strict=True)]


def end_of_arrivals(phases: list[Phase]) -> float:
    return max(end for phase, _, end in edges(phases) if phase.rate_per_s > 0)


@given(
    st.lists(st.integers(0, 10**6), min_size=2, max_size=60).filter(lambda each: min(each) < max(each)),
    phases_with_a_rate,
)
@example([0, 1, 2, 3, 4], [Phase(2, 0), Phase(2, 1), Phase(3, 0), Phase(2, 1), Phase(1, 0)])
def test_reshaping_keeps_order_and_ends_with_the_phases(at_ms: list[int], phases: list[Phase]) -> None:
    instants = np.sort(np.array(at_ms) / 1000)
    moved = reshaped(instants, phases)
    assert len(moved) == len(instants)
    assert np.all(np.diff(moved) >= -1e-9)
    assert moved[-1] == pytest.approx(end_of_arrivals(phases))
    assert moved[0] == pytest.approx(next(begin for phase, begin, _ in edges(phases) if phase.rate_per_s > 0))
    for phase, begin, end in edges(phases):
        if phase.rate_per_s == 0:
            assert not np.any((moved > begin + 1e-6) & (moved < end - 1e-6))


@given(phases_with_a_rate)
def test_reshaped_even_arrivals_fall_into_phases_by_their_work(phases: list[Phase]) -> None:
    moved = reshaped(np.linspace(100.0, 200.0, 10_001), phases)
    total = sum(phase.duration_s * phase.rate_per_s for phase in phases)
    for phase, begin, end in edges(phases):
        share = np.mean((moved > begin + 1e-6) & (moved < end - 1e-6))
        assert share == pytest.approx(phase.duration_s * phase.rate_per_s / total, abs=0.001)


def test_reshaping_to_one_phase_only_stretches_and_only_ratios_of_rates_count() -> None:
    instants = gamma_arrivals(500, 3.0, 0.5, rng())
    assert gap_cv(reshaped(instants, [Phase(60, 2)])) == pytest.approx(gap_cv(instants))
    low, high = (reshaped(instants, [Phase(10, 1 * times), Phase(30, 4 * times)]) for times in (1, 7))
    assert low == pytest.approx(high)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: phased_arrivals(1, [Phase(0, 1)], 1.0, rng()), "`phases`: every phase"),
        (lambda: phased_arrivals(1, [Phase(1, -1)], 1.0, rng()), "`phases`: every phase"),
        (lambda: phased_arrivals(1, [Phase(1, 0)], 1.0, rng()), "a rate above 0"),
        (lambda: reshaped(np.arange(3.0), []), "a rate above 0"),
        (lambda: reshaped(np.arange(3.0), [Phase(5, 0)]), "a rate above 0"),
        (lambda: reshaped(np.arange(3.0), [Phase(5, 1), Phase(0, 1)]), "`phases`: every phase"),
        (lambda: reshaped(np.arange(3.0), [Phase(5, math.inf)]), "`phases`: every phase"),
        (lambda: reshaped(np.full(3, 7.0), [Phase(5, 1)]), "one instant"),
        (lambda: reshaped(np.array([7.0]), [Phase(5, 1)]), "one instant"),
    ],
)
def test_phases_out_of_range_are_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=message):
        call()
