"""Memory plans: what they hold fits, and what they advise suffices, also as the system counts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.execution import sizing
from backfill.execution.memory import MemoryPlan, WeightSizes, activation_bytes, plan_memory
from backfill.execution.sizing import RankPlan, Target
from backfill.models.config import ModelConfig
from backfill.models.placement import ModelPlacement
from backfill.models.tensor_shapes import layer_parameters
from backfill.models.weights import DummyCheckpoint
from backfill.offloading.interval import num_device_layers
from tests.execution.tiny import dummy_config
from tests.models.tiny import save_tiny_llama_config

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


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DUMMY = DummyCheckpoint(dtype=torch.float32)
MODEL = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}


def plans(config: EngineConfig, tensor: int, stages: int, device: torch.device = CPU) -> list[RankPlan]:
    placement = ModelPlacement.of(ModelConfig.from_folder(config.model_dir), tensor, stages)
    target = Target(config, placement, device, torch.float32, DUMMY)
    return [target.plan_rank(rank) for rank in range(placement.num_ranks)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(sizing, "available_host_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(sizing, "available_cuda_bytes", lambda device, utilization: GIB)
    return dummy_config(tmp_path, **MODEL)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (4, 3)])
def test_a_pool_of_a_size_has_the_blocks_of_one_process(
    tensor: int, stages: int, device: torch.device, config: EngineConfig
) -> None:
    (whole,) = plans(config, 1, 1)
    for plan in (found := plans(config, tensor, stages, device)):
        assert (plan.num_blocks, plan.max_model_len) == (whole.num_blocks, whole.max_model_len)
        assert plan.block_bytes == whole.block_bytes
    assert sum(plan.layout.block_bytes for plan in found) == whole.block_bytes
    layers = [plan.layout.num_layers for plan in found[::tensor]]
    assert sum(layers) == 4
    assert {plan.layout.num_kv_heads for plan in found} == {4 // tensor}


def test_replicated_kv_heads_take_memory_on_each_rank(config: EngineConfig) -> None:
    (whole,) = plans(config, 1, 1)
    found = plans(config, 8, 1)
    assert {plan.layout.num_kv_heads for plan in found} == {1}
    assert {plan.block_bytes for plan in found} == {2 * whole.block_bytes}
    assert {plan.num_blocks for plan in found} == {whole.num_blocks // 2}


def test_kv_of_8_bits_is_divided_among_ranks_as_any_other(config: EngineConfig) -> None:
    (as_rows,) = plans(config, 1, 1)
    config = replace(config, kv_dtype="int8")
    (whole,) = plans(config, 1, 1)
    assert whole.block_bytes == as_rows.block_bytes * (8 + 4) // (8 * 4)
    found = plans(config, 4, 2)
    assert sum(plan.layout.block_bytes for plan in found) == whole.block_bytes
    assert {plan.num_blocks for plan in found} == {whole.num_blocks}


def test_on_cpu_a_limit_is_of_all_ranks_and_on_cuda_of_each(config: EngineConfig) -> None:
    config = replace(config, kv_gib=None, device_memory=1 / 64)
    (whole,) = plans(config, 1, 1)
    together = plans(config, 2, 2)
    assert len({plan.num_blocks for plan in together}) == 1
    for plan in together:
        used = plan.memory.weights_bytes + plan.memory.activation_bytes + plan.memory.kv_bytes
        assert GIB / 64 - plan.block_bytes < used <= GIB / 64
    assert together[0].num_blocks < whole.num_blocks  # norms twice, and logits gathered
    each = plans(config, 2, 2, CUDA)
    for plan in each:
        used = plan.memory.weights_bytes + plan.memory.activation_bytes
        assert plan.memory.kv_bytes == GIB / 64 - used
        assert plan.num_blocks == plan.memory.kv_bytes // plan.layout.block_bytes > 3 * whole.num_blocks


def test_what_does_not_fit_on_all_ranks_together_is_refused(config: EngineConfig) -> None:
    with pytest.raises(InsufficientMemory, match=r"the KV pool 8\.00 GiB.*use `kv_gib` 7\.99 or less"):
        plans(replace(config, kv_gib=8.0), 2, 2)
    assert plans(replace(config, kv_gib=3.9), 2, 2, CUDA)[0].memory.kv_bytes < 0.98 * GIB
    with pytest.raises(InsufficientMemory, match=r"Not enough memory on cuda.*the KV pool 1\.00 GiB"):
        plans(replace(config, kv_gib=4.0), 2, 2, CUDA)
    with pytest.raises(InsufficientMemory, match=r"The KV pool holds no block.*raise `kv_gib`"):
        plans(replace(config, kv_gib=16 / GIB), 2, 2, CUDA)


def test_the_host_pool_is_divided_like_the_device_pool(config: EngineConfig) -> None:
    scheduler = replace(config.scheduler, checkpointing="adaptive")
    config = replace(config, scheduler=scheduler, host_kv_gib=config.kv_gib)
    for device in (CPU, CUDA):
        for plan in plans(config, 2, 2, device):
            assert plan.num_host_blocks == plan.num_blocks
        for plan in plans(replace(config, host_kv_gib=None), 2, 2, device):
            assert plan.num_host_blocks == plan.num_blocks


def test_each_stage_offloads_one_of_so_many_of_its_own_layers(tmp_path: Path, config: EngineConfig) -> None:
    model = dummy_config(tmp_path, **MODEL | {"num_hidden_layers": 14})
    config = replace(model, device_memory=1.0, kv_gib=None)
    stages = (range(8), range(8, 14))
    placement = ModelPlacement(ModelConfig.from_folder(config.model_dir), 2, stages)

    def memory(interval: int | None, rank: int = 0, device: torch.device = CPU) -> MemoryPlan:
        divided = replace(config, offload_interval=interval or "none")
        return Target(divided, placement, device, torch.float32, DUMMY).plan_rank(rank).memory

    together, resident = memory(3), memory(None)
    assert (together.num_layers, together.num_offloaded) == (14, 2 + 2)
    assert together.num_device_layers == 14
    assert (memory(2).num_offloaded, memory(2).num_device_layers) == (4 + 3, 8 - 2 + 6 - 1)
    assert (resident.num_offloaded, resident.num_device_layers) == (0, 14)
    assert memory(2).kv_bytes > resident.kv_bytes
    of_each = [memory(7, rank, CUDA) for rank in (0, 2)]
    assert [each.num_offloaded for each in of_each] == [1, 0]
    assert [each.num_layers for each in of_each] == [8, 6]
    with pytest.raises(ConfigError, match=r"at most 8, the layers of the largest stage, got 9"):
        memory(9)
    with pytest.raises(ConfigError, match=r"at most 14, the model's layers, got 15"):
        plans(replace(config, offload_interval=15), 2, 1)


def test_activations_and_weights_are_of_the_ranks_part(config: EngineConfig) -> None:
    model = ModelConfig.from_folder(config.model_dir)
    placement = ModelPlacement.of(model, 2, 2)
    used = [activation_bytes(shard, 100, 10, 4) for shard in placement.shards()]
    of_token = 4 * (4 * 64 + 6 * 2 * 8 + 3 * 40) // 4 * 4
    assert used[0] == used[1] == 100 * of_token
    assert used[3] - used[1] == 10 * 100 * 4  # half of the 199 logits, and padding
    assert used[2] - used[3] == 10 * 199 * (4 + 8)
    whole = WeightSizes.of(ModelPlacement.of(model).shards(), 4, 4, 4)
    together = WeightSizes.of(placement.shards(), 4, 4, 4)
    norms = 2 * 64 * 4
    assert together.num_layers == 4
    assert together.layer_bytes == whole.layer_bytes + norms
    # The first and the last stage have a table each, whose rows are padded to two parts of 100.
    table, final_norm = 64 * 4, 64 * 4
    assert whole.other_bytes == 199 * table + final_norm
    assert together.other_bytes == 2 * 200 * table + 2 * final_norm


NUM_LAYERS = 24
# Prints the anonymous memory that a loaded model takes, in bytes.
SCRIPT = """
import json, sys
from pathlib import Path
from backfill.core.config import EngineConfig
from backfill.execution.create import create_torch_executor

def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024

folder, interval = sys.argv[1:]
before = anonymous()
executor = create_torch_executor(EngineConfig(
    model_dir=folder, device="cpu", dtype="float32", load_format="dummy", kv_gib=0.01, threads=1,
    offload_interval=interval,
))
print(json.dumps(anonymous() - before))
"""


def anonymous_bytes(folder: Path, interval: str, cache: Path) -> int:
    command = [sys.executable, "-c", SCRIPT, str(folder), interval]
    environment = {**os.environ, "BACKFILL_CACHE_ROOT": str(cache)}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    found: int = json.loads(output)
    return found


@pytest.mark.slow  # three processes; what is planned and streamed is in test_memory.py and test_offloading.py
def test_what_is_offloaded_takes_no_memory(tmp_path: Path) -> None:
    """Also at the first start, which writes the file."""
    save_tiny_llama_config(
        tmp_path, num_hidden_layers=NUM_LAYERS, hidden_size=512, intermediate_size=1024,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    layer_bytes = layer_parameters(ModelConfig.from_folder(tmp_path)) * 4
    cache = tmp_path / "cache"
    taken = {interval: anonymous_bytes(tmp_path, interval, cache) for interval in ("none", "1")}
    again = anonymous_bytes(tmp_path, "1", cache)
    num_saved = NUM_LAYERS - num_device_layers(NUM_LAYERS, 1)
    # Loading allocates and keeps some memory of its own, and large pages are rounded up: tens of MB.
    least_saved = num_saved * layer_bytes * 2 / 3
    assert taken["none"] - taken["1"] >= least_saved
    assert taken["none"] - again >= least_saved
