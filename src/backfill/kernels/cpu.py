"""The operators on the CPU: launchers of the C++ kernels in ``csrc/``.

The C++ code gets addresses and cannot check them, so a launcher checks dtype, shape and layout. A step makes
hundreds of calls: checks only read attributes, and a pool or a batch is checked once for all layers. The
caller answers for the values in a batch (slots, block references).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# After torch: both use the OpenMP runtime that torch brings, so that there is one pool of threads.
from backfill import _kernels  # type: ignore[attr-defined]
from backfill.core.errors import ConfigError
from backfill.kernels.base import AttentionMetadata, Linear, describe
from backfill.kernels.isa import ISA_VARIABLE
from backfill.kernels.reference import as_bytes

_TYPE_CODES = {torch.bfloat16: 0, torch.float32: 1}

# Outputs of a panel, and units of 32 bits of inputs of a tile, in csrc/linear.h.
_PANEL = 32
_TILE_UNITS = 16


def available_isas() -> list[str]:
    """Instruction set variants this machine runs, the fastest last."""
    return list(_kernels.supported_isas())


def _isa_of_environment() -> str:
    """The variant that the environment names; "" for the best one. Raises: ConfigError for an unknown one."""
    isa = os.environ.get(ISA_VARIABLE, "")
    if isa and isa not in available_isas():
        raise ConfigError(f"{ISA_VARIABLE}: this machine has {', '.join(available_isas())}, got {isa!r}.")
    return isa


class CpuLinear:
    """A weight in the panels of ``csrc/linear.h``. A row's result depends on no other row.

    Args:
        weight: ``panels_of`` the weight.
        in_features: of the weight; the panels are padded to whole tiles.
    """

    layout = "panels of 32"

    def __init__(
        self,
        cpp: _kernels.KernelSet,
        weight: Tensor,
        in_features: int,
        out_features: int,
        bias: Tensor | None,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self._cpp = cpp
        self._weight = weight
        self._bias = bias
        self._padded_features = _padded_features(in_features, weight.dtype)
        self._code = _TYPE_CODES[weight.dtype]
        self._weight_address, self._bias_address = weight.data_ptr(), _address(bias)
        self._multiply = cpp.linear

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return as_bytes(self._weight, self._bias)

    def placed(self, memory: Sequence[Tensor]) -> CpuLinear:
        weight = memory[0].view(self._weight.dtype).view(self._weight.shape)
        bias = memory[1].view(self._weight.dtype) if self._bias is not None else None
        return CpuLinear(self._cpp, weight, self.in_features, self.out_features, bias)

    def __call__(self, x: Tensor) -> Tensor:
        code, rows, columns, stride = _matrix("x", x)
        if columns != self.in_features or code != self._code:
            raise ValueError(f"x: expected {self._weight.dtype} [T, {self.in_features}], got {describe(x)}")
        if columns != self._padded_features:
            x = F.pad(x, (0, self._padded_features - columns))
            stride = self._padded_features
        out = x.new_empty((rows, self.out_features))
        self._multiply(
            code,
            x.data_ptr(),
            self._weight_address,
            self._bias_address,
            out.data_ptr(),
            rows,
            self._padded_features,
            self.out_features,
            stride,
        )
        return out


def _padded_features(in_features: int, dtype: torch.dtype) -> int:
    return in_features + -in_features % (_TILE_UNITS * 4 // dtype.itemsize)


def panels_of(weight: Tensor) -> Tensor:
    """``[out, in]`` to ``[out / 32, in / tile, 2, 16, 16]`` units, as ``csrc/linear.h`` reads them.

    A unit is two inputs of bfloat16 or one of float32. Each panel has two tiles for every 16 units of
    inputs, one for each half of its outputs; a tile holds 16 units by 16 outputs. Padded with zeros.
    """
    missing_in = _padded_features(weight.shape[1], weight.dtype) - weight.shape[1]
    missing_out = -weight.shape[0] % _PANEL
    padded = F.pad(weight, (0, missing_in, 0, missing_out)) if missing_in or missing_out else weight
    # A unit moves as one int32, in a fifth of the time: every start packs all weights.
    units = padded.contiguous().view(torch.int32)
    panels = units.view(-1, 2, 16, units.shape[1] // _TILE_UNITS, _TILE_UNITS).permute(0, 3, 1, 4, 2)
    return panels.contiguous().view(weight.dtype)


class _Pool(NamedTuple):
    """The last pool seen, checked, with its address and sizes; all layers of a step use the same one."""

    tensor: Tensor
    cpp: _kernels.KvPool
    dtype: torch.dtype
    num_layers: int
    num_kv_heads: int
    head_dim: int


class _Batch(NamedTuple):
    """The last batch seen, checked. ``batch`` keeps the tensors alive whose addresses are in ``cpp``."""

    batch: AttentionMetadata
    cpp: _kernels.Batch
    rows: int


class CpuKernels:
    """See ``backfill.kernels.base.Kernels`` for shapes. Tensors are bfloat16 or float32, on the CPU.

    Accumulation is float32. With bf16 products (AVX-512 BF16, AMX), attention rounds the softmax weights to
    bf16 before the product with V; their sum, the divisor, is taken before rounding.

    The constructor also tells malloc to keep freed memory in the process. Otherwise the pages of each step's
    activations and logits are returned and cause page faults (28,800 in a step of 400 rows).

    Args:
        isa: one of ``available_isas()``; by default the environment's ``BACKFILL_CPU_ISA``, else the best.
    Raises: ValueError if the machine lacks ``isa``, ConfigError if it lacks the environment's. Every operator
        raises ValueError, naming the argument, for a tensor that it cannot take.
    """

    def __init__(self, isa: str | None = None) -> None:
        self._cpp = _kernels.KernelSet(isa or _isa_of_environment())
        _kernels.keep_freed_memory()
        self._last_pool: _Pool | None = None
        self._last_batch: _Batch | None = None

    @property
    def isa(self) -> str:
        return str(self._cpp.isa)

    @property
    def description(self) -> str:
        if self.isa == available_isas()[-1]:
            return f"{self.isa}, the fastest of {', '.join(available_isas())} on this processor"
        return f"{self.isa}, which {ISA_VARIABLE} names; {available_isas()[-1]} is the fastest here"

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if weight.dim() != 2:
            raise ValueError(f"weight: expected [out, in], got {list(weight.shape)}")
        if weight.dtype not in _TYPE_CODES or not weight.is_cpu or weight.shape[1] == 0:
            raise ValueError(
                f"weight: expected bfloat16 or float32 with an input or more on cpu, got {describe(weight)}"
            )
        if bias is not None:
            _check_vector("bias", bias, weight.shape[0], weight.dtype)
        bias = None if bias is None else bias.detach().clone()
        return CpuLinear(self._cpp, panels_of(weight.detach()), weight.shape[1], weight.shape[0], bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
            raise ValueError(
                f"residual: expected contiguous {x.dtype} {list(x.shape)}, got {describe(residual)}"
            )
        return self._norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        code, rows, columns, stride = _matrix("gate_up", gate_up)
        if columns % 2:
            raise ValueError(f"gate_up: expected an even number of columns, got {columns}")
        size = columns // 2
        out = gate_up.new_empty((rows, size))
        self._cpp.silu_and_mul(code, gate_up.data_ptr(), out.data_ptr(), rows, size, stride)
        return out

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        kv_pool: Tensor,
        layer: int,
        batch: AttentionMetadata,
        num_heads: int,
        cos_sin: Tensor | None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        pool, checked = self._check_attention_inputs(qkv, kv_pool, layer, batch, num_heads)
        head_dim = pool.head_dim
        if cos_sin is not None and (
            cos_sin.dtype != torch.float32 or cos_sin.shape[-1] != head_dim or not cos_sin.is_contiguous()
        ):
            raise ValueError(f"cos_sin: expected contiguous float32 [*, {head_dim}], got {describe(cos_sin)}")
        if (q_norm is None) != (k_norm is None):
            raise ValueError("k_norm: expected q_norm and k_norm, or neither")
        if q_norm is not None and k_norm is not None:
            _check_vector("q_norm", q_norm, head_dim, qkv.dtype)
            _check_vector("k_norm", k_norm, head_dim, qkv.dtype)
        self._cpp.rotate_and_write_kv(
            qkv.data_ptr(),
            pool.cpp,
            checked.cpp,
            layer,
            num_heads,
            _address(cos_sin),
            _address(q_norm),
            _address(k_norm),
            eps,
        )

    def attention(
        self, qkv: Tensor, kv_pool: Tensor, layer: int, batch: AttentionMetadata, num_heads: int, scale: float
    ) -> Tensor:
        pool, checked = self._check_attention_inputs(qkv, kv_pool, layer, batch, num_heads)
        if scale <= 0:
            raise ValueError(f"scale: expected a positive number, got {scale}")
        out = qkv.new_empty((checked.rows, num_heads * pool.head_dim))
        self._cpp.attention(qkv.data_ptr(), out.data_ptr(), pool.cpp, checked.cpp, layer, num_heads, scale)
        return out

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        code, rows, size, stride = _matrix("x", x)
        _check_vector("weight", weight, size, x.dtype)
        out = x.new_empty((rows, size))
        self._cpp.norm(
            code, x.data_ptr(), _address(residual), weight.data_ptr(), out.data_ptr(), rows, size, stride, eps
        )
        return out

    def _check_attention_inputs(
        self, qkv: Tensor, kv_pool: Tensor, layer: int, batch: AttentionMetadata, num_heads: int
    ) -> tuple[_Pool, _Batch]:
        pool, checked = self._last_pool, self._last_batch
        if pool is None or pool.tensor is not kv_pool:
            pool = self._last_pool = _checked_pool(kv_pool)
        if checked is None or checked.batch is not batch:
            checked = self._last_batch = _checked_batch(batch)
        if num_heads <= 0 or num_heads % pool.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of the {pool.num_kv_heads} key/value heads, got {num_heads}"
            )
        if not 0 <= layer < pool.num_layers:
            raise ValueError(f"layer: expected 0 to {pool.num_layers - 1}, got {layer}")
        columns = (num_heads + 2 * pool.num_kv_heads) * pool.head_dim
        if qkv.dtype != pool.dtype or qkv.shape != (checked.rows, columns) or not qkv.is_contiguous():
            raise ValueError(
                f"qkv: expected contiguous {pool.dtype} [{checked.rows}, {columns}], got {describe(qkv)}"
            )
        return pool, checked


def _checked_pool(kv_pool: Tensor) -> _Pool:
    code = _TYPE_CODES.get(kv_pool.dtype)
    if code is None or kv_pool.dim() != 6 or not kv_pool.is_contiguous() or not kv_pool.is_cpu:
        raise ValueError(
            "kv_pool: expected contiguous bfloat16 or float32 [num_blocks, L, 2, G, B, D] on cpu, "
            f"got {describe(kv_pool)}"
        )
    _, num_layers, two, num_kv_heads, block_size, head_dim = kv_pool.shape
    if two != 2 or head_dim % 8:
        raise ValueError(f"kv_pool: expected K and V and a head size in eights, got {list(kv_pool.shape)}")
    cpp = _kernels.KvPool(code, kv_pool.data_ptr(), num_layers, num_kv_heads, block_size, head_dim)
    return _Pool(kv_pool, cpp, kv_pool.dtype, num_layers, num_kv_heads, head_dim)


def _checked_batch(batch: AttentionMetadata) -> _Batch:
    rows, num_seqs = batch.positions.shape[0], batch.num_seqs
    _check_vector("batch.positions", batch.positions, rows, torch.int64)
    _check_vector("batch.slot_mapping", batch.slot_mapping, rows, torch.int64)
    _check_vector("batch.cu_seqlens_q", batch.cu_seqlens_q, num_seqs + 1, torch.int32)
    _check_vector("batch.seq_lens", batch.seq_lens, num_seqs, torch.int32)
    _check_vector("batch.block_table", batch.block_table, batch.block_table.shape[0], torch.int32)
    _check_vector("batch.block_table_offsets", batch.block_table_offsets, num_seqs + 1, torch.int32)
    cpp = _kernels.Batch(
        batch.positions.data_ptr(),
        batch.slot_mapping.data_ptr(),
        batch.cu_seqlens_q.data_ptr(),
        batch.seq_lens.data_ptr(),
        batch.block_table.data_ptr(),
        batch.block_table_offsets.data_ptr(),
        rows,
        num_seqs,
    )
    return _Batch(batch, cpp, rows)


def _matrix(name: str, x: Tensor) -> tuple[int, int, int, int]:
    """Type code, rows, columns and row stride of a 2-d tensor with dense rows. Raises: ValueError."""
    code = _TYPE_CODES.get(x.dtype)
    if code is not None and x.dim() == 2 and x.is_cpu:
        rows, columns = x.shape
        if x.is_contiguous():
            return code, rows, columns, columns
        if x.stride(1) == 1:
            return code, rows, columns, x.stride(0)
    raise ValueError(f"{name}: expected bfloat16 or float32 [T, N] with dense rows on cpu, got {describe(x)}")


def _check_vector(name: str, x: Tensor, size: int, dtype: torch.dtype) -> None:
    if x.dtype != dtype or x.dim() != 1 or x.shape[0] != size or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{name}: expected contiguous {dtype} [{size}] on cpu, got {describe(x)}")


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
