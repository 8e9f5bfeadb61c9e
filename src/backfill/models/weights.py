"""Reads a model's tensors one at a time, by name and expected shape.

The model gets each tensor, or the part of it that its rank holds, when it packs it and drops it afterwards,
so that loading needs little more memory than one copy of the weights.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backfill.core.errors import CorruptModel
from backfill.kernels.quantized import QuantizedFormat, QuantizedWeight
from backfill.models.safetensors_files import SafetensorsFiles

_CPU = torch.device("cpu")
_DUMMY_STD = 0.02
_DUMMY_CHUNK = 1 << 22  # elements drawn at once: 16 MiB of float32


@dataclass(frozen=True, slots=True)
class Part:
    """Indices ``[start, stop)`` along dimension ``dim`` of a tensor."""

    dim: int
    start: int
    stop: int


class Checkpoint(ABC):
    """A source of a model's tensors."""

    dtype: torch.dtype

    @property
    @abstractmethod
    def digest(self) -> str:
        """Of where the tensors come from: another one for files that were changed."""

    @property
    def stored_in(self) -> str:
        """Names of the formats of matrices that are codes; empty where all are of ``dtype``."""
        return ""

    @property
    def file_types(self) -> str:
        """Names of the types of matrices in the file; empty where it is ``config.json`` that names one."""
        return ""

    @property
    def layer_width(self) -> float:
        """Bytes of a weight in the matrices of layers, on average."""
        return self._mean_width(of_layers=True)

    @property
    def table_width(self) -> float:
        """Bytes of a weight in the tables of the vocabulary, on average."""
        return self._mean_width(of_layers=False)

    def _mean_width(self, of_layers: bool) -> float:
        return self.dtype.itemsize

    def layer_formats(self, index: int) -> Mapping[str, QuantizedFormat | None]:
        """Of a layer's matrices, by their names in it, as far as they are known before they are read."""
        return {}

    def weight(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor | QuantizedWeight:
        """The matrix ``name`` as it is to be multiplied: of codes, where it is stored or wanted so.

        Args and raises: as ``get``.
        """
        return self.get(name, shape, part)

    @abstractmethod
    def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        """The tensor ``name``, contiguous, cast to ``dtype``: on the CPU, if it comes from a file.

        Args:
            shape: of the whole tensor.
            part: what of it is wanted, and nothing else is kept; None: all.
        Raises:
            CorruptModel: it is missing, unreadable or has another shape.
            UnsupportedModel: it holds integers, as quantized weights do.
        """


class SafetensorsCheckpoint(Checkpoint):
    """Tensors of ``model.safetensors``, or of the shards ``model.safetensors.index.json`` lists.

    Files are memory-mapped: a tensor that has the wanted dtype is a view of its file, and the smallest one
    keeps all pages mapped that were read. A model copies what it keeps. A file must not be rewritten in place
    while it is in use.
    """

    def __init__(self, folder: str | Path, *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._files = SafetensorsFiles(Path(folder))
        self._opened: dict[Path, Any] = {}

    @property
    def digest(self) -> str:
        stats = [(path, path.stat()) for path in sorted(set(self._files.path_of.values()))]
        files = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        return hashlib.sha256(repr((files, self.dtype)).encode()).hexdigest()

    def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        self._files.check_floats(name)
        tensor = self._read(name, shape, _index_of(part)).to(self.dtype).contiguous()
        # Reads as fast as memory does, and passes NaN on.
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            path = self._files.path_of[self._files.stored_name(name)]
            kind = str(self.dtype).removeprefix("torch.")
            raise CorruptModel(f"{path}: tensor {name} holds values that are not finite numbers in {kind}")
        return tensor

    def _read(self, name: str, shape: Sequence[int], index: tuple[Any, ...]) -> Tensor:
        """As it is stored. Args and raises: as ``get``."""
        files = self._files
        files.check(name, shape)
        stored = files.stored_name(name)
        path = files.path_of[stored]
        try:
            tensor: Tensor = self._open(path).get_slice(stored)[index]
        except (SafetensorError, OSError, ValueError) as error:
            raise CorruptModel(f"{path}: tensor {name} cannot be read: {error}") from None
        return tensor

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError, ValueError) as error:
                raise CorruptModel(f"{path} is damaged or truncated: {error}") from None
        return self._opened[path]


class DummyCheckpoint(Checkpoint):
    """Random weights for any model; name, shape and seed determine them on each kind of device.

    Norm weights are 1 and norm biases 0. Others are normal with a standard deviation of 0.02 (less for very
    wide inputs), which keeps activations finite at any depth.
    """

    def __init__(self, *, dtype: torch.dtype, seed: int = 0, device: torch.device = _CPU) -> None:
        self.dtype = dtype
        self._seed = seed
        self._device = device

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"dummy {self._seed} {self.dtype}".encode()).hexdigest()

    def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        tensor = torch.empty(_shape_of(shape, part), dtype=self.dtype, device=self._device)
        if "norm" in name.split(".")[-2]:
            return tensor.fill_(1.0 if name.endswith("weight") else 0.0)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        std = min(_DUMMY_STD, shape[-1] ** -0.5)
        flat, num_kept = tensor.view(-1), 0
        for start in range(0, math.prod(shape), _DUMMY_CHUNK):
            if num_kept == flat.numel():
                break
            size = min(_DUMMY_CHUNK, math.prod(shape) - start)
            chunk = torch.empty(size, device=self._device).normal_(0.0, std, generator=generator)
            if part is not None:
                chunk = chunk[_within(part, shape, start, size).to(self._device)]
            flat[num_kept : num_kept + chunk.numel()] = chunk
            num_kept += chunk.numel()
        return tensor


def _shape_of(shape: Sequence[int], part: Part | None) -> tuple[int, ...]:
    """Of a part of a tensor of this shape."""
    sizes = list(shape)
    if part is not None:
        sizes[part.dim] = part.stop - part.start
    return tuple(sizes)


def _index_of(part: Part | None) -> tuple[Any, ...]:
    if part is None:
        return (...,)
    return (*[slice(None)] * part.dim, slice(part.start, part.stop))


def _within(part: Part, shape: Sequence[int], start: int, size: int) -> Tensor:
    """Which of the elements ``[start, start + size)`` of a tensor, row by row, are in the part: bool."""
    width = math.prod(shape[part.dim + 1 :])
    index = torch.arange(start, start + size).div_(width, rounding_mode="floor").remainder_(shape[part.dim])
    return (index >= part.start) & (index < part.stop)
