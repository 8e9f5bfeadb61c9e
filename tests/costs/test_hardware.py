from __future__ import annotations

from importlib import resources

import pytest

from backfill.core.errors import ConfigError
from backfill.costs.hardware import HardwareProfile, hardware_profile_names, load_hardware_profile
from backfill.costs.load import StepLoad

NAMES = (
    "a100-40g-llama-2-7b",
    "a100-40g-llama-3-8b",
    "a100-40g-opt-13b-tp2",
    "a100-40g-opt-30b-tp4",
    "a100-80g-llama-2-7b",
    "a100-80g-llama-3-70b-tp4",
    "a100-80g-llama-3-70b-tp8",
    "a100-80g-llama-3-8b",
)


@pytest.fixture(scope="module")
def profiles() -> dict[str, HardwareProfile]:
    return {name: load_hardware_profile(name) for name in NAMES}


def step_s(profile: HardwareProfile, slices: list[tuple[int, int, bool]]) -> float:
    return profile.costs.cost.step_time_s(StepLoad.of(slices))


def test_all_profiles_come_with_the_package() -> None:
    assert tuple(hardware_profile_names()) == NAMES
    files = resources.files("backfill.costs").joinpath("hardware_profiles").iterdir()
    assert {entry.name for entry in files} >= {f"{name}.json" for name in NAMES}


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="'h100'; there are a100-40g-llama-2-7b, a100-40g-llama-3-8b"):
        load_hardware_profile("h100")


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_has_its_error_and_its_provenance(name: str, profiles: dict[str, HardwareProfile]) -> None:
    profile = profiles[name]
    assert profile.name == name
    assert profile.costs.error.median < 0.03
    assert profile.costs.error.p95 < 0.06
    for word in ("microsoft/vidur", "MIT", "Modelled"):
        assert word in profile.costs.provenance
    assert name.startswith(profile.costs.key.device.partition("-tp")[0])
    assert profile.costs.key.model in name


@pytest.mark.parametrize("name", NAMES)
def test_work_costs_time(name: str, profiles: dict[str, HardwareProfile]) -> None:
    profile = profiles[name]
    short, long = step_s(profile, [(0, 512, True)]), step_s(profile, [(0, 2048, True)])
    assert 3 * short < long < 5 * short
    few, many = ([(1024, 1, True)] * number for number in (1, 32))
    assert step_s(profile, few) < step_s(profile, many) < 32 * step_s(profile, few)
    assert step_s(profile, [(16, 1, True)]) < step_s(profile, [(2000, 1, True)])


@pytest.mark.parametrize(
    ("name", "decode_ms", "prefill_ms"),
    [  # as published for serving systems of 2023 and 2024: one request, and 1,024 tokens
        ("a100-40g-llama-2-7b", (10, 14), (65, 95)),
        ("a100-80g-llama-2-7b", (9, 13), (65, 95)),
        ("a100-80g-llama-3-8b", (9, 13), (70, 100)),
        ("a100-80g-llama-3-70b-tp8", (15, 30), (100, 200)),
    ],
)
def test_times_match_published_ones(
    name: str,
    decode_ms: tuple[int, int],
    prefill_ms: tuple[int, int],
    profiles: dict[str, HardwareProfile],
) -> None:
    assert decode_ms[0] < 1000 * step_s(profiles[name], [(512, 1, True)]) < decode_ms[1]
    assert prefill_ms[0] < 1000 * step_s(profiles[name], [(0, 1024, True)]) < prefill_ms[1]


def test_kv_is_as_wide_as_the_models_heads(profiles: dict[str, HardwareProfile]) -> None:
    expected = {  # layers, K and V, heads, head dimension, bytes of float16
        "a100-80g-llama-2-7b": 32 * 2 * 32 * 128 * 2,
        "a100-80g-llama-3-8b": 32 * 2 * 8 * 128 * 2,
        "a100-80g-llama-3-70b-tp8": 80 * 2 * 8 * 128 * 2,
        "a100-40g-opt-13b-tp2": 40 * 2 * 40 * 128 * 2,
        "a100-40g-opt-30b-tp4": 48 * 2 * 56 * 128 * 2,
    }
    for name, num_bytes in expected.items():
        assert profiles[name].kv_bytes_per_token == num_bytes


@pytest.mark.parametrize(
    ("name", "parameters", "num_devices"),
    [
        ("a100-40g-llama-2-7b", 6.7e9, 1),
        ("a100-40g-llama-3-8b", 8.0e9, 1),
        ("a100-40g-opt-13b-tp2", 12.8e9, 2),
        ("a100-40g-opt-30b-tp4", 29.9e9, 4),
    ],
)
def test_weights_and_kv_fit_the_memory(
    name: str, parameters: float, num_devices: int, profiles: dict[str, HardwareProfile]
) -> None:
    profile = profiles[name]
    memory = num_devices * 40 * 2**30
    needed = 2 * parameters + profile.kv_tokens * profile.kv_bytes_per_token
    assert 0.7 * memory < needed < memory


@pytest.mark.parametrize(
    ("name", "parameters", "num_devices"),
    [("a100-40g-opt-13b-tp2", 12.8e9, 2), ("a100-40g-opt-30b-tp4", 29.9e9, 4)],
)
def test_derived_times_are_those_of_their_bytes_and_flops(
    name: str, parameters: float, num_devices: int, profiles: dict[str, HardwareProfile]
) -> None:
    profile = profiles[name]
    assert "was not measured" in profile.costs.provenance
    read_weights_s = 2 * parameters / (num_devices * 1.555e12)
    assert read_weights_s < step_s(profile, [(16, 1, True)]) < 2 * read_weights_s
    compute_s = 2 * parameters * 2048 / (num_devices * 312e12)
    assert 1.3 * compute_s < step_s(profile, [(0, 2048, True)]) < 2.5 * compute_s
    # More parameters a device than Llama-2-7B, which is on one: 6.4 and 7.5 billion against 6.7.
    measured = profiles["a100-40g-llama-2-7b"]
    per_token = [step_s(each, [(0, 1024, True)]) for each in (profile, measured)]
    assert 0.9 < per_token[0] / per_token[1] < 1.6
