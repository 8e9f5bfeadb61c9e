from __future__ import annotations

from dataclasses import replace

import pytest

from backfill.costs.behaviour import StepNoise
from backfill.costs.hardware import HardwareProfile, load_hardware_profile
from backfill.costs.load import StepLoad
from backfill.costs.profile import FitError
from backfill.costs.profiler import FULL
from backfill.simulation.device import exact_behaviour, measured_profile, typical_behaviour
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


def test_the_document_has_the_host_time_and_what_is_known_of_the_tiles() -> None:
    text = (ROOT / "docs" / "simulation.md").read_text()
    behaviour = typical_behaviour(A100.costs)
    assert f"host time between steps | {behaviour.host_s * 1000:g} ms |" in text
    assert "it finds 256, 512 and 1,024" in text
    for seed in range(1, 6):
        profile = measured_profile(A100, behaviour, seed)
        assert profile.cost.efficient_step_sizes(0.8, 1024) == (256, 512, 1024)
        assert profile.error.p95 == pytest.approx(0.11, abs=0.02)
