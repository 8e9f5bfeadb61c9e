"""Logits of every architecture against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backfill.core.block import KVLayout
from backfill.kernels.base import Kernels
from backfill.kernels.cpu import CpuKernels
from backfill.kernels.reference import ReferenceKernels
from backfill.models.build import build_model
from backfill.models.config import ModelConfig
from backfill.models.weights import Checkpoint
from tests.kernels.batches import make_batch, make_pool
from tests.models.tiny import CONFIGS, save_tiny_model

BLOCK_SIZE = 8


@pytest.mark.parametrize("kernels", [ReferenceKernels(), CpuKernels()], ids=["reference", "cpu"])
@pytest.mark.parametrize("kind", CONFIGS)
@torch.inference_mode()
def test_logits_equal_transformers(kind: str, kernels: Kernels, tmp_path: Path) -> None:
    expected_model = save_tiny_model(kind, tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 199, (length,), generator=generator) for length in (1, 7, 8, 40)]
    config = ModelConfig.from_folder(tmp_path)
    model = build_model(
        config,
        Checkpoint.open(tmp_path, dtype=torch.float32),
        kernels,
        max_positions=64,
        device=torch.device("cpu"),
    )
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype_bytes=4)
    pool = make_pool(layout, num_blocks=16, dtype=torch.float32, generator=generator)
    batch = make_batch(
        [(len(prompt), len(prompt)) for prompt in prompts],
        block_size=BLOCK_SIZE,
        num_blocks=16,
        generator=generator,
    )
    state = model.embed(torch.cat(prompts), batch)
    for index in range(model.num_layers):
        state = model.run_layer(index, state, pool, batch)
    logits = model.logits(state, torch.arange(int(batch.cu_seqlens_q[-1])))
    expected = torch.cat([expected_model(prompt[None]).logits[0] for prompt in prompts])
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
