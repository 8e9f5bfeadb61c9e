"""Devices, workloads, metrics and tables of simulations."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from backfill.core.counters import ClassCounters
from backfill.core.errors import ConfigError
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.costs.behaviour import StepNoise
from backfill.costs.hardware import HardwareProfile, load_hardware_profile
from backfill.costs.load import StepLoad
from backfill.costs.profile import FitError
from backfill.costs.profiler import FULL
from backfill.simulation.device import exact_behaviour, measured_profile, typical_behaviour
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.replay import OnlineRecord, ReplayResult
from backfill.simulation.tables import print_figures
from backfill.simulation.workloads import (
    CODE,
    DOCUMENT,
    SHAREGPT,
    SUMMARIES,
    DrawnLengths,
    TraceLengths,
)
from experiments.bros.tradeoff import BROS_OFFLINE, LMSYS
from tests.builders import make_profile
from tests.test_docs import ROOT

A100 = load_hardware_profile("a100-40g-llama-2-7b")
LINEAR = HardwareProfile("linear", make_profile(), 60_000, 1000, max_model_len=4000)
LOADS = [
    StepLoad.of([(0, 300, True)]),
    StepLoad.of([(700, 1, True)] * 20),
    StepLoad.of([*([(500, 1, True)] * 10), (600, 200, False)]),
]


def test_without_noise_a_device_with_no_tiles_is_measured_as_it_is() -> None:
    profile = measured_profile(LINEAR, exact_behaviour(LINEAR.costs), 0)
    for load in LOADS:
        truth = LINEAR.costs.cost.step_time_s(load)
        assert profile.cost.step_time_s(load) == pytest.approx(truth, rel=0.02)
    assert profile.error.p95 < 0.03
    assert profile.quality == "full"
    assert profile.copies is not None and LINEAR.costs.copies is not None
    assert profile.copies.to_host_bytes_per_s == pytest.approx(LINEAR.costs.copies.to_host_bytes_per_s)
    assert profile.copies.to_device_bytes_per_s == pytest.approx(LINEAR.costs.copies.to_device_bytes_per_s)


def test_noise_makes_the_measured_profile_differ_and_more_noise_makes_its_error_larger() -> None:
    errors = []
    for spread in (0.02, 0.3):
        noise = StepNoise.of_error(FitError(spread / 3, spread, 100))
        behaviour = replace(exact_behaviour(LINEAR.costs), noise=noise)
        errors.append(measured_profile(LINEAR, behaviour, 0).error.p95)
    assert errors[0] < errors[1]


def test_an_engine_knows_the_tiles_of_a_device_only_as_far_as_the_profiler_finds_them() -> None:
    behaviour = typical_behaviour(A100.costs)
    measured = measured_profile(A100, behaviour, 0)
    known, true = (set(cost.efficient_step_sizes(0.8, 1024)) for cost in (measured.cost, behaviour.cost))
    assert known <= {*FULL.row_knots, 1024}
    assert true - known
    assert measured.error.p95 > A100.costs.error.p95  # the profiler's knots miss the device's jumps


def test_a_profile_is_measured_once_for_each_seed() -> None:
    behaviour = typical_behaviour(A100.costs)
    assert measured_profile(A100, behaviour, 0) is measured_profile(A100, behaviour, 0)
    assert measured_profile(A100, behaviour, 0).cost != measured_profile(A100, behaviour, 1).cost


def test_typical_behaviour_has_the_held_out_error_as_noise_and_takes_host_time() -> None:
    behaviour = typical_behaviour(A100.costs)
    assert behaviour.noise == StepNoise.of_error(A100.costs.error)
    assert 0 < behaviour.host_s < 0.002
    assert exact_behaviour(A100.costs).noise == StepNoise()


@pytest.mark.slow
def test_the_document_has_the_host_time_and_what_is_known_of_the_tiles() -> None:
    text = (ROOT / "docs" / "simulation.md").read_text()
    behaviour = typical_behaviour(A100.costs)
    assert f"host time between steps | {behaviour.host_s * 1000:g} ms |" in text
    for seed in range(1, 6):
        profile = measured_profile(A100, behaviour, seed)
        assert profile.cost.efficient_step_sizes(0.8, 1024) == (256, 512, 1024)
        assert profile.error.p95 == pytest.approx(0.11, abs=0.02)


@pytest.mark.parametrize(
    ("source", "prompt", "output"),
    [
        (SHAREGPT, (222.76, 256.36), (234.51, 268.50)),
        (LMSYS, (90.50, 148.52), (237.04, 228.21)),
        (BROS_OFFLINE, (768, 148), (80, 28)),
        (SUMMARIES, (2588, 958), (291, 291)),
    ],
)
def test_drawn_lengths_have_the_published_means_and_deviations(
    source: DrawnLengths, prompt: tuple[float, float], output: tuple[float, float]
) -> None:
    lengths = source.sample(30_000, 100_000, np.random.default_rng(0))
    for values, (mean, deviation) in zip(np.array(lengths).T, (prompt, output), strict=True):
        assert values.mean() == pytest.approx(mean, rel=0.02)
        assert values.std() == pytest.approx(deviation, rel=0.1)


def test_code_has_the_published_medians() -> None:
    lengths = np.array(CODE.sample(20_000, 100_000, np.random.default_rng(0)))
    assert np.median(lengths, axis=0) == pytest.approx([1500, 13], rel=0.05)


def test_offline_lengths_are_uniform_in_the_papers_ranges() -> None:
    lengths = np.array(BROS_OFFLINE.sample(20_000, 2048, np.random.default_rng(0)))
    assert lengths.min(axis=0).tolist() == [512, 32]
    assert lengths.max(axis=0).tolist() == [1024, 128]


@pytest.mark.parametrize("source", [SHAREGPT, LMSYS, CODE, DOCUMENT, SUMMARIES])
def test_every_request_fits_the_context(source: DrawnLengths) -> None:
    lengths = source.sample(5000, 2048, np.random.default_rng(1))
    assert max(sum(each) for each in lengths) <= 2048
    assert min(min(each) for each in lengths) >= 1


def test_a_file_is_sampled_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,5,6\nXXX,7,8\nXXX,3000,10\n")
    source = TraceLengths.read(path)
    sample = source.sample(5, 2048, np.random.default_rng(0))
    assert set(sample) == {(5, 6), (7, 8)}
    assert len(sample) == 5
    assert sample == source.sample(5, 2048, np.random.default_rng(0))
    with pytest.raises(ConfigError, match=r"lengths\.csv: no request fits a context of 10 tokens"):
        source.sample(1, 10, np.random.default_rng(0))


OBJECTIVES = SLO(ttft_s=1.0, tpot_s=0.1)


def figures(*online: OnlineRecord, duration_s: float = 4.0, num_offline_completed: int = 0) -> PolicyMetrics:
    result = ReplayResult(
        duration_s=duration_s,
        online=list(online),
        counters={each: ClassCounters() for each in ServiceClass},
        num_offline_completed=num_offline_completed,
        timeline=[],
        num_steps=1,
        num_stopped_steps=0,
        scheduling_s=0.0,
        num_prefix_hit_tokens=0,
    )
    return metrics_of(result, OBJECTIVES)


GOOD = OnlineRecord(10.0, [10.5, 10.6, 10.65])
# One gap of 150 ms, but 80 ms on average.
UNEVEN = OnlineRecord(0.0, [1.0, 1.15, 1.16])
LATE = OnlineRecord(0.0, [1.01, 1.05])
SLOW = OnlineRecord(0.0, [0.5, 0.75])
SINGLE = OnlineRecord(5.0, [5.2])


def test_a_request_is_good_if_its_first_token_and_its_mean_gap_are_in_time() -> None:
    each = [figures(record) for record in (GOOD, UNEVEN, LATE, SLOW, SINGLE)]
    assert [one.ttft_attainment for one in each] == [1, 1, 0, 1, 1]
    assert [one.tpot_attainment for one in each] == [1, 1, 1, 0, 1]
    assert [one.attainment for one in each] == [1, 1, 0, 0, 1]
    assert [one.goodput_rps for one in each] == [0.25, 0.25, 0, 0, 0.25]
    assert figures(UNEVEN).itl_attainment == 0.5


def test_goodput_is_over_the_duration_and_attainment_over_the_requests() -> None:
    together = figures(GOOD, UNEVEN, LATE, SLOW, SINGLE, duration_s=2.0)
    assert together.goodput_rps == 1.5
    assert together.attainment == pytest.approx(3 / 5)


def test_normalized_latency_is_the_mean_over_requests_of_latency_by_output_token() -> None:
    assert figures(GOOD, SLOW).normalized_latency_s == pytest.approx((0.65 / 3 + 0.75 / 2) / 2)


def test_offline_requests_count_when_they_have_ended() -> None:
    assert figures(GOOD, duration_s=2.0, num_offline_completed=3).offline_rps == 1.5


def test_without_online_requests_every_objective_is_met_and_goodput_is_nought() -> None:
    empty = figures()
    assert (empty.attainment, empty.tpot_attainment, empty.goodput_rps) == (1.0, 1.0, 0.0)
    assert empty.normalized_latency_s == 0.0


KEYS = ["ttft_p99_s", "offline_tok_s", "recomputed_token_share"]
NAMES = ["TTFT P99 s", "offline tok/s", "recomputed"]
POLICIES = {
    name: dict(zip(KEYS, (1.234 + index, 3124 + index, index / 10), strict=True))
    for index, name in enumerate(
        (
            "online-only",
            "priority",
            "priority (paper)",
            "slo-unidirectional",
            "slo-swap",
            "slo",
            "slo (paper)",
        )
    )
}


@pytest.mark.parametrize("width", [40, 60, 80, 150])
def test_every_figure_is_whole_and_no_line_is_too_long(width: int) -> None:
    screen = io.StringIO()
    print_figures(Console(file=screen, width=width), "rate_per_s 2, cv 1", " ".join(KEYS), POLICIES)
    text = screen.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for ttft_s, tok_s, share in (figures.values() for figures in POLICIES.values()):
        for cell in (f"{ttft_s:.3f}", f"{tok_s:.0f}", f"{share:.2%}"):
            assert f" {cell} " in text
    for name in NAMES:
        assert f" {name} " in text


def test_one_table_where_there_is_room() -> None:
    screen = io.StringIO()
    print_figures(Console(file=screen, width=150), "", " ".join(KEYS), POLICIES)
    assert screen.getvalue().count("TTFT P99 s") == 1


def test_a_figure_that_nobody_has_has_no_row() -> None:
    screen = io.StringIO()
    print_figures(
        Console(file=screen, width=80),
        "",
        " ".join(KEYS),
        {"slo": {"ttft_p99_s": 1.0}, "fcfs": {"offline_tok_s": 5}},
    )
    assert "offline tok/s" in screen.getvalue()
    assert "recomputed" not in screen.getvalue()
