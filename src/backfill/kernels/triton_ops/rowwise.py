"""Operators on independent rows: RMS norm, residual add with RMS norm, SiLU with product."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(out, x, residual, weight, x_stride, eps, width: tl.constexpr, padded: tl.constexpr):
    """Program t: row t of ``x``, first added to ``residual`` in place where that is given."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded)
    used = columns < width
    values = tl.load(x + row * x_stride + columns, mask=used, other=0.0).to(tl.float32)
    if residual is not None:
        sums = residual + row * width + columns
        rounded = (values + tl.load(sums, mask=used, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(sums, rounded, mask=used)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    normed = values * inverse * tl.load(weight + columns, mask=used, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=used)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of ``x [T, N]``; with ``residual`` of ``residual + x``, which replaces ``residual``."""
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel():
        padded = triton.next_power_of_2(width)
        _rms_norm_kernel[(num_rows,)](
            out,
            x,
            residual,
            weight,
            x.stride(0),
            eps,
            width,
            padded,
            num_warps=max(1, min(8, padded // 512)),
        )
    return out


@triton.jit
def _silu_and_mul_kernel(out, gate_up, stride, width: tl.constexpr, tile: tl.constexpr):
    """Program (t, c): ``tile`` columns of row t."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    used = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=used, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=used, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=used)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate_up[:, :N]) * gate_up[:, N:]``. ``[T, 2N] -> [T, N]``."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        tile = min(1024, triton.next_power_of_2(width))
        grid = (num_rows, triton.cdiv(width, tile))
        _silu_and_mul_kernel[grid](out, gate_up, gate_up.stride(0), width, tile, num_warps=4)
    return out
