"""The layers of a model are loaded by several threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backfill.core.errors import CorruptModel
from backfill.models.build import build_model
from backfill.models.config import ModelConfig
from backfill.models.decoder import DecoderModel
from backfill.models.weights import DummyCheckpoint
from tests.kernels.reference import ReferenceKernels
from tests.models.tiny import save_tiny_model

CPU = torch.device("cpu")


def build(folder: Path) -> DecoderModel:
    checkpoint = DummyCheckpoint(dtype=torch.float32)
    config = ModelConfig.from_folder(folder)
    return build_model(config, checkpoint, ReferenceKernels(CPU), max_positions=64, device=CPU)


@pytest.mark.parametrize("damaged", [False, True])
def test_threads_divide_layers_and_not_their_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    save_tiny_model("llama", tmp_path)
    before, seen = torch.get_num_threads(), set[int]()
    read = DummyCheckpoint.get

    def get(checkpoint: DummyCheckpoint, name: str, *args: object) -> torch.Tensor:
        if "layers.1." in name:
            seen.add(torch.get_num_threads())
            if damaged:
                raise CorruptModel(name)
        return read(checkpoint, name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DummyCheckpoint, "get", get)
    torch.set_num_threads(2)
    try:
        if damaged:
            with pytest.raises(CorruptModel, match=r"layers\.1"):
                build(tmp_path)
        else:
            assert list(build(tmp_path).layers) == [0, 1, 2]
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)
