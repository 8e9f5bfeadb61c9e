from __future__ import annotations

import pytest

from backfill.core.errors import ConfigError
from backfill.costs.hardware import HardwareProfile, hardware_profile_names, load_hardware_profile
from backfill.costs.load import StepLoad

NAMES = hardware_profile_names()


def decode_s(hardware: HardwareProfile, num_requests: int = 1, context: int = 512) -> float:
    return hardware.costs.cost.step_time_s(StepLoad.of([(context, 1, True)] * num_requests))


def prefill_s(hardware: HardwareProfile, num_tokens: int = 1024) -> float:
    return hardware.costs.cost.step_time_s(StepLoad.of([(0, num_tokens, True)]))


def test_the_package_has_those_that_the_scenarios_need() -> None:
    assert sorted(NAMES) == NAMES
    assert {"a100-40g-llama-2-7b", "a100-80g-llama-3-8b", "a100-80g-llama-3-70b-tp8"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_profile_is_whole(name: str) -> None:
    hardware = load_hardware_profile(name)
    costs = hardware.costs
    assert hardware.name == name
    parts = set(f"{costs.key.device}-{costs.key.model}".split("-"))
    assert parts == set(name.split("-")), "the profile is of the device and model that its name says"
    assert hardware.kv_tokens >= hardware.max_model_len > 0
    assert hardware.copy_bytes_per_s > 1e9
    assert costs.num_layers >= 32
    assert "vidur" in costs.provenance
    assert costs.error.num_steps > 0
    assert costs.error.median <= costs.error.p95 < 0.10


@pytest.mark.parametrize("name", NAMES)
def test_a_step_costs_more_for_everything_put_into_it(name: str) -> None:
    hardware = load_hardware_profile(name)
    assert decode_s(hardware, 64) > decode_s(hardware, 1)
    assert decode_s(hardware, 64, context=2048) > decode_s(hardware, 64, context=128)
    assert prefill_s(hardware, 2048) > 1.5 * prefill_s(hardware, 1024)
    # Batches pay: this is what co-serving lives from.
    assert decode_s(hardware, 32) < 8 * decode_s(hardware, 1)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    for name in ("h100-llama", "", "../a100-40g-llama-2-7b", "a100-40g-llama-2-7b.json"):
        with pytest.raises(ConfigError) as caught:
            load_hardware_profile(name)
        assert repr(name) in str(caught.value)
        assert all(known in str(caught.value) for known in NAMES)


def test_llama_2_7b_on_an_a100_takes_what_is_published() -> None:
    """13.5 GB of weights at about 1.5 TB/s are 9 ms; 1,024 tokens at 55 % of 312 TFLOP/s are 80 ms."""
    hardware = load_hardware_profile("a100-40g-llama-2-7b")
    assert 0.008 < decode_s(hardware) < 0.014
    assert 0.060 < prefill_s(hardware) < 0.100
    assert hardware.kv_bytes_per_token == 2 * 32 * 32 * 128 * 2


def test_larger_models_are_slower_and_larger_memories_hold_more() -> None:
    small, large = (load_hardware_profile(f"a100-80g-llama-3-{size}") for size in ("8b", "70b-tp8"))
    assert decode_s(large) > decode_s(small)
    assert prefill_s(large) > prefill_s(small)
    for model in ("llama-2-7b", "llama-3-8b"):
        less, more = (load_hardware_profile(f"a100-{memory}-{model}") for memory in ("40g", "80g"))
        assert more.kv_tokens > 1.5 * less.kv_tokens
        assert more.kv_bytes_per_token == less.kv_bytes_per_token


def test_grouped_query_attention_takes_a_quarter_of_the_kv() -> None:
    many, few = (load_hardware_profile(f"a100-80g-{model}") for model in ("llama-2-7b", "llama-3-8b"))
    assert few.kv_bytes_per_token * 4 == many.kv_bytes_per_token
