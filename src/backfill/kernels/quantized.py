"""Weights of 4 or 8 bits, in the one form that all formats of files are read into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

INPUT_MULTIPLE = 32  # of a weight, and of what a part of one begins with
_RANGE_PARTS = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """How a weight is stored: weights of one format can be one matrix.

    Attributes:
        bits: of a code, 4 or 8.
        group: inputs that share a scale: 16 or a multiple of 32.
        scale_type: of scales and offsets, float16 or float32.
        has_offsets: else 8 in a code of 4 bits stands for 0.
    """

    bits: int
    group: int
    scale_type: torch.dtype
    has_offsets: bool

    @staticmethod
    def common(forms: Sequence[QuantizedFormat]) -> QuantizedFormat:
        """The smallest that holds weights of all of them without loss."""
        bits = {each.bits for each in forms}
        return QuantizedFormat(
            max(bits),
            math.gcd(*(each.group for each in forms)),
            max((each.scale_type for each in forms), key=lambda each: each.itemsize),
            # Without offsets, codes of 4 bits are not the codes of 8 that have the same values.
            has_offsets=len(bits) > 1 or any(each.has_offsets for each in forms),
        )

    @property
    def bytes_per_weight(self) -> float:
        scales = self.scale_type.itemsize * (2 if self.has_offsets else 1)
        return self.bits / 8 + scales / self.group


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix ``[out, in]`` whose element is ``code * scale + offset``, rounded to ``dtype``.

    Attributes:
        dtype: of the rows that it multiplies.
        codes: ``[out, in]``: uint8 of 0 to 15 with 4 bits, int8 with 8.
        scales: ``[out, in / group]``.
        offsets: as ``scales``; None: -8 scales with 4 bits, 0 with 8.
    """

    format: QuantizedFormat
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantized(self) -> Tensor:
        """``[out, in]``, computed in float32 and rounded once to ``dtype``."""
        scales = self.scales.float()
        if self.offsets is not None:
            offsets = self.offsets.float()
        else:
            offsets = scales * -8.0 if self.format.bits == 4 else torch.zeros_like(scales)
        codes = self.codes.view(*scales.shape, self.format.group)
        values = torch.addcmul(offsets[..., None], codes.float(), scales[..., None])
        return values.view(self.shape).to(self.dtype)

    def padded(self, num_rows: int) -> QuantizedWeight:
        """With ``num_rows`` more rows, of zeros."""
        codes, scales, offsets = (
            None if each is None else F.pad(each, (0, 0, 0, num_rows))
            for each in (self.codes, self.scales, self.offsets)
        )
        assert codes is not None and scales is not None
        return replace(self, codes=codes, scales=scales, offsets=offsets)

    def widened(self, form: QuantizedFormat) -> QuantizedWeight:
        """The same values in a format that ``QuantizedFormat.common`` gave for this one and others."""
        codes, scales, offsets = self.codes, self.scales.to(form.scale_type), self.offsets
        if offsets is None and form.has_offsets:
            offsets = scales * -8.0 if self.format.bits == 4 else torch.zeros_like(scales)
        if form.bits > self.format.bits:
            codes = codes.view(torch.int8)
        repeats = self.format.group // form.group
        if repeats > 1:
            scales = scales.repeat_interleave(repeats, dim=1)
            offsets = None if offsets is None else offsets.repeat_interleave(repeats, dim=1)
        return replace(
            self,
            format=form,
            codes=codes,
            scales=scales,
            offsets=None if offsets is None else offsets.to(form.scale_type),
        )

    @staticmethod
    def concatenated(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """The rows of all, in a format that holds each without loss."""
        form = QuantizedFormat.common([each.format for each in weights])
        weights = [each.widened(form) for each in weights]
        offsets = [each.offsets for each in weights if each.offsets is not None]
        return replace(
            weights[0],
            codes=torch.cat([each.codes for each in weights]),
            scales=torch.cat([each.scales for each in weights]),
            offsets=torch.cat(offsets) if offsets else None,
        )


def rounded_format(bits: int) -> QuantizedFormat:
    """Of what ``quantize`` makes."""
    return QuantizedFormat(bits, INPUT_MULTIPLE, torch.float16, has_offsets=bits == 4)


def quantize(weight: Tensor, bits: int) -> QuantizedWeight:
    """``weight [out, in]`` rounded to codes of ``bits``, in groups of 32 inputs; ``in`` is a multiple of 32.

    With 8 bits a group's greatest magnitude is 127. With 4 bits its range is divided into 15 steps, or the
    part of it with which the sum of squared errors is the least.
    """
    form = rounded_format(bits)
    groups = weight.float().view(weight.shape[0], -1, INPUT_MULTIPLE)
    if bits == 8:
        scales = (groups.abs().amax(-1) / 127).half()
        codes = _codes(groups, scales, None, -127, 127)
        return QuantizedWeight(form, weight.dtype, codes.to(torch.int8).view(weight.shape), scales, None)
    low, high = groups.amin(-1), groups.amax(-1)
    least = torch.full_like(low, float("inf"))
    best: tuple[Tensor, ...] | None = None
    for part in _RANGE_PARTS:
        cut = (high - low) * ((1 - part) / 2)
        scales, offsets = ((high - low) * (part / 15)).half(), (low + cut).half()
        codes = _codes(groups, scales, offsets, 0, 15)
        values = torch.addcmul(offsets.float()[..., None], codes, scales.float()[..., None])
        error = (values - groups).square_().sum(-1)
        found = (codes.to(torch.uint8), scales, offsets)
        is_better = error < least
        best = (
            found
            if best is None
            else tuple(
                torch.where(is_better[..., None] if new.dim() == 3 else is_better, new, old)
                for new, old in zip(found, best, strict=True)
            )
        )
        least = torch.minimum(error, least)
    assert best is not None
    return QuantizedWeight(form, weight.dtype, best[0].view(weight.shape), best[1], best[2])


def _codes(groups: Tensor, scales: Tensor, offsets: Tensor | None, least: int, most: int) -> Tensor:
    """float32 codes ``[out, in / group, group]``; 0 in groups without a scale."""
    shifted = groups if offsets is None else groups - offsets.float()[..., None]
    scale = scales.float()[..., None]
    return torch.where(scale > 0, shifted / scale, 0.0).round_().clamp_(least, most)
