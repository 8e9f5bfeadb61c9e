import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from backfill.core.errors import CorruptModel, ModelNotFound, UnsupportedModel
from backfill.models import weights
from backfill.models.checkpoint import open_checkpoint
from backfill.models.weights import Checkpoint, Part


def make_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "model.a.weight": torch.randn(4, 6, generator=generator),
        "model.b.weight": torch.randn(3, generator=generator),
        "lm_head.weight": torch.randn(5, 4, generator=generator),
    }


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{i:05}.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_reads_and_casts(sharded: bool, tmp_path: Path) -> None:
    tensors = make_tensors()
    if sharded:
        write_shards(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.get(name, tensor.shape), tensor.bfloat16())


def parts_of(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dim: int) -> Tensor:
    """Three parts of different sizes, put together."""
    size = shape[dim]
    stops = (0, size // 4, size // 2 + 1, size)
    parts = [checkpoint.get(name, shape, Part(dim, *each)) for each in pairwise(stops)]
    assert all(part.is_contiguous() for part in parts)
    return torch.cat(parts, dim)


def test_parts_of_stored_tensors(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        for dim in range(tensor.dim()):
            assert torch.equal(parts_of(checkpoint, name, tuple(tensor.shape), dim), tensor.bfloat16())
    with pytest.raises(CorruptModel, match=r"model\.a\.weight has shape \[4, 6\], expected \[2, 6\]"):
        checkpoint.get("model.a.weight", (2, 6), Part(0, 0, 1))


@pytest.mark.parametrize("chunk", [1, 7, 999, 1 << 22])
def test_parts_of_dummy_tensors(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_DUMMY_CHUNK", chunk)
    checkpoint = open_checkpoint("nowhere", dtype=torch.float32, load_format="dummy")
    for name, shape in (("a.bias", (30,)), ("a.weight", (20, 30)), ("a.norm.weight", (30,))):
        for dim in range(len(shape)):
            assert torch.equal(parts_of(checkpoint, name, shape, dim), checkpoint.get(name, shape))


def test_bare_decoder_names(tmp_path: Path) -> None:
    save_file({"layers.0.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, dtype=torch.float32)
    assert torch.equal(checkpoint.get("model.layers.0.weight", (2,)), torch.ones(2))


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_file(make_tensors() | {"ids": torch.arange(3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, dtype=torch.float32)
    with pytest.raises(CorruptModel, match=r"tensor model\.c\.weight \[2, 3\] is missing"):
        checkpoint.get("model.c.weight", (2, 3))
    with pytest.raises(CorruptModel, match=r"model\.a\.weight has shape \[4, 6\], expected \[6, 4\]"):
        checkpoint.get("model.a.weight", (6, 4))
    with pytest.raises(UnsupportedModel, match=r"ids is torch\.int64"):
        checkpoint.get("ids", (3,))


def test_every_truncation_is_found_when_opening(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(make_tensors(), path)
    whole = path.read_bytes()
    for size in [*range(0, 64), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptModel, match=r"model\.safetensors is damaged or truncated"):
            open_checkpoint(tmp_path, dtype=torch.float32)


def test_damaged_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(make_tensors(), path)
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])
    with pytest.raises(CorruptModel, match=r"model\.safetensors"):
        open_checkpoint(tmp_path, dtype=torch.float32)


def test_shards_must_fit_the_index(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, make_tensors())
    write_index(tmp_path, weight_map | {"model.c.weight": weight_map["model.a.weight"]})
    with pytest.raises(CorruptModel, match=r"tensor model\.c\.weight is missing"):
        open_checkpoint(tmp_path, dtype=torch.float32)
    write_index(tmp_path, weight_map | {"model.c.weight": "model-9.safetensors"})
    with pytest.raises(CorruptModel, match=r"model-9\.safetensors does not exist"):
        open_checkpoint(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("weight_map", [None, {"a": 1}, {"a": "../model.safetensors"}, {"a": ".."}])
def test_malformed_index(weight_map: object, tmp_path: Path) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CorruptModel, match=r"index\.json"):
        open_checkpoint(tmp_path, dtype=torch.float32)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="holds no weights"):
        open_checkpoint(tmp_path, dtype=torch.float32)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="convert it to safetensors"):
        open_checkpoint(tmp_path, dtype=torch.float32)


def test_dummy_weights_depend_on_name_and_seed_alone() -> None:
    first = open_checkpoint("nowhere", dtype=torch.float32, load_format="dummy")
    again = open_checkpoint("nowhere", dtype=torch.bfloat16, load_format="dummy")
    other = open_checkpoint("nowhere", dtype=torch.float32, load_format="dummy", seed=1)
    name, shape = "model.layers.0.mlp.up_proj.weight", (300, 200)
    again.get("model.other.weight", (7,))
    weight = first.get(name, shape)
    assert torch.equal(weight.bfloat16(), again.get(name, shape))
    assert not torch.equal(weight, other.get(name, shape))
    assert not torch.equal(weight, first.get(name.replace("0", "1"), shape))
    assert weight.std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    "name", ["model.layers.0.input_layernorm", "model.norm", "model.decoder.final_layer_norm"]
)
def test_dummy_norms_are_the_identity(name: str) -> None:
    checkpoint = open_checkpoint("nowhere", dtype=torch.float32, load_format="dummy")
    assert torch.equal(checkpoint.get(f"{name}.weight", (4,)), torch.ones(4))
    assert torch.equal(checkpoint.get(f"{name}.bias", (4,)), torch.zeros(4))
