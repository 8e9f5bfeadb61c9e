"""What a torch executor makes of a model's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from transformers import LlamaConfig

from backfill.core.clock import VirtualClock
from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.core.plan import Compute, CopyDirections, StepPlan, WaitForCopies
from backfill.core.request import FinishReason
from backfill.engine.engine import Engine
from backfill.execution import sizing
from backfill.execution.create import create_torch_executor, target_of
from backfill.execution.machine import check_host_pool_fits
from backfill.execution.memory import WeightSizes
from backfill.execution.pool_pair import CopyGroup, CpuPools
from backfill.models.config import ModelConfig
from backfill.models.shard import ShardSizes
from tests.builders import make_request
from tests.execution.tiny import BLOCK_BYTES, dummy_config, two_tier_config
from tests.models.gguf.builders import (
    SIZES,
    folder_of_gguf,
    make_model,
    stored_tensors,
    write_gguf,
    write_tiny,
)


def test_end_tokens_outside_the_vocabulary_fail_no_step(tmp_path: Path) -> None:
    config = dummy_config(tmp_path, eos_token_id=[2, 5000])
    engine = Engine(SchedulerConfig(), create_torch_executor(config), VirtualClock())
    engine.add(make_request(max_tokens=2, min_tokens=1))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [output.finish_reason for output in outputs] in (
        [None, FinishReason.LENGTH],
        [None, FinishReason.STOP],
    )


BIDIRECTIONAL: dict[str, Any] = {"kv_layout": "bidirectional"}


def record_slot_copies(monkeypatch: pytest.MonkeyPatch) -> dict[CopyDirections, list[int]]:
    """Of each direction in which slots are copied from here on, how many slots each copy has."""
    nums: dict[CopyDirections, list[int]] = {}
    copy_group = CpuPools.copy

    def copy(self: CpuPools, group: CopyGroup, after: None) -> None:
        if group.slots:
            nums.setdefault(group.direction, []).extend(each.num for each in group.slots)
        copy_group(self, group, after)

    monkeypatch.setattr(CpuPools, "copy", copy)
    return nums


def padded(num_values: int) -> int:
    return 1 << (num_values - 1).bit_length()


def available(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    monkeypatch.setattr(sizing, "available_host_bytes", lambda: num_bytes)


def test_the_host_pool_is_as_large_as_asked_for(model_dir: Path) -> None:
    info = create_torch_executor(two_tier_config(model_dir)).info
    assert info.num_host_blocks == 12
    assert info.block_bytes == BLOCK_BYTES


def test_without_checkpointing_or_with_a_size_of_0_there_is_none(model_dir: Path) -> None:
    for config in (
        two_tier_config(model_dir, host_kv_gib=0),
        replace(two_tier_config(model_dir), scheduler=SchedulerConfig()),
    ):
        executor = create_torch_executor(config)
        assert executor.info.num_host_blocks == 0
        assert executor.run(StepPlan(step=0, work=Compute(slices=()))).completed_copies == ()


def test_by_default_it_is_as_large_as_the_pool_or_a_quarter_of_what_is_left(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = two_tier_config(model_dir, host_kv_gib=None)
    for num_bytes in (None, GIB):
        available(monkeypatch, num_bytes)
        with caplog.at_level("INFO"):
            assert create_torch_executor(config).info.num_host_blocks == 24
        assert "KV pool in host memory: 24 blocks" in caplog.text
    model = ModelConfig.from_folder(model_dir)
    weights_bytes = WeightSizes.of((ShardSizes(model, range(model.num_layers)),), 4, 4, 4).device_bytes(None)
    available(monkeypatch, weights_bytes + 24 * BLOCK_BYTES + 4 * 5 * BLOCK_BYTES + 3)
    assert create_torch_executor(config).info.num_host_blocks == 5


def test_kv_of_8_bits_takes_codes_and_scales_in_both_pools(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = two_tier_config(model_dir)
    with caplog.at_level("INFO"):
        info = create_torch_executor(replace(config, kv_dtype="int8")).info
    assert (info.dtype, info.kv_dtype) == ("float32", "int8")
    assert info.block_bytes == BLOCK_BYTES * (8 + 4) // (8 * 4)
    assert info.num_blocks == 24 * 8 * 4 // (8 + 4)
    assert info.num_host_blocks == 12 * 8 * 4 // (8 + 4)
    assert "KV in int8" in caplog.text


@pytest.mark.parametrize(
    ("stored", "options", "types"),
    [
        (Quant.Q8_0, {}, "computed in bfloat16; weights in Q8_0; "),
        (Quant.Q8_0, {"dtype": "float32"}, "computed in float32 (`dtype`); weights in Q8_0; "),
        (Quant.Q8_0, {"quantization": "none"}, "bfloat16 (the model is stored in Q8_0); "),
        (Quant.F16, {}, "bfloat16 (the model is stored in float16); "),
        (Quant.F16, {"quantization": "int8"}, "computed in bfloat16; weights in int8; "),
        (Quant.BF16, {}, "bfloat16 (as the model is stored); "),
    ],
)
def test_the_log_says_what_a_gguf_file_is_stored_and_computed_in(
    stored: Quant, options: dict[str, Any], types: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of_gguf(write_tiny(tmp_path / "m.gguf", quant=stored), tmp_path / "model")
    with caplog.at_level("INFO"):
        create_torch_executor(EngineConfig(model_dir=str(folder), device="cpu", kv_gib=0.01, **options))
    (line,) = (each for each in caplog.messages if each.startswith("kernels: "))
    assert f"; {types}" in line


def test_layers_of_several_formats_are_not_offloaded_and_nothing_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Q4_K_M has more bits in some layers."""
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    model = LlamaConfig(**SIZES | {"num_hidden_layers": 4}, tie_word_embeddings=True)
    tensors, others = stored_tensors(make_model(model)), {"blk.2.ffn_down.weight": Quant.Q8_0}
    source = tmp_path / "m.gguf"
    write_gguf(source, "llama", model, tensors, quant=Quant.Q4_0, other_quants=others)
    folder = folder_of_gguf(source, tmp_path / "model")
    config = EngineConfig(model_dir=str(folder), device="cpu", kv_gib=0.01, offload_interval=1)
    with pytest.raises(ConfigError, match=r"`offload_interval` needs layers .* alike.* int8, int4 or none"):
        create_torch_executor(config)
    assert not (tmp_path / "cache").exists()
    create_torch_executor(replace(config, quantization="int8"))


def test_kv_of_8_bits_is_refused_on_cuda(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(two_tier_config(model_dir), kv_dtype="int8")
    assert target_of(config).kv_dtype == torch.int8
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="`kv_dtype` int8 is supported with `device` cpu only; use auto"):
        target_of(replace(config, device="cuda"))


def test_a_size_that_does_not_fit_or_holds_no_block_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InsufficientMemory, match=r"holds no block.*`host_kv_gib`"):
        create_torch_executor(two_tier_config(model_dir, (BLOCK_BYTES - 1) / GIB))
    available(monkeypatch, GIB)
    with pytest.raises(InsufficientMemory, match=r"use `host_kv_gib` 0\.99 or less"):
        create_torch_executor(two_tier_config(model_dir, 1.0))
    with pytest.raises(InsufficientMemory, match=r"0\.00 GiB are left for it; use `host_kv_gib` 0\."):
        check_host_pool_fits(host_kv_bytes=1, left_bytes=-1)
    check_host_pool_fits(host_kv_bytes=GIB, left_bytes=None)
    check_host_pool_fits(host_kv_bytes=GIB, left_bytes=GIB)


def test_slots_are_copied_at_the_start_for_each_kernel_that_serving_needs(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nums = record_slot_copies(monkeypatch)
    config = two_tier_config(model_dir)
    executor = create_torch_executor(replace(config, scheduler=replace(config.scheduler, **BIDIRECTIONAL)))
    assert executor.run(StepPlan(step=3, work=WaitForCopies())).completed_slot_copies == ()
    for head_dim in (8, 40, 64, 80, 128):
        needed = {padded(num * head_dim) for num in range(1, config.block_size + 1)}
        for direction in (CopyDirections.CHECKPOINT, CopyDirections.RESTORE):
            assert {padded(num * head_dim) for num in nums[direction]} == needed


def test_no_slots_are_copied_at_the_start_where_blocks_are_not_shared(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nums = record_slot_copies(monkeypatch)
    config = two_tier_config(model_dir)
    create_torch_executor(replace(config, scheduler=replace(config.scheduler, kv_layout="unidirectional")))
    assert not nums
    config = two_tier_config(model_dir, host_kv_gib=0)
    create_torch_executor(replace(config, scheduler=SchedulerConfig(**BIDIRECTIONAL)))
    assert not nums
