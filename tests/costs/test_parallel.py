from __future__ import annotations

import itertools

import pytest

from backfill.core.errors import ConfigError
from backfill.costs.hardware import load_hardware_profile
from backfill.costs.load import StepLoad
from backfill.costs.parallel import (
    A100_80G,
    DEVICES,
    LLAMA_3_8B,
    LLAMA_3_70B,
    MODELS,
    all_reduce_times,
    derive_parallel_cost,
    parallel_hardware,
    stage_layers,
)

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
    shape = MODELS["llama-3-8b"]
    assert parallel_hardware("a100-80g-llama-3-8b", 8).kv_bytes_per_token == shape.kv_bytes_per_token


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
        assert parallel_hardware(f"{device}-{model}", 8).costs.cost.step_time_s(DECODE) > 0
