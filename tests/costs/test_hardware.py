"""Devices: their profiles, what is derived from them, ranks, and how they behave."""

from __future__ import annotations

import itertools
import json
from importlib import resources

import pytest

from backfill.core.errors import ConfigError
from backfill.costs.hardware import HardwareProfile, hardware_profile_names, load_hardware_profile
from backfill.costs.load import StepLoad
from backfill.costs.parallel import all_reduce_times, parallel_hardware, stage_layers
from experiments.derived import A100_80G, LLAMA_2_7B, derive_cost_model
from experiments.parallel_costs import (
    DEVICES,
    LLAMA_3_8B,
    LLAMA_3_70B,
    MODELS,
    derive_parallel_cost,
    machine,
)
from experiments.selectn.baselines import peak_step_s
from experiments.selectn.model import A10, SHAPES

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


LOADS = [
    StepLoad.of([(64, 1, True)] * 32),
    StepLoad.of([(0, 256, True)] * 4),
    StepLoad.of([(1000, 500, True), (100, 1, True)]),
]


@pytest.mark.parametrize("load", LOADS)
def test_a_model_derived_from_itself_is_as_measured(load: StepLoad) -> None:
    """What is modelled for the profile is modelled here; the fit moves a little between the two."""
    measured = load_hardware_profile("a100-80g-llama-2-7b").costs.cost
    derived = derive_cost_model(LLAMA_2_7B, A100_80G)
    assert derived.rows_s == measured.rows_s
    assert derived.step_time_s(load) == pytest.approx(measured.step_time_s(load), rel=0.05)


@pytest.mark.parametrize("load", LOADS)
def test_no_step_is_faster_than_the_data_sheet_allows(load: StepLoad) -> None:
    for shape in SHAPES.values():
        seconds = derive_cost_model(shape, A10).step_time_s(load)
        peak_s = peak_step_s(shape, A10, load, counts_bytes=True)
        assert 1.2 * peak_s < seconds < 2.0 * peak_s
        assert peak_step_s(shape, A10, load, counts_bytes=False) < peak_s


def test_an_a10_needs_longer_by_the_ratio_of_what_bounds_a_step() -> None:
    slow, fast = derive_cost_model(LLAMA_2_7B, A10), derive_cost_model(LLAMA_2_7B, A100_80G)
    assert slow.rows_s(1) / fast.rows_s(1) == pytest.approx(2.039e12 / 600e9, rel=1e-3)
    assert slow.rows_s(4096) / fast.rows_s(4096) == pytest.approx(312 / 125, rel=0.05)
    assert slow.decode_context_s / fast.decode_context_s == pytest.approx(2.039e12 / 600e9)
    assert slow.prefill_pair_s / fast.prefill_pair_s == pytest.approx(312 / 125)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("opt-6.7b", 6.66e9), ("opt-13b", 12.85e9), ("qwen2-beta-7b", 7.72e9), ("llama-2-13b", 13.02e9)],
)
def test_weights_are_as_many_as_published(name: str, parameters: float) -> None:
    assert SHAPES[name].weight_bytes == pytest.approx(2 * parameters, rel=0.003)


def test_layers_relate_to_the_link_as_the_paper_measured() -> None:
    """Figure 2: a transfer takes 3.5 and 13.8 times a layer's computation."""
    shape = SHAPES["qwen2-beta-7b"]
    cost = derive_cost_model(shape, A10)
    for one, paper in (((0, 256, True), 3.5), ((256, 1, True), 13.8)):
        layer_s = cost.step_time_s(StepLoad.of([one] * 4)) / shape.num_layers
        assert shape.layer_bytes / 24e9 / layer_s == pytest.approx(paper, rel=0.2)


LLAMA_70B = "a100-80g-llama-3-70b"
DECODE = StepLoad.of([(512, 1, True)])
PREFILL = StepLoad.of([(0, 2048, True)])


def test_one_device_is_the_profile_of_the_package() -> None:
    hardware, profile = parallel_hardware("a100-80g-llama-3-8b"), load_hardware_profile("a100-80g-llama-3-8b")
    assert hardware.costs.cost == profile.costs.cost
    assert hardware.kv_tokens == profile.kv_tokens
    assert hardware.costs.copies is not None


@pytest.mark.parametrize("size", [4, 8])
def test_measured_tensor_parallel_costs_are_taken_as_they_are(size: int) -> None:
    hardware, profile = parallel_hardware(LLAMA_70B, size), load_hardware_profile(f"{LLAMA_70B}-tp{size}")
    assert hardware.name == profile.name
    assert hardware.costs.cost == profile.costs.cost
    assert hardware.kv_tokens == profile.kv_tokens


@pytest.mark.parametrize("size", [4, 8])
def test_derived_costs_are_near_measured_ones(size: int) -> None:
    """docs/hardware-profiles.md says how near; launches of small kernels are not in a roofline."""
    derived = derive_parallel_cost(LLAMA_3_70B, A100_80G, size)
    measured = load_hardware_profile(f"{LLAMA_70B}-tp{size}").costs.cost
    for num_tokens in (1, 16, 64, 256, 1024, 4096):
        assert derived.rows_s(num_tokens) == pytest.approx(measured.rows_s(num_tokens), rel=0.17)
    assert derived.decode_context_s == pytest.approx(measured.decode_context_s, rel=0.01)
    assert derived.prefill_pair_s == pytest.approx(measured.prefill_pair_s, rel=0.02)


def test_a_decode_takes_the_time_of_its_weights_and_collectives() -> None:
    """Of Llama-3-70B on eight devices: 10.8 ms for 17.6 GB at 80 % of the bandwidth, and 160 all-reduces."""
    all_reduce_s = all_reduce_times()[8]
    weights_s = LLAMA_3_70B.weight_bytes / 8 / A100_80G.memory_rate
    least_s = weights_s + 2 * LLAMA_3_70B.num_layers * all_reduce_s(2 * LLAMA_3_70B.hidden)
    step_s = parallel_hardware(LLAMA_70B, 8).costs.cost.step_time_s(DECODE)
    assert least_s < step_s < 1.4 * least_s


def test_more_ranks_are_faster_and_less_than_in_proportion() -> None:
    costs = [derive_parallel_cost(LLAMA_3_8B, A100_80G, size) for size in (1, 2, 4, 8)]
    for load in (DECODE, PREFILL):
        for one, two in itertools.pairwise(cost.step_time_s(load) for cost in costs):
            assert one / 2 < two < one


def test_stages_add_transfers_and_memory_and_no_speed() -> None:
    one, two = parallel_hardware(LLAMA_70B, 4), parallel_hardware(LLAMA_70B, 4, 2)
    assert two.stage_layers == (40, 40)
    assert not one.stage_layers
    assert one.costs.cost.step_time_s(PREFILL) < two.costs.cost.step_time_s(PREFILL)
    assert two.costs.cost.step_time_s(PREFILL) == pytest.approx(one.costs.cost.step_time_s(PREFILL), rel=0.01)
    assert two.kv_tokens == parallel_hardware(LLAMA_70B, 8).kv_tokens


def test_stages_are_even() -> None:
    assert stage_layers(80, 3) == (27, 27, 26)
    assert sum(stage_layers(32, 5)) == 32


def test_kv_heads_that_are_fewer_than_ranks_are_replicated() -> None:
    assert parallel_hardware("a100-80g-llama-3-8b", 8).kv_bytes_per_token == LLAMA_3_8B.kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (LLAMA_70B, (3, 1), "`tensor_parallel_size` must be one of 1, 2, 4, 8 for llama-3-70b, got 3"),
        (LLAMA_70B, (0, 1), "`tensor_parallel_size` must be one of 1, 2, 4, 8"),
        (LLAMA_70B, (1, 1), "does not fit 1 x a100-80g: its weights have 141 GB"),
        (LLAMA_70B, (8, 81), "`pipeline_parallel_size` must be 1 to 80"),
        ("a100-80g-opt-13b", (2, 1), "`hardware` 'a100-80g-opt-13b' cannot be put on several devices"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name: str, sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parallel_hardware(name, *sizes)


def test_all_reduces_become_slower_with_size_and_devices() -> None:
    times = all_reduce_times()
    assert list(times) == [2, 4, 8]
    for fewer, more in itertools.pairwise(times.values()):
        assert all(fewer(1 << power) <= more(1 << power) for power in range(23, 27))


def test_every_named_model_and_device_has_a_cost() -> None:
    for device, model in itertools.product(DEVICES, MODELS):
        assert parallel_hardware(f"{device.name}-{model.name}", 8).costs.cost.step_time_s(DECODE) > 0


def test_the_packages_derived_costs_are_those_of_the_derivation() -> None:
    file = resources.files("backfill.costs").joinpath("machines", "a100-dgx.json")
    assert json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(machine()))
