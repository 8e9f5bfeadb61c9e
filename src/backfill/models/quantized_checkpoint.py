"""AWQ, GPTQ and compressed-tensors checkpoints: matrices of codes in safetensors, read without loss.

All have a scale, and perhaps a zero point, for each group of inputs of an output: a weight is
``(code - zero point) * scale``. A word has its first code in the lowest bits.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backfill.core.errors import CorruptModel, UnsupportedModel
from backfill.kernels.quantized import INPUT_MULTIPLE, QuantizedFormat, QuantizedWeight
from backfill.models.quantization import IN, OUT, StoredQuantization
from backfill.models.weights import Part, SafetensorsCheckpoint

logger = logging.getLogger(__name__)

_SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Codes:
    """Part of a matrix.

    Attributes:
        codes: uint8 ``[out, in]``, of ``bits``.
        scales: ``[out, in / group]``, as they are stored.
        zeros: uint8 ``[out, in / group]``; None: the middle code.
    """

    bits: int
    group: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def values(self) -> Tensor:
        """float32 ``[out, in]``."""
        zeros = self.middle if self.zeros is None else self.zeros.float()[..., None]
        grouped = self.codes.view(*self.scales.shape, self.group).float()
        return ((grouped - zeros) * self.scales.float()[..., None]).view(self.codes.shape)

    def quantized(self, form: QuantizedFormat, dtype: torch.dtype) -> QuantizedWeight:
        """The same values, exactly."""
        scales = self.scales.to(form.scale_type)
        zeros = torch.full_like(scales, self.middle) if self.zeros is None else self.zeros.to(form.scale_type)
        codes, origin = self.codes, 0
        if self.bits == 8:
            codes, origin = (codes ^ 128).view(torch.int8), 128
        elif form.bits == 8:
            codes = codes.view(torch.int8) - zeros.to(torch.int8).repeat_interleave(self.group, dim=1)
        offsets = (origin - zeros) * scales if form.has_offsets else None
        return QuantizedWeight(form, dtype, codes, scales, offsets)


class QuantizedCheckpoint(SafetensorsCheckpoint):
    """Matrices of codes, and all other tensors as floats.

    Args:
        keeps_codes: matrices are given as they are stored, where their groups allow.
    Raises: UnsupportedModel, where inputs are grouped in an order of their own; and as the base class.
    """

    def __init__(
        self, folder: str | Path, *, dtype: torch.dtype, stored: StoredQuantization, keeps_codes: bool
    ) -> None:
        super().__init__(folder, dtype=dtype)
        self._stored = stored
        self._layout = stored.tensors
        self._keeps_codes = keeps_codes
        self._check_order()
        if stored.has_activations:
            logger.info("%s also rounds activations or KV: here they are not rounded", stored.method)

    @property
    def digest(self) -> str:
        parts = super().digest, self._stored, self._keeps_codes
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def stored_in(self) -> str:
        keeps_any = min(self.layer_width, self.table_width) < self.dtype.itemsize
        return self.file_types if keeps_any else ""

    @property
    def file_types(self) -> str:
        return f"{self._stored.method}-int{self._stored.bits}"

    def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        if not self._files.has_codes(name, self._stored):
            return super().get(name, shape, part)
        return self._codes_of(name, shape, part).values().to(self.dtype)

    def weight(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor | QuantizedWeight:
        if not self._keeps_codes or not self._files.has_codes(name, self._stored):
            return self.get(name, shape, part)
        found = self._codes_of(name, shape, part)
        form = self._format(name, found.codes.shape[1], found.group, found.zeros is not None)
        return found.values().to(self.dtype) if form is None else found.quantized(form, self.dtype)

    def _check_order(self) -> None:
        """Raises: UnsupportedModel unless groups are of neighbouring inputs."""
        for name, path in self._files.path_of.items():
            if name.endswith(".g_idx"):
                found = self._open(path).get_tensor(name)
                group = self._stored.group or len(found)
                if not torch.equal(found.long(), torch.arange(len(found)) // group):
                    raise UnsupportedModel(
                        f"{path}: tensor {name} has groups of inputs in the order of their activations "
                        "(desc_act), which is not supported; supported: groups of neighbouring inputs"
                    )

    def _named(self, name: str, kind: str) -> str:
        return self._files.stored_name(name.removesuffix("weight") + kind)

    def _format(self, name: str, num_inputs: int, group: int, has_zeros: bool) -> QuantizedFormat | None:
        """With which no product is rounded; None: the matrix is dequantized.

        A code times a scale of half precision or bf16 is exact in float32. Of a float32 scale it is not, and
        may only be rounded once: there a code has its zero point subtracted, which with 8 bits is no int8.
        """
        bits = self._stored.bits
        scales = self._files.find(self._named(name, self._layout.scales))
        stored_type = None if scales is None else scales.dtype
        if num_inputs % INPUT_MULTIPLE or (group != 16 and group % INPUT_MULTIPLE):
            return None
        if stored_type == "F32":
            is_int8 = bits == 4 or not has_zeros
            return QuantizedFormat(8, group, torch.float32, has_offsets=False) if is_int8 else None
        scale_type = torch.float16 if stored_type == "F16" and not has_zeros else torch.float32
        return QuantizedFormat(bits, group, scale_type, has_offsets=has_zeros)

    def _codes_of(self, name: str, shape: Sequence[int], part: Part | None) -> _Codes:
        """A matrix of codes, or a part. Raises: CorruptModel."""
        layout, (num_rows, num_inputs) = self._layout, shape
        rows, columns = slice(0, num_rows), slice(0, num_inputs)
        if part is not None:
            wanted = slice(part.start, part.stop)
            rows, columns = (wanted, columns) if part.dim == OUT else (rows, wanted)
        if (stored_shape := self._named(name, "weight_shape")) in self._files.path_of:
            found = self._read(stored_shape, (2,), (...,)).tolist()
            if found != list(shape):
                raise self._damaged(name, f"has shape {found}, expected {list(shape)}")
        whole = self._stored.group or num_inputs
        of_scales = num_rows, -(-num_inputs // whole)
        # Parts, and a last group that is shorter, may begin or end within a group of the file.
        group = math.gcd(whole, columns.start, columns.stop)
        index = torch.arange(columns.start, columns.stop, group) // whole
        scales = self._matrix(self._named(name, layout.scales), of_scales, (rows, slice(None)))
        if not scales.isfinite().all():
            raise self._damaged(name, "has scales that are not finite numbers")
        zeros = self._zeros(name, of_scales, rows)
        zeros = None if zeros is None else zeros[:, index]
        codes = self._integers(self._named(name, layout.codes), shape, (rows, columns), layout.packed)
        return _Codes(self._stored.bits, group, codes, scales[:, index], zeros)

    def _zeros(self, name: str, shape: tuple[int, int], rows: slice) -> Tensor | None:
        """Zero points ``[out, groups]``; None: all are the middle code, as the configuration says."""
        stored, is_symmetric = self._named(name, self._layout.zeros), not self._stored.has_zero_points
        # Symmetric AWQ and GPTQ may have zero points nevertheless.
        has_none = self._stored.method == "compressed-tensors" or stored not in self._files.path_of
        if is_symmetric and has_none:
            return None
        along = None if self._layout.packed is None else OUT
        zeros = self._integers(stored, shape, (rows, slice(0, shape[1])), along)
        is_middle = is_symmetric and bool((zeros == 1 << (self._stored.bits - 1)).all())
        return None if is_middle else zeros

    def _integers(
        self, name: str, shape: Sequence[int], window: tuple[slice, slice], along: int | None
    ) -> Tensor:
        """Part of a tensor of codes or zero points: uint8 ``[out, in or groups]``, of ``bits``.

        Args:
            shape: of the whole, ``[out, in or groups]``.
            along: the dimension of neighbours in a word; None: signed, a byte each.
        """
        bits = self._stored.bits
        if along is None:
            signed = self._matrix(name, shape, window, torch.int8)
            codes = signed.contiguous().view(torch.uint8) + (1 << (bits - 1))
            if bits == 4 and (codes > 15).any():
                raise self._damaged(name, "holds values of more than 4 bits")
            return codes
        per_word = 32 // bits
        in_words, index = list(shape), list(window)
        in_words[along] = -(-shape[along] // per_word)
        start, stop = window[along].start, window[along].stop
        index[along] = slice(start // per_word, -(-stop // per_word))
        words = self._matrix(name, in_words, index, torch.int32)
        if self._layout.is_zero_less_one and name.endswith(self._layout.zeros):  # subtracted from words
            words = words + (0x11111111 if bits == 4 else 0x01010101)
        words, mask = words.contiguous(), (1 << bits) - 1
        order = self._layout.order or range(per_word)
        places = [(words >> bits * place & mask).to(torch.uint8) for place in order]
        codes = torch.stack(places, dim=along + 1).flatten(along, along + 1)
        return codes.narrow(along, start % per_word, stop - start).contiguous()

    def _matrix(
        self, name: str, shape: Sequence[int], index: Sequence[slice], kind: torch.dtype | None = None
    ) -> Tensor:
        """Part of a tensor, with outputs first; ``kind`` is what it must be of, None: floats."""
        if self._layout.has_inputs_first:
            tensor = self._read(name, shape[::-1], tuple(index[::-1])).T
        else:
            tensor = self._read(name, shape, tuple(index))
        if tensor.dtype not in (_SCALE_TYPES if kind is None else (kind,)):
            raise self._damaged(name, f"is {tensor.dtype}, expected {kind or 'floats'}")
        return tensor

    def _damaged(self, name: str, how: str) -> CorruptModel:
        """The error, for the caller to raise."""
        return CorruptModel(f"{self._files.where}: tensor {name} {how}")

    def _mean_width(self, of_layers: bool) -> float:
        layout, num_bytes, num_weights = self._layout, 0.0, 0
        for stored, tensor in self._files.tensors.items():
            module, _, kind = stored.rpartition(".")
            sizes = list(tensor.shape)
            if kind not in ("weight", layout.codes) or ("layers." in stored) != of_layers or len(sizes) != 2:
                continue
            width: float = self.dtype.itemsize
            if kind == layout.codes and self._files.has_codes(name := f"{module}.weight", self._stored):
                sizes = sizes[::-1] if layout.has_inputs_first else sizes
                if layout.packed is not None:
                    sizes[layout.packed] *= 32 // self._stored.bits
                group = math.gcd(self._stored.group or sizes[IN], sizes[IN])
                form = self._format(name, sizes[IN], group, self._stored.has_zero_points)
                width = form.bytes_per_weight if form is not None and self._keeps_codes else width
            num_bytes += math.prod(sizes) * width
            num_weights += math.prod(sizes)
        return num_bytes / num_weights if num_weights else self.dtype.itemsize
