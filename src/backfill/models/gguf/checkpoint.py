"""The weights of a GGUF file by their Hugging Face names: as stored, or dequantized."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from backfill.core.errors import CorruptModel
from backfill.kernels.quantized import INPUT_MULTIPLE, QuantizedFormat, QuantizedWeight
from backfill.models.gguf.file import GgufFile, GgufTensor
from backfill.models.gguf.quantized import packed_format, quantized
from backfill.models.gguf.tensors import PlannedTensor, planned_tensors
from backfill.models.safetensors_files import FLOAT_TYPES
from backfill.models.weight_files import GGUF_FILE
from backfill.models.weights import Checkpoint, Part

_DEQUANTIZED_AT_ONCE = 1 << 22  # weights


class GgufCheckpoint(Checkpoint):
    """Tensors of ``model.gguf`` in a folder that ``write_folder`` made. The file stays mapped.

    Args:
        keeps_codes: matrices of types that have a ``packed_format`` are given as they are stored.
    Raises: CorruptModel, UnsupportedModel.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, keeps_codes: bool) -> None:
        self.dtype = dtype
        self._keeps_codes = keeps_codes
        self._path = (folder / GGUF_FILE).resolve()  # errors name the user's file, not a link to it
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._tensors = {each.name: each for each in planned_tensors(GgufFile(self._path), config)}

    @property
    def digest(self) -> str:
        stat = self._path.stat()
        parts = str(self._path), stat.st_size, stat.st_mtime_ns, self.dtype, self._keeps_codes
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def stored_in(self) -> str:
        return _names(each.kind for each in self._matrices() if self._format_of(each) is not None)

    @property
    def file_types(self) -> str:
        return _names(each.kind for each in self._matrices())

    def layer_formats(self, index: int) -> Mapping[str, QuantizedFormat | None]:
        prefix = f"model.layers.{index}."
        found = {name: each.source for name, each in self._tensors.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): self._format_of(each) for name, each in found.items()}

    def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        tensor = self._planned(name, shape)
        start, stop = (part.start, part.stop) if part is not None and part.dim == 0 else (0, shape[0])
        if len(shape) == 1:
            return self._floats(tensor, 0, 1)[0, start:stop].contiguous()
        step = max(1, _DEQUANTIZED_AT_ONCE // shape[1])
        rows = [self._floats(tensor, row, min(row + step, stop)) for row in range(start, stop, step)]
        if part is not None and part.dim == 1:
            rows = [each[:, part.start : part.stop] for each in rows]
        return torch.cat(rows)

    def weight(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor | QuantizedWeight:
        tensor = self._planned(name, shape)
        rows, columns = (slice(0, size) for size in shape)
        if part is not None:
            wanted = slice(part.start, part.stop)
            rows, columns = (wanted, columns) if part.dim == 0 else (rows, wanted)
        is_whole = columns.start % INPUT_MULTIPLE == 0 and columns.stop % INPUT_MULTIPLE == 0
        if self._format_of(tensor.source) is None or not is_whole:
            return self.get(name, shape, part)
        # A part may begin or end within a block of the file.
        block = GGML_QUANT_SIZES[tensor.source.kind][0]
        first, last = columns.start // block * block, -(-columns.stop // block) * block
        order = rows if tensor.row_order is None else tensor.row_order[rows]
        found = quantized(tensor.source, order, slice(first, last), self.dtype)
        return (
            found
            if (first, last) == (columns.start, columns.stop)
            else found.columns(columns.start - first, columns.stop - first)
        )

    def _floats(self, tensor: PlannedTensor, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` in ``dtype``. Raises: CorruptModel for infinities and NaN."""
        values = tensor.source.dequantized(start, stop, tensor.row_order)
        if not np.isfinite(values).all():
            raise tensor.source.damaged("holds values that are not finite numbers")
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(self.dtype)

    def _matrices(self) -> Iterator[GgufTensor]:
        return (each.source for each in self._tensors.values() if len(each.source.shape) == 2)

    def _format_of(self, tensor: GgufTensor) -> QuantizedFormat | None:
        return packed_format(tensor.kind) if self._keeps_codes else None

    def _mean_width(self, of_layers: bool) -> float:
        num_bytes, num_weights = 0.0, 0
        for name, tensor in self._tensors.items():
            source = tensor.source
            if len(source.shape) == 2 and (".layers." in name) == of_layers:
                form, size = self._format_of(source), math.prod(source.shape)
                num_bytes += size * (self.dtype.itemsize if form is None else form.bytes_per_weight)
                num_weights += size
        return num_bytes / num_weights

    def _planned(self, name: str, shape: Sequence[int]) -> PlannedTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CorruptModel(f"tensor {name} {list(shape)} is missing from {self._path}")
        if tensor.source.shape != tuple(shape):
            raise CorruptModel(
                f"{self._path}: tensor {name} has shape {list(tensor.source.shape)}, expected {list(shape)}"
            )
        return tensor


def _names(kinds: Iterable[GGMLQuantizationType]) -> str:
    return " ".join(sorted({FLOAT_TYPES.get(kind.name, kind.name) for kind in kinds}))
