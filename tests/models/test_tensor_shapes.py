"""The tensors that are asked for before an engine starts are those that it loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backfill.kernels.cpu import CpuKernels
from backfill.models.build import build_model
from backfill.models.config import ModelConfig
from backfill.models.tensor_shapes import tensor_shapes
from backfill.models.weights import DummyCheckpoint, Part
from tests.models.tiny import CONFIGS, save_tiny_model


class Recorder(DummyCheckpoint):
    """Remembers what it is asked for."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        self.asked.append((name, tuple(shape)))
        return super().get(name, shape, part)


@pytest.mark.parametrize("kind", CONFIGS)
def test_they_are_what_a_model_loads(kind: str, tmp_path: Path) -> None:
    save_tiny_model(kind, tmp_path)
    config, checkpoint = ModelConfig.from_folder(tmp_path), Recorder()
    build_model(config, checkpoint, CpuKernels(), max_positions=64, device=torch.device("cpu"))
    assert sorted(tensor_shapes(config)) == sorted(checkpoint.asked)
