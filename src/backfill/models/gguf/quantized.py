"""Quantized types of GGUF as codes, scales and offsets, without loss.

The layouts of blocks are those of ggml (``ggml-common.h``) as the ``gguf`` package has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K
from torch import Tensor

from backfill.kernels.quantized import QuantizedFormat, QuantizedWeight
from backfill.models.gguf.file import GgufTensor

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[Any]


class _Parts(NamedTuple):
    """Of blocks ``[N]``: codes ``[N, inputs]``, scales and offsets ``[N, groups]``, units ``[N, 1 or 2]``."""

    codes: Values
    scales: Values
    offsets: Values | None
    units: Values | None = None


def _half(blocks: Bytes, start: int) -> Values:
    """The float16 at ``start`` of each block: ``[N, 1]``."""
    return np.ascontiguousarray(blocks.view(np.float16)[:, start // 2, None])


def _nibbles(codes: Bytes) -> Bytes:
    """Low halves, then high ones."""
    return np.concatenate((codes & 15, codes >> 4), axis=-1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """Bit i of a block's 32 is input i's: 0 or 16."""
    bits: Bytes = np.unpackbits(blocks[:, start : start + 4], axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(blocks: Bytes) -> _Parts:
    return _Parts(_nibbles(blocks[:, 2:]), _half(blocks, 0), None)


def _q4_1(blocks: Bytes) -> _Parts:
    return _Parts(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> _Parts:
    codes = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).view(np.int8) - np.int8(16)
    return _Parts(codes, _half(blocks, 0), None)


def _q5_1(blocks: Bytes) -> _Parts:
    codes = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).view(np.int8)
    return _Parts(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> _Parts:
    return _Parts(blocks[:, 2:].view(np.int8), _half(blocks, 0), None)


def _k_factors(blocks: Bytes) -> tuple[Values, Values, Values]:
    """Scales and offsets of the eight groups of a Q4_K or Q5_K block, and their units."""
    scales, mins = Q4_K.get_scale_min(blocks[:, 4:16])
    units = np.concatenate((_half(blocks, 0), -_half(blocks, 2)), axis=-1)
    return scales.view(np.int8), mins.view(np.int8), units


def _q4_k(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return _Parts(codes, *_k_factors(blocks))


def _q5_k(blocks: Bytes) -> _Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _Parts((low | high << 4).reshape(-1, 256).view(np.int8), *_k_factors(blocks))


def _q6_k(blocks: Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 8, 32)
    codes = (low | high << 4).reshape(-1, 256).view(np.int8) - np.int8(32)
    return _Parts(codes, blocks[:, 192:208].view(np.int8), None, _half(blocks, 208))


class _Type(NamedTuple):
    form: QuantizedFormat
    parts: Callable[[Bytes], _Parts]


_HALF, _UNITS = torch.float16, torch.int8
_TYPES = {
    GGMLQuantizationType.Q4_0: _Type(QuantizedFormat(4, 32, _HALF, has_offsets=False), _q4_0),
    GGMLQuantizationType.Q4_1: _Type(QuantizedFormat(4, 32, _HALF, has_offsets=True), _q4_1),
    GGMLQuantizationType.Q5_0: _Type(QuantizedFormat(8, 32, _HALF, has_offsets=False), _q5_0),
    GGMLQuantizationType.Q5_1: _Type(QuantizedFormat(8, 32, _HALF, has_offsets=True), _q5_1),
    GGMLQuantizationType.Q8_0: _Type(QuantizedFormat(8, 32, _HALF, has_offsets=False), _q8_0),
    GGMLQuantizationType.Q4_K: _Type(QuantizedFormat(4, 32, _UNITS, has_offsets=True), _q4_k),
    GGMLQuantizationType.Q5_K: _Type(QuantizedFormat(8, 32, _UNITS, has_offsets=True), _q5_k),
    GGMLQuantizationType.Q6_K: _Type(QuantizedFormat(8, 16, _UNITS, has_offsets=False), _q6_k),
}


def packed_format(kind: GGMLQuantizationType) -> QuantizedFormat | None:
    """How weights of a type are kept; None: widened."""
    found = _TYPES.get(kind)
    return None if found is None else found.form


def quantized(
    tensor: GgufTensor, rows: slice | npt.NDArray[np.int64], columns: slice, dtype: torch.dtype
) -> QuantizedWeight:
    """Part of a tensor of a type that has a ``packed_format``.

    Args:
        rows: in the order wanted.
        columns: at multiples of the inputs of a block of the type.
    Raises: CorruptModel for a scale that is not a finite number.
    """
    form, parts = _TYPES[tensor.kind]
    num_inputs, num_bytes = GGML_QUANT_SIZES[tensor.kind]
    blocks = tensor.rows.reshape(len(tensor.rows), -1, num_bytes)
    blocks = blocks[rows, columns.start // num_inputs : columns.stop // num_inputs]
    num_rows = len(blocks)
    found = parts(np.ascontiguousarray(blocks).reshape(-1, num_bytes))
    if not all(np.isfinite(each).all() for each in found[1:] if each is not None):
        raise tensor.damaged("holds values that are not finite numbers")

    def of_rows(values: Values) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).reshape(num_rows, -1))

    offsets = None if found.offsets is None else of_rows(found.offsets)
    units = None
    if found.units is not None:
        units = of_rows(found.units).view(num_rows, -1, found.units.shape[1])
    return QuantizedWeight(form, dtype, of_rows(found.codes), of_rows(found.scales), offsets, units)
