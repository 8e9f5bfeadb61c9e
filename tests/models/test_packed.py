"""Layers in movable memory and in files."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from backfill.core.errors import ConfigError, CorruptModel, ModelError
from backfill.kernels.base import Kernels
from backfill.kernels.cpu import CpuKernels, available_isas
from backfill.kernels.linears import Linear
from backfill.models import packed
from backfill.models.build import build_model
from backfill.models.checkpoint import open_checkpoint
from backfill.models.config import ModelConfig
from backfill.models.decoder import DecoderModel
from backfill.models.movable import PAGE_BYTES, MovableWeights, allocate_buffers
from backfill.models.packed import PackedFile, PackedFormat, packed_file
from backfill.models.weights import Checkpoint
from tests.models.tiny import CONFIGS, save_tiny_model

CPU = torch.device("cpu")
SHAPES = [  # kind, dtype, hidden size: whole tiles of inputs, and padded ones
    *((kind, torch.float32, 48) for kind in CONFIGS),
    ("llama-biased", torch.bfloat16, 48),
    ("llama-biased", torch.bfloat16, 96),
    ("opt", torch.bfloat16, 96),
]


def load(folder: Path, dtype: torch.dtype, kernels: Kernels) -> tuple[DecoderModel, Checkpoint]:
    checkpoint = open_checkpoint(folder, dtype=dtype)
    config = ModelConfig.from_folder(folder)
    model = build_model(config, checkpoint, kernels, max_positions=64, device=CPU, has_layers=False)
    return model, checkpoint


def linears(layer: MovableWeights) -> list[Linear]:
    return [value for value in layer._values() if hasattr(value, "in_features")]


@pytest.mark.parametrize(("kind", "dtype", "hidden"), SHAPES)
@pytest.mark.parametrize("isa", available_isas())
@torch.inference_mode()
def test_placed_layers_are_the_layers_that_were_copied_there(
    kind: str, dtype: torch.dtype, hidden: int, isa: str, tmp_path: Path
) -> None:
    changed = {"hidden_size": hidden, **({"word_embed_proj_dim": hidden} if kind == "opt" else {})}
    save_tiny_model(kind, tmp_path, **(changed if hidden != 48 else {}))
    model, checkpoint = load(tmp_path, dtype, CpuKernels(isa))
    first, second = model.load_layer(checkpoint, 0), model.load_layer(checkpoint, 1)
    assert first.layout() == second.layout()
    assert first.buffer_bytes % PAGE_BYTES == 0
    (buffer,) = allocate_buffers(1, first.buffer_bytes, CPU)
    placed = first.placed(buffer)
    assert placed.layout() == first.layout()
    for layer in (first, second, first):  # the same buffer, overwritten
        layer.copy_to(buffer)
        for found, expected in zip(placed.memory(), layer.memory(), strict=True):
            assert found.untyped_storage().data_ptr() >= buffer.untyped_storage().data_ptr()
            assert torch.equal(found, expected)
        for moved, original in zip(linears(placed), linears(layer), strict=True):
            x = torch.randn(5, original.in_features, dtype=torch.float32).to(dtype)
            assert torch.equal(moved(x), original(x))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return folder


class Source:
    """A model's layers, and how often they were loaded."""

    def __init__(self, folder: Path, seed: int | None = None) -> None:
        self.model, self.checkpoint = load(folder, torch.float32, CpuKernels())
        if seed is not None:
            self.checkpoint = open_checkpoint(folder, dtype=torch.float32, load_format="dummy", seed=seed)
        self.num_loaded = 0
        self.first = self.model.load_layer(self.checkpoint, 0)
        self.form = PackedFormat(
            "source", self.first.layout(), self.model.num_layers, self.first.buffer_bytes
        )

    def layer(self, index: int) -> MovableWeights:
        self.num_loaded += 1
        return self.model.load_layer(self.checkpoint, index)

    def file(self, path: Path) -> PackedFile:
        return packed_file(path, self.form, self.first, self.layer)


def assert_holds(file: PackedFile, source: Source) -> None:
    expected, found = allocate_buffers(2, source.form.layer_bytes, CPU)
    for index in range(source.model.num_layers):
        source.model.load_layer(source.checkpoint, index).copy_to(expected)
        file.read(index, found)
        assert torch.equal(expected, found)
    file.close()


def test_a_file_is_written_once_and_holds_every_layer(model_dir: Path, tmp_path: Path) -> None:
    source, path = Source(model_dir), tmp_path / "new" / "tiny.layers"
    assert_holds(source.file(path), source)
    assert source.num_loaded == 3
    assert path.stat().st_size == source.form.file_bytes
    written = path.stat().st_mtime_ns
    assert_holds(source.file(path), source)
    assert (source.num_loaded, path.stat().st_mtime_ns) == (3, written)


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, path.stat().st_size - PAGE_BYTES)
    elif how == "header":
        with path.open("r+b") as file:
            file.write(b"{")
            file.write(b"x" * 10)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "header", "missing"])
def test_a_damaged_file_is_written_again(model_dir: Path, tmp_path: Path, how: str) -> None:
    source, path = Source(model_dir), tmp_path / "tiny.layers"
    source.file(path).close()
    damage(path, how)
    assert_holds(source.file(path), source)
    assert source.num_loaded == 6


def test_a_file_of_other_weights_is_replaced(model_dir: Path, tmp_path: Path) -> None:
    """Also where they claim to come from the same source."""
    path = tmp_path / "tiny.layers"
    Source(model_dir, seed=1).file(path).close()
    other = Source(model_dir, seed=2)
    assert_holds(other.file(path), other)
    assert other.num_loaded == 3


def test_a_writer_that_fails_or_was_killed_leaves_nothing(model_dir: Path, tmp_path: Path) -> None:
    source, path = Source(model_dir), tmp_path / "tiny.layers"

    def failing(index: int) -> MovableWeights:
        if index == 2:
            raise CorruptModel("tensor is missing")
        return source.layer(index)

    with pytest.raises(CorruptModel, match="tensor is missing"):
        packed_file(path, source.form, source.first, failing)
    assert {each.suffix for each in tmp_path.iterdir()} <= {".lock"}
    leftover = tmp_path / f".{path.name}.tmp-killed"
    leftover.write_bytes(b"part")
    assert_holds(source.file(path), source)
    assert not leftover.exists()


def test_layers_of_several_formats_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path / "model", hidden_size=64, num_attention_heads=4)
    source, path = Source(tmp_path / "model"), tmp_path / "packed" / "tiny.layers"
    rounded = open_checkpoint(tmp_path / "model", dtype=torch.float32, quantization="int8")

    def layer(index: int) -> MovableWeights:
        return source.model.load_layer(rounded if index == 2 else source.checkpoint, index)

    with pytest.raises(ConfigError, match=r"`offload_interval` needs layers .* alike.* int8, int4 or none"):
        packed_file(path, source.form, source.first, layer)
    assert {each.suffix for each in path.parent.iterdir()} <= {".lock"}


def test_without_space_the_option_is_named_and_nothing_is_packed(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    source = Source(model_dir)
    with pytest.raises(
        ConfigError, match=r"`offload_interval` keeps weights in .* GiB, and .* no space"
    ) as info:
        source.file(tmp_path / "tiny.layers")
    assert str(tmp_path) in str(info.value)
    assert "BACKFILL_CACHE_ROOT" in str(info.value)
    assert source.num_loaded == 0


def test_a_folder_that_cannot_be_made_is_named(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot be kept in .*(Not a directory|File exists)"):
        Source(model_dir).file(tmp_path / "file" / "tiny.layers")


def test_a_file_system_without_direct_reads_serves_too(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dropped: list[tuple[int, int]] = []
    open_file, advise = os.open, os.posix_fadvise

    def without_direct(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(path, flags, *mode)

    def noted(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append((offset, length))
        advise(descriptor, offset, length, advice)

    source, path = Source(model_dir), tmp_path / "tiny.layers"
    source.file(path).close()
    monkeypatch.setattr(packed.os, "open", without_direct)
    monkeypatch.setattr(packed.os, "posix_fadvise", noted)
    file = PackedFile(path, source.form)
    assert not file.is_direct
    assert "no direct reads" in caplog.text
    assert_holds(file, source)
    size = source.form.layer_bytes
    assert dropped == [(PAGE_BYTES + index * size, size) for index in range(3)]


def test_a_layer_can_be_read_in_parts(model_dir: Path, tmp_path: Path) -> None:
    file = Source(model_dir).file(tmp_path / "tiny.layers")
    num_bytes = file.form.layer_bytes
    whole, parts = allocate_buffers(2, num_bytes, CPU)
    file.read(1, whole)
    parts.zero_()
    file.read(1, parts, PAGE_BYTES)
    assert not parts[:PAGE_BYTES].any()
    file.read(1, parts, 0, PAGE_BYTES)
    assert torch.equal(parts, whole)
    file.close()


def test_a_file_that_was_cut_off_meanwhile_is_an_error(model_dir: Path, tmp_path: Path) -> None:
    source, path = Source(model_dir), tmp_path / "tiny.layers"
    file = source.file(path)
    damage(path, "truncated")
    (buffer,) = allocate_buffers(1, source.form.layer_bytes, CPU)
    with pytest.raises(OSError, match="ends before layer 2"):
        file.read(2, buffer)
    file.close()


def test_starts_at_the_same_time_write_it_once(model_dir: Path, tmp_path: Path) -> None:
    """Locks are held by open files, so threads stand for processes here."""
    sources = [Source(model_dir) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        files = list(pool.map(lambda source: source.file(tmp_path / "tiny.layers"), sources))
    for file, source in zip(files, sources, strict=True):
        assert_holds(file, source)
    assert sorted(source.num_loaded for source in sources) == [0, 0, 3]
