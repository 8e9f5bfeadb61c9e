"""What the headers of safetensors files say of their tensors; the HTTP process, which has no torch, asks too.

Source of the layout: the README of github.com/huggingface/safetensors. Its reader needs numpy or torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from backfill.core.errors import CorruptModel, UnsupportedModel
from backfill.models.quantization import SUPPORTED_METHODS, StoredQuantization
from backfill.models.weight_files import check_fetched, find_weights, is_index, shards_of

_LENGTH = struct.Struct("<Q")  # of the header in bytes, before it
_MAX_HEADER_BYTES = 100_000_000  # as the library's
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1}
FLOAT_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}  # also of GGUF files
_CODES = ("qweight", "weight_packed")  # what may stand for a weight


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor as a header describes it.

    Attributes:
        dtype: such as BF16.
        data_offsets: its bytes ``[begin, end)`` after the header.
    """

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SafetensorsFiles:
    """The tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` lists.

    Attributes:
        where: the file, or the index of the shards.
        path_of: the file of each tensor.
        tensors: by the names that they are stored by.

    Raises: ModelNotFound, UnsupportedModel, as ``find_weights``; CorruptModel for a file that is truncated or
        inconsistent, and for an index that does not match the files.
    """

    def __init__(self, folder: Path) -> None:
        self.where = where = find_weights(folder, "safetensors")
        placed = shards_of(where) if is_index(where) else None
        paths = [where] if placed is None else sorted(set(placed.values()))
        headers = {path: _read_header(path) for path in paths}
        self.path_of: Mapping[str, Path] = dict.fromkeys(headers[where], where) if placed is None else placed
        for name, path in self.path_of.items():
            if name not in headers[path]:
                raise CorruptModel(f"{path}: tensor {name} is missing, but {self.where.name} places it there")
        self.tensors: Mapping[str, StoredTensor] = {
            name: headers[path][name] for name, path in self.path_of.items()
        }

    def stored_name(self, name: str) -> str:
        """A checkpoint saved from the bare decoder lacks the leading ``model.``."""
        bare = name.removeprefix("model.")
        return bare if name not in self.tensors and bare in self.tensors else name

    def find(self, name: str) -> StoredTensor | None:
        """The tensor ``name``; None if there is none."""
        return self.tensors.get(self.stored_name(name))

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises: CorruptModel for a tensor that is missing or has another shape."""
        found = self.find(name)
        if found is None:
            codes = [kind for kind in _CODES if self.find(_beside(name, kind)) is not None]
            hint = f"; its {codes[0]} needs a quantization_config in config.json" if codes else ""
            raise CorruptModel(f"tensor {name} {list(shape)} is missing from {self.where}{hint}")
        if found.shape != list(shape):
            path = self.path_of[self.stored_name(name)]
            raise CorruptModel(f"{path}: tensor {name} has shape {found.shape}, expected {list(shape)}")

    def has_codes(self, name: str, stored: StoredQuantization) -> bool:
        """Whether the matrix ``name`` is stored as codes, and not beside those as floats."""
        found = self.find(_beside(name, stored.tensors.codes))
        return found is not None and (stored.tensors.codes != "weight" or found.dtype not in FLOAT_TYPES)

    def check_codes(self, name: str, shape: Sequence[int], stored: StoredQuantization) -> None:
        """Raises: CorruptModel for a matrix of codes whose tensors are not as the configuration says."""
        for kind, types, expected in stored.stored_shapes(*shape):
            tensor = _beside(name, kind)
            found = self.find(tensor)
            if found is None:
                raise CorruptModel(f"tensor {tensor} {expected} is missing from {self.where}")
            if found.shape != expected or found.dtype not in types:
                path = self.path_of[self.stored_name(tensor)]
                groups = f"groups of {stored.group}" if stored.group else "one group"
                raise CorruptModel(
                    f"{path}: tensor {tensor} is {found.dtype} {found.shape}, "
                    f"expected {' or '.join(types)} {expected} for {stored.method} of {stored.bits} bits in "
                    f"{groups} (quantization_config in config.json)"
                )

    def check_floats(self, name: str) -> None:
        """Raises: UnsupportedModel for a tensor, which is there, of integers, as quantized weights are."""
        found = self.find(name)
        if found is not None and found.dtype not in FLOAT_TYPES:
            raise UnsupportedModel(
                f"{self.path_of[self.stored_name(name)]}: tensor {name} is {found.dtype}, which is not "
                f"supported; supported: {', '.join(FLOAT_TYPES.values())}; with a quantization_config in "
                f"config.json {SUPPORTED_METHODS}"
            )


def _beside(name: str, kind: str) -> str:
    """The tensor that stands for the ``weight`` at the end of a name."""
    return name.removesuffix("weight") + kind


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Raises: CorruptModel."""
    try:
        check_fetched(path)
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            size = _LENGTH.unpack(file.read(_LENGTH.size))[0]
            if size > min(num_bytes - _LENGTH.size, _MAX_HEADER_BYTES):
                raise _damaged(path, f"it has {num_bytes} bytes, and a header of {size}")
            entries = msgspec.json.decode(file.read(size), type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=StoredTensor) for name, raw in entries.items()}
    except OSError as error:
        raise CorruptModel(f"{path} cannot be read: {error.strerror or error}") from None
    except struct.error:
        raise _damaged(path, f"it has {num_bytes} bytes, and no header") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read: {str(error).replace('`', '')}") from None
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        width = _BYTES.get(tensor.dtype)
        if not 0 <= begin <= end or (width is not None and math.prod(tensor.shape) * width != end - begin):
            raise _damaged(path, f"tensor {name} of shape {tensor.shape} has bytes {begin} to {end}")
    taken = max((each.data_offsets[1] for each in tensors.values()), default=0)
    left = num_bytes - _LENGTH.size - size
    if taken != left:
        raise _damaged(path, f"its tensors take {taken} bytes, and it has {left} for them")
    return tensors


def _damaged(path: Path, how: str) -> CorruptModel:
    return CorruptModel(f"{path} is damaged or truncated: {how}")
