"""Weights of 4 or 8 bits, in the one form that all formats of files are read into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

INPUT_MULTIPLE = 32  # of a weight, and of what a part of one begins with
UNIT_INPUTS = 256  # that share a unit of scales
_ROUNDED_AT_ONCE = 1 << 20  # weights
_SUBNORMAL_STEP = 2.0**-24  # between numbers of half precision below 2**-14
_RANGE_PARTS = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """How a weight is stored: weights of one format can be one matrix.

    Attributes:
        bits: of a code, 4 or 8.
        group: inputs that share a scale: 16 or a multiple of 32.
        scale_type: of scales and offsets: float16, float32, or int8, in units that 256 inputs share; groups
            are then of 16 or 32.
        has_offsets: else 8 in a code of 4 bits stands for 0.
    """

    bits: int
    group: int
    scale_type: torch.dtype
    has_offsets: bool

    @property
    def has_units(self) -> bool:
        return self.scale_type == torch.int8

    @property
    def block_inputs(self) -> int:
        """Inputs whose codes, scales and offsets lie together in panels: weights have whole blocks."""
        return UNIT_INPUTS if self.has_units else max(self.group, INPUT_MULTIPLE)

    @property
    def bytes_per_weight(self) -> float:
        of_group = self.scale_type.itemsize / self.group + (2 / UNIT_INPUTS if self.has_units else 0)
        return self.bits / 8 + of_group * (2 if self.has_offsets else 1)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix ``[out, in]`` whose element is ``code * scale + offset``, rounded to ``dtype``.

    Attributes:
        dtype: of the rows that it multiplies.
        codes: ``[out, in]``: uint8 of 0 to 15 with 4 bits, int8 with 8.
        scales: ``[out, in / group]``.
        offsets: as ``scales``; None: -8 scales with 4 bits, 0 with 8.
        units: float16 ``[out, in / 256, 1 or 2]``, of scales and offsets that are int8; else None.
    """

    format: QuantizedFormat
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    units: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def check(self) -> None:
        """Raises: ValueError, naming what is wrong, for what kernels cannot read."""
        form, (num_rows, num_inputs) = self.format, self.shape
        types = {4: torch.uint8, 8: torch.int8}
        scale_types = (torch.float16, torch.float32, torch.int8)
        is_known = form.bits in types and form.scale_type in scale_types
        if not is_known or not (form.group == 16 or (form.group > 0 and form.group % INPUT_MULTIPLE == 0)):
            raise ValueError(f"weight: expected 4 or 8 bits in groups of 16 or a multiple of 32, got {form}")
        block = form.block_inputs
        if num_inputs == 0 or num_inputs % block or (form.has_units and form.group > INPUT_MULTIPLE):
            raise ValueError(f"weight: expected inputs in {block}s, got {num_inputs} of {form}")
        factors = num_rows, num_inputs // form.group
        wanted = {"codes": (self.shape, types[form.bits]), "scales": (factors, form.scale_type)}
        if form.has_offsets:
            wanted["offsets"] = factors, form.scale_type
        if form.has_units:
            shape = num_rows, num_inputs // UNIT_INPUTS, 2 if form.has_offsets else 1
            wanted["units"] = shape, torch.float16
        found = {name: (each.shape, each.dtype) for name, each in self._tensors().items() if each.is_cpu}
        if found != wanted:
            raise ValueError(f"weight: expected {wanted} on cpu, got {found}")

    def dequantized(self) -> Tensor:
        """``[out, in]``, computed in float32 and rounded once to ``dtype``."""
        scales, offsets = self._factors()
        codes = self.codes.view(*scales.shape, self.format.group)
        values = torch.addcmul(offsets[..., None], codes.float(), scales[..., None])
        return values.view(self.shape).to(self.dtype)

    def padded(self, num_rows: int) -> QuantizedWeight:
        """With ``num_rows`` more rows, of zeros."""
        held = self._tensors()
        more = {name: each.new_zeros(num_rows, *each.shape[1:]) for name, each in held.items()}
        return self._with({name: torch.cat((held[name], more[name])) for name in held})

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """Inputs ``[start, stop)``, multiples of 32 and of a group."""
        if self.units is not None and (start % UNIT_INPUTS or stop % UNIT_INPUTS):
            scales, offsets = self._factors()
            form = replace(self.format, scale_type=torch.float32)
            kept = offsets if form.has_offsets else None
            return QuantizedWeight(form, self.dtype, self.codes, scales, kept).columns(start, stop)
        width = self.shape[1]
        parts = {}
        for name, each in self._tensors().items():
            inputs = width // each.shape[1]  # that share one
            parts[name] = each[:, start // inputs : stop // inputs].contiguous()
        return self._with(parts)

    @staticmethod
    def concatenated(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """The rows of all, which have one format."""
        tensors = [each._tensors() for each in weights]
        return weights[0]._with({name: torch.cat([each[name] for each in tensors]) for name in tensors[0]})

    def _tensors(self) -> dict[str, Tensor]:
        """Of the fields that are tensors, each with the outputs first."""
        names = ("codes", "scales", "offsets", "units")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def _with(self, tensors: dict[str, Tensor]) -> QuantizedWeight:
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Scales and offsets in float32, exactly."""
        scales = self.scales.float()
        offsets = None if self.offsets is None else self.offsets.float()
        if self.units is not None:
            units = self.units.float().repeat_interleave(UNIT_INPUTS // self.format.group, dim=1)
            scales = scales * units[..., 0]
            offsets = None if offsets is None else offsets * units[..., 1]
        if offsets is None:
            offsets = scales * (-8.0 if self.format.bits == 4 else 0.0)
        return scales, offsets


def rounded_format(bits: int) -> QuantizedFormat:
    """Of what ``quantize`` makes."""
    return QuantizedFormat(bits, INPUT_MULTIPLE, torch.float16, has_offsets=bits == 4)


def quantize(weight: Tensor, bits: int) -> QuantizedWeight:
    """``weight [out, in]`` rounded to codes of ``bits``, in groups of 32 inputs; ``in`` is a multiple of 32.

    With 8 bits a group's greatest magnitude is 127. With 4 bits its range is divided into 15 steps, or the
    part of it with which the sum of squared errors is the least. A few rows at a time, since this takes many
    times their memory.

    Raises: ValueError for a group whose scale or offset is no finite number of half precision.
    """
    num_rows = max(1, _ROUNDED_AT_ONCE // weight.shape[1])
    rounded = QuantizedWeight.concatenated([_rounded(rows, bits) for rows in torch.split(weight, num_rows)])
    for name, each in (("scales", rounded.scales), ("offsets", rounded.offsets)):
        if each is not None and not each.isfinite().all():
            raise ValueError(f"{name} that half precision does not hold")
    return rounded


def _rounded(weight: Tensor, bits: int) -> QuantizedWeight:
    form, shape = rounded_format(bits), weight.shape
    groups = weight.float().view(shape[0], -1, INPUT_MULTIPLE)
    if bits == 8:
        scales = groups.abs().amax(-1) / 127
        # A subnormal one is rounded up: to nearest, it may be so much less that codes are clamped.
        is_small = scales < 2.0**-14
        scales = torch.where(is_small, (scales / _SUBNORMAL_STEP).ceil() * _SUBNORMAL_STEP, scales).half()
        codes = _codes(groups, scales, None, -127, 127).to(torch.int8)
        return QuantizedWeight(form, weight.dtype, codes.view(shape), scales, None)
    low, high = groups.amin(-1), groups.amax(-1)
    least = torch.full_like(low, float("inf"))
    codes = torch.zeros_like(groups, dtype=torch.uint8)
    scales = offsets = torch.full_like(low, float("inf"), dtype=torch.float16)  # found if no error is finite
    for part in _RANGE_PARTS:
        cut = (high - low) * ((1 - part) / 2)
        new_scales, new_offsets = ((high - low) * (part / 15)).half(), (low + cut).half()
        new_codes = _codes(groups, new_scales, new_offsets, 0, 15)
        values = torch.addcmul(new_offsets.float()[..., None], new_codes, new_scales.float()[..., None])
        error = (values - groups).square_().sum(-1)
        # Infinities are chosen too, so that they are found.
        is_better = ~(error >= least)
        scales, offsets = scales.where(~is_better, new_scales), offsets.where(~is_better, new_offsets)
        codes = codes.where(~is_better[..., None], new_codes.to(torch.uint8))
        least = torch.minimum(error, least)
    return QuantizedWeight(form, weight.dtype, codes.view(shape), scales, offsets)


def _codes(groups: Tensor, scales: Tensor, offsets: Tensor | None, least: int, most: int) -> Tensor:
    """float32 codes ``[out, in / group, group]``; 0 in groups without a scale."""
    shifted = groups if offsets is None else groups - offsets.float()[..., None]
    scale = scales.float()[..., None]
    return torch.where(scale > 0, shifted / scale, 0.0).round_().clamp_(least, most)
