"""The operators on the CPU: launchers of the C++ kernels in ``csrc/``.

The C++ code gets addresses and cannot check them, so ``Kernels`` and ``CpuLinear`` do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

# After torch: the number of threads is that of the OpenMP runtime that torch brings.
from backfill import _kernels  # type: ignore[attr-defined]
from backfill.core.errors import ConfigError
from backfill.kernels.base import (
    AttentionMetadata,
    AttentionWeights,
    Kernels,
    LayerInputs,
    MlpWeights,
    as_bytes,
    describe,
    head_dim_of,
)
from backfill.kernels.isa import ISA_VARIABLE
from backfill.kernels.linears import Linear, Table
from backfill.kernels.panels import (
    PANEL,
    padded_features,
    panels_of,
    quantized_panels_of,
    rows_of_panels,
    rows_of_quantized_panels,
)
from backfill.kernels.quantized import QuantizedFormat, QuantizedWeight

_TYPE_CODES = {torch.bfloat16: 0, torch.float32: 1}


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
    """A weight in panels. A row's result depends on no other row.

    Args:
        weight: the panels.
        dtype: of x, the bias and the result.
        shape: outputs, inputs, and inputs in the panels.
        form: of a quantized weight.
        is_gated: panels of the two halves of the outputs are in turn, see ``gated``.
    """

    def __init__(
        self,
        cpp: _kernels.KernelSet,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        form: QuantizedFormat | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        num_outputs, self.in_features, self._padded_features = self._shape = shape
        self.out_features = num_outputs // 2 if is_gated else num_outputs
        self._cpp = cpp
        self._weight = weight
        self._bias = bias
        self.dtype = dtype
        self._form = form
        self.is_gated = is_gated
        of_form = () if form is None else (form.bits, form.group, form.scale_type.itemsize, form.has_offsets)
        self.packed = _kernels.Linear(
            _TYPE_CODES[dtype],
            weight.data_ptr(),
            _address(bias),
            self._padded_features,
            num_outputs,
            is_gated,
            *of_form,
        )

    @property
    def is_padded(self) -> bool:
        """It reads inputs beyond ``in_features``, which are to be zeros."""
        return self.in_features != self._padded_features

    @property
    def layout(self) -> str:
        return f"{'gated ' * self.is_gated}panels of 32, {self._form or self.dtype}"

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return as_bytes(self._weight, self._bias)

    def placed(self, memory: Sequence[Tensor]) -> CpuLinear:
        weight = memory[0].view(self._weight.dtype).view(self._weight.shape)
        bias = memory[1].view(self.dtype) if self._bias is not None else None
        return CpuLinear(self._cpp, weight, bias, self.dtype, self._shape, self._form, is_gated=self.is_gated)

    def gated(self) -> CpuLinear:
        """Of the two halves of this one's outputs, ``silu(first) * second``. Each is of whole panels."""
        panels = self._weight
        pairs = panels.view(2, len(panels) // 2, *panels.shape[1:]).transpose(0, 1).reshape(panels.shape)
        return CpuLinear(self._cpp, pairs, self._bias, self.dtype, self._shape, self._form, is_gated=True)

    def __call__(self, x: Tensor) -> Tensor:
        is_matrix = x.dim() == 2 and x.shape[1] == self.in_features and x.stride(1) == 1
        if not is_matrix or x.dtype != self.dtype or not x.is_cpu:
            raise ValueError(
                f"x: expected {self.dtype} [T, {self.in_features}] with dense rows on cpu, got {describe(x)}"
            )
        if self.is_padded:
            x = F.pad(x, (0, self._padded_features - self.in_features))
        rows = x.shape[0]
        out = x.new_empty((rows, self.out_features))
        self._cpp.linear(self.packed, x.data_ptr(), x.stride(0), out.data_ptr(), rows)
        return out

    def rows(self, index: Tensor) -> Tensor:
        assert not self.is_gated, "its panels are not in the order of rows"
        if self._form is not None:
            are_paired = _are_paired(self._cpp, self.dtype)
            return rows_of_quantized_panels(
                self._weight, self._form, self.dtype, index, are_paired=are_paired
            )
        return rows_of_panels(self._weight, index)[:, : self.in_features].contiguous()


def _are_paired(cpp: _kernels.KernelSet, dtype: torch.dtype) -> bool:
    """Of codes that rows of ``dtype`` meet, see ``quantized_panels_of``."""
    return bool(cpp.pairs_codes) and dtype == torch.bfloat16


def _reads_rows(linear: Linear) -> TypeGuard[CpuLinear]:
    """As they are, without copies that have zeros behind them."""
    return isinstance(linear, CpuLinear) and not linear.is_padded


class CpuKernels(Kernels):
    """C++ kernels. Tensors are bfloat16 or float32; KV may be int8.

    Accumulation is float32. With bf16 products (AVX-512 BF16, AMX), attention rounds the softmax weights to
    bf16 before the product with V; their sum, the divisor, is taken before rounding.

    The constructor also tells malloc to keep freed memory in the process. Otherwise the pages of each step's
    activations and logits are returned and cause page faults (28,800 in a step of 400 rows).

    Args:
        isa: one of ``available_isas()``; by default the environment's ``BACKFILL_CPU_ISA``, else the best.
    Raises: ValueError if the machine lacks ``isa``, ConfigError if it lacks the environment's.
    """

    def __init__(self, isa: str | None = None) -> None:
        super().__init__(torch.device("cpu"), tuple(_TYPE_CODES), takes_int8_kv=True)
        self._cpp = _kernels.KernelSet(isa or _isa_of_environment())
        _kernels.keep_freed_memory()
        # Of the pool and the batch that were checked last, which keep the memory at these addresses alive.
        self._cpp_pool: _kernels.KvPool
        self._cpp_batch: _kernels.Batch

    @property
    def isa(self) -> str:
        return str(self._cpp.isa)

    @property
    def sums_integers(self) -> bool:
        """Whether a linear layer of codes rounds its rows to 8 bits (csrc/linear_integers.h)."""
        return bool(self._cpp.sums_integers)

    @property
    def description(self) -> str:
        if self.isa == available_isas()[-1]:
            return f"{self.isa}, the fastest of {', '.join(available_isas())} on this processor"
        return f"{self.isa}, which {ISA_VARIABLE} names; {available_isas()[-1]} is the fastest here"

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Table:
        bias = None if bias is None else bias.clone()
        out_features, in_features = weight.shape
        shape = out_features, in_features, padded_features(in_features, weight.dtype)
        return CpuLinear(self._cpp, panels_of(weight), bias, weight.dtype, shape)

    def _quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Table:
        bias = None if bias is None else bias.clone()
        shape = *weight.shape, weight.shape[1]
        panels = quantized_panels_of(weight, are_paired=_are_paired(self._cpp, weight.dtype))
        return CpuLinear(self._cpp, panels, bias, weight.dtype, shape, weight.format)

    def gated(self, linear: Linear) -> Linear:
        if isinstance(linear, CpuLinear) and not linear.is_gated and not linear.out_features % (2 * PANEL):
            return linear.gated()
        return super().gated(linear)

    def attention_block(
        self,
        weights: AttentionWeights,
        x: Tensor,
        residual: Tensor | None,
        eps: float,
        kv_pool: Tensor,
        layer: int,
        batch: AttentionMetadata,
        num_heads: int,
        cos_sin: Tensor | None,
        scale: float,
    ) -> Tensor:
        qkv, output = weights.qkv, weights.output
        if not (_reads_rows(qkv) and _reads_rows(output)):
            return super().attention_block(
                weights, x, residual, eps, kv_pool, layer, batch, num_heads, cos_sin, scale
            )
        norm, q_norm, k_norm = weights.input_norm, weights.q_norm, weights.k_norm
        self._check_norm(x, residual, norm)
        width, head_dim = self._check_kv(kv_pool, layer, batch, num_heads), head_dim_of(kv_pool)
        self._check_rotation(head_dim, x.dtype, cos_sin, q_norm, k_norm)
        rows = x.shape[0]
        self._check_scale(scale)
        if kv_pool.dtype not in (x.dtype, torch.int8):
            raise ValueError(f"kv_pool: expected {x.dtype} or int8, got {kv_pool.dtype}")
        if (
            rows != batch.positions.shape[0]
            or not qkv.dtype == output.dtype == x.dtype
            or (qkv.in_features, qkv.out_features) != (x.shape[1], width)
            or output.in_features != num_heads * head_dim
        ):
            raise ValueError(f"x: does not fit the weights or the batch: {describe(x)}")
        out = x.new_empty((rows, output.out_features))
        self._cpp.attention_block(
            x.data_ptr(),
            x.stride(0),
            _address(residual),
            rows,
            norm.data_ptr(),
            eps,
            qkv.packed,
            output.packed,
            self._cpp_pool,
            self._cpp_batch,
            layer,
            num_heads,
            _address(cos_sin),
            _address(q_norm),
            _address(k_norm),
            scale,
            out.data_ptr(),
        )
        return out

    def mlp_block(self, weights: MlpWeights, x: Tensor, residual: Tensor, eps: float) -> Tensor:
        norm, gate_up, down = weights.post_attention_norm, weights.gate_up, weights.down
        if not (_reads_rows(gate_up) and _reads_rows(down)):
            return super().mlp_block(weights, x, residual, eps)
        self._check_norm(x, residual, norm)
        if (
            not gate_up.dtype == down.dtype == x.dtype
            or gate_up.in_features != x.shape[1]
            or gate_up.out_features != down.in_features
        ):
            raise ValueError(f"x: does not fit the weights: {describe(x)}")
        rows = x.shape[0]
        out = x.new_empty((rows, down.out_features))
        self._cpp.mlp_block(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            rows,
            norm.data_ptr(),
            eps,
            gate_up.packed,
            down.packed,
            out.data_ptr(),
        )
        return out

    def _rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        out = x.new_empty((rows, size))
        self._cpp.norm(
            _TYPE_CODES[x.dtype],
            x.data_ptr(),
            _address(residual),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            x.stride(0),
            eps,
        )
        return out

    def _silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, columns = gate_up.shape
        out = gate_up.new_empty((rows, columns // 2))
        self._cpp.silu_and_mul(
            _TYPE_CODES[gate_up.dtype],
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            columns // 2,
            gate_up.stride(0),
        )
        return out

    def _rotate_and_write_kv(
        self,
        inputs: LayerInputs,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        self._cpp.rotate_and_write_kv(
            _TYPE_CODES[inputs.qkv.dtype],
            inputs.qkv.data_ptr(),
            self._cpp_pool,
            self._cpp_batch,
            inputs.layer,
            inputs.num_heads,
            _address(cos_sin),
            _address(q_norm),
            _address(k_norm),
            eps,
        )

    def _attention(self, inputs: LayerInputs, scale: float) -> Tensor:
        qkv, num_heads = inputs.qkv, inputs.num_heads
        out = qkv.new_empty((qkv.shape[0], num_heads * inputs.head_dim))
        self._cpp.attention(
            _TYPE_CODES[qkv.dtype],
            qkv.data_ptr(),
            out.data_ptr(),
            self._cpp_pool,
            self._cpp_batch,
            inputs.layer,
            num_heads,
            scale,
        )
        return out

    def _check_pool(self, kv_pool: Tensor) -> None:
        super()._check_pool(kv_pool)
        _, num_layers, _, num_kv_heads, block_size, row_size = kv_pool.shape
        self._cpp_pool = _kernels.KvPool(
            kv_pool.dtype == torch.int8,
            kv_pool.data_ptr(),
            num_layers,
            num_kv_heads,
            block_size,
            row_size,
            head_dim_of(kv_pool),
        )

    def _check_batch(self, batch: AttentionMetadata) -> None:
        super()._check_batch(batch)
        self._cpp_batch = _kernels.Batch(
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            batch.cu_seqlens_q.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.block_table.data_ptr(),
            batch.block_table_offsets.data_ptr(),
            batch.positions.shape[0],
            batch.num_seqs,
        )


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
