"""Weights in the layouts that ``csrc/linear.h`` and ``csrc/quantized.h`` read, and their rows again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backfill.kernels.quantized import INPUT_MULTIPLE, QuantizedFormat, QuantizedWeight

# Outputs of a panel, and units of 32 bits of inputs of a tile, in csrc/linear.h.
PANEL = 32
_TILE_UNITS = 16


def padded_features(in_features: int, dtype: torch.dtype) -> int:
    """Inputs of a plain weight's panels: whole tiles."""
    return in_features + -in_features % (_TILE_UNITS * 4 // dtype.itemsize)


def panels_of(weight: Tensor) -> Tensor:
    """``[out, in]`` to ``[out / 32, in / tile, 2, 16, 16]`` units.

    A unit is two inputs of bfloat16 or one of float32. Each panel has two tiles for every 16 units of
    inputs, one for each half of its outputs; a tile holds 16 units by 16 outputs. Padded with zeros.
    """
    missing_in = padded_features(weight.shape[1], weight.dtype) - weight.shape[1]
    missing_out = -weight.shape[0] % PANEL
    padded = F.pad(weight, (0, missing_in, 0, missing_out)) if missing_in or missing_out else weight
    # A unit moves as one int32, in a fifth of the time: every start packs all weights.
    units = padded.contiguous().view(torch.int32)
    panels = units.view(-1, 2, 16, units.shape[1] // _TILE_UNITS, _TILE_UNITS).permute(0, 3, 1, 4, 2)
    return panels.contiguous().view(weight.dtype)


def rows_of_panels(panels: Tensor, index: Tensor) -> Tensor:
    """Rows ``[T, padded in]`` of a weight that ``panels_of`` packed; ``index`` is int64 ``[T]``."""
    units = panels.view(torch.int32)
    outputs = index % PANEL
    return units[index // PANEL, :, outputs // 16, :, outputs % 16].flatten(1).view(panels.dtype)


def quantized_panels_of(weight: QuantizedWeight, *, are_paired: bool = False) -> Tensor:
    """A quantized weight as uint8 ``[out / 32, blocks, bytes of a block]``; outputs padded with zeros.

    A block is one group of inputs, two groups of 16, or the groups that share a unit. It has the units of 32
    outputs if there are any, scales ``[groups, 32]``, offsets if there are any, and codes: for every 32
    inputs ``[2, words, 16]`` words of 32 bits, each with 4 or 8 neighbouring inputs of one output: of 8, the
    first four are the lower halves of its bytes.

    Args:
        are_paired: a word has even or odd inputs, the two of an output side by side, as
            csrc/quantized_tiles.h reads them.
    """
    form, (num_rows, num_inputs) = weight.format, weight.shape
    if missing := -num_rows % PANEL:
        weight = weight.padded(missing)
    codes = weight.codes.view(torch.uint8)
    beside = 2 if are_paired else 1  # words of an output
    if form.bits == 4:
        # By words, in a sixth of the time: no bit leaves its byte.
        halves = codes.view(torch.int64 if are_paired else torch.int32).view(-1, 2)
        codes = (halves[:, 0] | halves[:, 1] << 4).view(torch.uint8)
    if are_paired:  # by slices: a transpose copies bytes one by one, in four times the time
        pairs, codes = codes.view(-1, 4, 2), torch.empty(codes.numel() // 8, 2, 4, dtype=torch.uint8)
        for parity in range(2):
            codes[:, parity] = pairs[..., parity]
    units = codes.flatten().view(torch.int64 if are_paired else torch.int32)
    shape = -1, 2, beside, 16 // beside, num_inputs // INPUT_MULTIPLE, form.bits // beside
    block = form.block_inputs
    num_blocks = num_inputs // block
    panels = units.view(shape).permute(0, 4, 1, 5, 2, 3).contiguous().view(torch.uint8)
    blocks = panels.view(-1, num_blocks, block * PANEL * form.bits // 8)

    def of_blocks(factors: Tensor) -> Tensor:
        """``[out, factors of a row]`` as bytes of blocks, outputs innermost."""
        panels = factors.reshape(-1, PANEL, factors.shape[1]).transpose(1, 2).contiguous()
        return panels.view(torch.uint8).view(len(blocks), num_blocks, -1)

    header = [of_blocks(each) for each in (weight.scales, weight.offsets) if each is not None]
    if weight.units is not None:
        header = [of_blocks(weight.units.flatten(1)), *header]
    return torch.cat([*header, blocks], dim=-1)


def rows_of_quantized_panels(
    panels: Tensor, form: QuantizedFormat, dtype: torch.dtype, index: Tensor, *, are_paired: bool = False
) -> Tensor:
    """Rows ``[T, in]`` of a weight that ``quantized_panels_of`` packed, dequantized."""
    panel, output = index // PANEL, index % PANEL
    num_groups = form.block_inputs // form.group
    start = 0

    def factors(number: int, kind: torch.dtype) -> Tensor:
        """The next ones of a block: ``[T, number in a row]``."""
        nonlocal start
        first, start = start, start + number * PANEL * kind.itemsize
        of_blocks = panels[..., first:start].view(kind).view(*panels.shape[:2], number, PANEL)
        return of_blocks[panel, :, :, output].flatten(1)

    num_factors = 2 if form.has_offsets else 1
    units = None
    if form.has_units:
        units = factors(num_factors, torch.float16).view(len(index), -1, num_factors)
    scales = factors(num_groups, form.scale_type)
    offsets = factors(num_groups, form.scale_type) if form.has_offsets else None
    beside = 2 if are_paired else 1
    shape = *panels.shape[:2], -1, 2, form.bits // beside, beside, 16 // beside, beside
    words = panels[..., start:].view(torch.int32).view(shape)
    part, lane = output % 16 // shape[-2], output % shape[-2]
    found = words[panel, :, :, output // 16, :, part, lane].contiguous().view(torch.uint8)
    codes = found.view(len(index), -1, beside, 4).transpose(2, 3)
    if form.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2)
    codes = codes.reshape(len(index), -1)
    if form.bits == 8:
        codes = codes.view(torch.int8)
    return QuantizedWeight(form, dtype, codes, scales, offsets, units).dequantized()
