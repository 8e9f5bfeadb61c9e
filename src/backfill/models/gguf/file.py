"""Reads a GGUF file's header, metadata and tensors.

The format's constants and the dequantisers are those of the ``gguf`` package. Its reader is not used: it
takes seconds for a large vocabulary and reads out of bounds in a damaged file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from backfill.core.errors import CorruptModel, ModelNotFound, UnsupportedModel

V = TypeVar("V")

_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32  # bytes
# Least bytes of each in a header: an empty key or name, and the smallest fields after it.
_SIZE = struct.Struct("<Q")  # of a string in bytes
_MIN_STRING_BYTES = _SIZE.size
_MIN_FIELD_BYTES = _MIN_STRING_BYTES + 4 + 1  # type, value
_MIN_TENSOR_BYTES = _MIN_STRING_BYTES + 4 + 4 + 8  # number of dimensions, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as stored; ``rows``, a view of the file, is uint8 ``[product of shape[:-1], row bytes]``."""

    path: Path
    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in torch
    kind: GGMLQuantizationType
    rows: npt.NDArray[np.uint8]

    def dequantized(
        self, start: int, stop: int, order: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[Any]:
        """Rows ``[start, stop)`` as float32 ``[stop - start, shape[-1]]``, after reordering by ``order``.

        Raises: UnsupportedModel for a type that the ``gguf`` package has no dequantiser for.
        """
        rows = self.rows[start:stop] if order is None else self.rows[order[start:stop]]
        try:
            values: npt.NDArray[Any] = dequantize(np.ascontiguousarray(rows), self.kind)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{self.path}: tensor {self.name} is of type {self.kind.name}, not supported; "
                f"supported: {_readable_types()}"
            ) from None
        return values.reshape(stop - start, self.shape[-1])

    def damaged(self, how: str) -> CorruptModel:
        """The error, for the caller to raise."""
        return CorruptModel(f"{self.path} is damaged: tensor {self.name} {how}")


@dataclass(frozen=True, slots=True)
class Texts:
    """An array of strings as stored: an engine needs none of a vocabulary's hundred thousand."""

    path: Path
    data: mmap.mmap
    start: int  # in bytes
    count: int

    def decoded(self) -> list[str]:
        """Raises: CorruptModel for bytes that are not UTF-8."""
        texts, start = [], self.start
        for _ in range(self.count):
            (size,) = _SIZE.unpack_from(self.data, start)
            start += _SIZE.size
            try:
                texts.append(self.data[start : start + size].decode())
            except UnicodeDecodeError:
                raise CorruptModel(f"{self.path} is damaged: a string at byte {start} is not UTF-8") from None
            start += size
        return texts


class GgufFile:
    """Metadata and tensors of a GGUF file (versions 2 and 3, little-endian), bounds checked.

    Source of the layout: docs/gguf.md of ggml.

    Args:
        path: the file; it stays mapped while one of its tensors lives.
    Attributes:
        fields: metadata values by key, arrays as lists, those of strings as ``Texts``.
        tensors: by name, in the file's order.
    Raises:
        ModelNotFound: no such file.
        CorruptModel: not a GGUF file, or a length or type in its header is impossible.
        UnsupportedModel: another version, or a tensor of an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFound(f"{path} does not exist") from None
        except (OSError, ValueError) as error:
            raise CorruptModel(f"{path} cannot be read: {error}") from None
        cursor = _Cursor(path, mapped)
        num_tensors, num_fields = _read_preamble(cursor)
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.text()
            self.fields[key] = cursor.value(cursor.number("I"))
        self.tensors = {t.name: t for t in _read_tensors(cursor, num_tensors, self.fields)}

    @overload
    def get(self, key: str, kind: type[V]) -> V | None: ...

    @overload
    def get(self, key: str, kind: type[V], default: V) -> V: ...

    def get(self, key: str, kind: type[V], default: V | None = None) -> V | None:
        """A metadata value of type ``kind``, or ``default``. Raises: CorruptModel on another type."""
        value = self.fields.get(key, default)
        if isinstance(value, Texts):
            value = value.decoded()
        if kind is float and isinstance(value, int):
            value = float(value)
        if value is not None and not isinstance(value, kind):
            raise CorruptModel(f"{self.path}: {key} must be {kind.__name__}, got {str(value)[:60]!r}")
        return value

    def need(self, key: str, kind: type[V]) -> V:
        """A metadata value of type ``kind``. Raises: CorruptModel if it is missing or of another type."""
        value = self.get(key, kind)
        if value is None:
            raise CorruptModel(f"{self.path}: {key} is missing from the metadata")
        return value


class _Cursor:
    """Reads forward through a mapped GGUF file; nothing is read or allocated beyond its end."""

    _SCALARS: ClassVar = {
        GGUFValueType.UINT8: "B",
        GGUFValueType.INT8: "b",
        GGUFValueType.UINT16: "H",
        GGUFValueType.INT16: "h",
        GGUFValueType.UINT32: "I",
        GGUFValueType.INT32: "i",
        GGUFValueType.FLOAT32: "f",
        GGUFValueType.BOOL: "?",
        GGUFValueType.UINT64: "Q",
        GGUFValueType.INT64: "q",
        GGUFValueType.FLOAT64: "d",
    }

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def take(self, size: int) -> int:
        """Move past ``size`` bytes and return the first one's offset. Raises: CorruptModel beyond the end."""
        start = self.offset
        if size > len(self.data) - start:
            raise CorruptModel(f"{self.path} is damaged or truncated: it ends within its header")
        self.offset = start + size
        return start

    def check_count(self, what: str, count: int, item_bytes: int) -> None:
        """Raise CorruptModel unless ``count`` items of at least ``item_bytes`` fit into the rest."""
        most = (len(self.data) - self.offset) // item_bytes
        if count > most:
            raise CorruptModel(
                f"{self.path} is damaged or truncated: byte {self.offset} begins {count} {what}, "
                f"but the file can hold at most {most}"
            )

    def number(self, code: str) -> Any:
        """The next number; ``code`` is a format of the struct module."""
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        """The next string. Raises: CorruptModel beyond the end or for bytes that are not UTF-8."""
        return self._texts(1).decoded()[0]

    def _texts(self, count: int) -> Texts:
        """The next strings, whose sizes are checked."""
        data, end, start = self.data, len(self.data), self.offset
        texts = Texts(self.path, data, start, count)
        for _ in range(count):
            self.offset = start
            if end - start < _SIZE.size:
                self.take(_SIZE.size)  # raises
            (size,) = _SIZE.unpack_from(data, start)
            start += _SIZE.size
            if size > end - start:
                self.offset = start
                self.check_count("bytes of a string", size, 1)  # raises
            start += size
        self.offset = start
        return texts

    def value(self, kind: int) -> Any:
        """The next metadata value, of a ``GGUFValueType``. Raises: CorruptModel."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self.number(self._code(kind))

    def _array(self, kind: int, length: int) -> list[Any] | Texts:
        if kind == GGUFValueType.STRING:
            self.check_count("strings of an array", length, _MIN_STRING_BYTES)
            return self._texts(length)
        # One read for all scalars: a vocabulary has several hundred thousand.
        dtype = np.dtype("<" + self._code(kind))
        self.check_count("values of an array", length, dtype.itemsize)
        start = self.take(length * dtype.itemsize)
        values: list[Any] = np.frombuffer(self.data, dtype, length, start).tolist()
        return values

    def _code(self, kind: int) -> str:
        try:
            return self._SCALARS[GGUFValueType(kind)]
        except (ValueError, KeyError):
            raise CorruptModel(f"{self.path} is damaged: metadata value of type {kind}") from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata fields. Raises: CorruptModel, UnsupportedModel."""
    start = cursor.take(4)
    if cursor.data[start : start + 4] != b"GGUF":
        raise CorruptModel(f"{cursor.path} is not a GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        found = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise UnsupportedModel(
            f"{cursor.path}: {found} GGUF is not supported; supported: versions 2 and 3, little-endian"
        )
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    cursor.check_count("tensors", num_tensors, _MIN_TENSOR_BYTES)
    cursor.check_count("metadata fields", num_fields, _MIN_FIELD_BYTES)
    return num_tensors, num_fields


def _read_tensors(cursor: _Cursor, count: int, fields: Mapping[str, Any]) -> Iterator[GgufTensor]:
    """The tensors whose headers come next, as views of the data after them. Raises as ``GgufFile``."""
    cursor.check_count("tensors", count, _MIN_TENSOR_BYTES)  # again: the metadata took some of the bytes
    headers = [_read_tensor_header(cursor) for _ in range(count)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CorruptModel(f"{cursor.path}: general.alignment must be a positive integer, got {alignment!r}")
    base = math.ceil(cursor.offset / alignment) * alignment
    for name, shape, code, offset in headers:
        kind = _tensor_type(cursor.path, name, code)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise CorruptModel(
                f"{cursor.path}: tensor {name[:60]!r} has shape {list(shape)}, impossible in {kind.name}"
            )
        num_rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
        num_left = max(0, len(cursor.data) - base - offset)
        if num_rows * row_bytes > num_left:
            raise CorruptModel(
                f"{cursor.path} is damaged or truncated: tensor {name[:60]!r} of shape {list(shape)} takes "
                f"{num_rows * row_bytes} bytes, but the file holds {num_left} from where it begins"
            )
        raw = np.frombuffer(cursor.data, np.uint8, num_rows * row_bytes, base + offset)
        yield GgufTensor(cursor.path, name, shape, kind, raw.reshape(num_rows, row_bytes))


def _read_tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset in bytes from the start of the data. Raises: CorruptModel."""
    name, num_dims = cursor.text(), cursor.number("I")
    if num_dims > _MAX_DIMS:
        raise CorruptModel(
            f"{cursor.path} is damaged: tensor {name[:60]!r} has {num_dims} dimensions, more than {_MAX_DIMS}"
        )
    dims = [cursor.number("Q") for _ in range(num_dims)]
    # The file has the fastest dimension first.
    return name, tuple(reversed(dims)), cursor.number("I"), cursor.number("Q")


def _tensor_type(path: Path, name: str, code: int) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(code)
    except ValueError:
        raise UnsupportedModel(
            f"{path}: tensor {name[:60]!r} has unknown type {code}; supported: {_readable_types()}"
        ) from None


def _readable_types() -> str:
    """Names of the types that the ``gguf`` package dequantizes; it has no public list of them."""
    names = []
    for kind, (_, block_bytes) in GGML_QUANT_SIZES.items():
        with suppress(NotImplementedError):
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            names.append(kind.name)
    return ", ".join(names)
