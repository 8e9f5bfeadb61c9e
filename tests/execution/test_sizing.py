"""Blocks and memory of models on several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.execution import sizing
from backfill.execution.memory import MemoryPlan, WeightSizes, WeightWidths, activation_bytes
from backfill.execution.sizing import RankPlan, Target
from backfill.models.config import ModelConfig
from backfill.models.placement import ModelPlacement
from backfill.models.weights import DummyCheckpoint
from tests.execution.tiny import dummy_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WEIGHTS = DummyCheckpoint(dtype=torch.float32)
MODEL = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}


def plans(config: EngineConfig, tensor: int, stages: int, device: torch.device = CPU) -> list[RankPlan]:
    placement = ModelPlacement.of(ModelConfig.from_folder(config.model_dir), tensor, stages)
    target = Target(config, placement, device, torch.float32, WEIGHTS)
    return [target.plan_rank(rank) for rank in range(placement.num_ranks)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(sizing, "available_host_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(sizing, "_available_cuda_bytes", lambda device, utilization: GIB)
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
        return Target(divided, placement, device, torch.float32, WEIGHTS).plan_rank(rank).memory

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
    whole = WeightSizes.of(ModelPlacement.of(model).shards(), WeightWidths(4, 4, 4))
    together = WeightSizes.of(placement.shards(), WeightWidths(4, 4, 4))
    norms = 2 * 64 * 4
    assert together.num_layers == 4
    assert together.layer_bytes == whole.layer_bytes + norms
    # The first and the last stage have a table each, whose rows are padded to two parts of 100.
    table, final_norm = 64 * 4, 64 * 4
    assert whole.other_bytes == 199 * table + final_norm
    assert together.other_bytes == 2 * 200 * table + 2 * final_norm
