"""Memory plans: what they hold fits, and what they advise suffices."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.config import GIB
from backfill.core.errors import InsufficientMemory
from backfill.execution.memory import MemoryPlan, WeightSizes, plan_memory
from backfill.offloading.interval import num_device_layers

BLOCK_BYTES = 1 << 20
WEIGHTS = WeightSizes(stage_layers=(12,), layer_bytes=GIB // 4, other_bytes=GIB)


def plan(weights: WeightSizes = WEIGHTS, **changes: Any) -> MemoryPlan:
    arguments: dict[str, Any] = {"device": "cpu", "block_bytes": BLOCK_BYTES, "default_kv_bytes": GIB}
    return plan_memory(weights, **(arguments | changes))


def test_without_limits_every_layer_is_resident_beside_the_default_pool() -> None:
    found = plan()
    assert found == MemoryPlan(12, 0, 12, 4 * GIB, 0, GIB, num_blocks=1024)


def test_offloaded_layers_share_two_staging_buffers() -> None:
    assert plan(interval=3).num_device_layers == 10
    assert plan(interval=3).weights_bytes == GIB + 10 * GIB // 4
    assert plan(interval=1).weights_bytes == GIB + 2 * GIB // 4
    assert WEIGHTS.host_layers_bytes(1) == 3 * GIB


def test_the_kv_pool_gets_what_a_limit_leaves() -> None:
    found = plan(interval=1, limit_bytes=4 * GIB, activation_bytes=GIB // 2)
    assert found.kv_bytes == 2 * GIB
    assert plan(interval=1, limit_bytes=4 * GIB, kv_bytes=GIB).kv_bytes == GIB


def test_on_cuda_it_gets_nine_tenths_of_what_is_free() -> None:
    found = plan(default_kv_bytes=None, available_bytes=14 * GIB)
    assert found.kv_bytes == 9 * GIB


def test_what_is_not_available_is_refused_with_what_would_fit() -> None:
    plan(available_bytes=5 * GIB)
    with pytest.raises(InsufficientMemory, match=r"use `kv_gib` 0\.5 or less"):
        plan(available_bytes=9 * GIB // 2)
    with pytest.raises(InsufficientMemory, match=r"use `offload_interval` 4 or less"):
        plan(available_bytes=4 * GIB - 1, kv_bytes=BLOCK_BYTES)
    with pytest.raises(InsufficientMemory, match="the weights alone do not fit; use a smaller model"):
        plan(available_bytes=GIB)


def test_a_limit_that_is_too_small_names_what_would_do() -> None:
    message = (
        r"`device_memory` 3\.900 GiB is too small with `offload_interval` none: the weights on the device "
        r"need 4\.000 GiB, activations 0\.500 GiB and the KV pool at least 0\.00098 GiB; raise "
        r"`device_memory` to 4\.501 or more, or use `offload_interval` 2 or less\."
    )
    with pytest.raises(InsufficientMemory, match=message):
        plan(limit_bytes=int(3.9 * GIB), activation_bytes=GIB // 2)
    with pytest.raises(InsufficientMemory, match=r"use `kv_gib` 0\.25 or less"):
        plan(limit_bytes=4 * GIB + GIB // 4, kv_bytes=GIB)


@given(
    st.integers(1, 80),
    st.integers(1, GIB),
    st.integers(1, 4 * GIB),
    st.integers(0, GIB),
    st.integers(1, 40 * GIB),
    st.none() | st.integers(1, 4 * GIB),
    st.none() | st.integers(1, 80),
)
def test_a_plan_fits_its_limit_and_advice_is_true(
    num_layers: int,
    layer_bytes: int,
    other_bytes: int,
    activation_bytes: int,
    limit_bytes: int,
    kv_bytes: int | None,
    interval: int | None,
) -> None:
    weights = WeightSizes((num_layers,), layer_bytes, other_bytes)
    interval = None if interval is None else min(interval, num_layers)
    fixed = {"kv_bytes": kv_bytes, "activation_bytes": activation_bytes}
    try:
        found = plan(weights, interval=interval, limit_bytes=limit_bytes, **fixed)
    except InsufficientMemory as error:
        message = str(error)
        (gib,) = re.findall(r"raise `device_memory` to ([\d.]+)", message)
        assert plan(weights, interval=interval, limit_bytes=int(float(gib) * GIB), **fixed).num_blocks >= 0
        for smaller in re.findall(r"use `offload_interval` (\d+)", message):
            plan(weights, interval=int(smaller), limit_bytes=limit_bytes, **fixed)
            assert interval is None or int(smaller) < interval
        for gib in re.findall(r"use `kv_gib` ([\d.]+) or less", message):
            smaller_pool = {**fixed, "kv_bytes": int(float(gib) * GIB)}
            plan(weights, interval=interval, limit_bytes=limit_bytes, **smaller_pool)
        return
    assert found.weights_bytes + found.activation_bytes + found.kv_bytes <= limit_bytes
    assert found.num_blocks == found.kv_bytes // BLOCK_BYTES
    assert found.num_device_layers == num_device_layers(num_layers, interval)
    if kv_bytes is None:
        assert found.num_blocks >= 1
