"""A linear layer on the CPU: a weight in the panels that ``csrc/linear.h`` and ``csrc/quantized.h`` read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from backfill import _kernels  # type: ignore[attr-defined]
from backfill.kernels.base import describe
from backfill.kernels.linears import Linear, as_bytes
from backfill.kernels.panels import rows_of_panels, rows_of_quantized_panels
from backfill.kernels.quantized import QuantizedFormat

TYPE_CODES = {torch.bfloat16: 0, torch.float32: 1}  # ElementType in csrc/kernels.h


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
            TYPE_CODES[dtype],
            weight.data_ptr(),
            address(bias),
            self._padded_features,
            num_outputs,
            is_gated,
            *of_form,
        )

    @property
    def _is_paired(self) -> bool:
        return self._form is not None and pairs_codes(self._cpp, self.dtype)

    @property
    def is_padded(self) -> bool:
        """It reads inputs beyond ``in_features``, which are to be zeros."""
        return self.in_features != self._padded_features

    @property
    def layout(self) -> str:
        kind = "gated " * self.is_gated + "paired " * self._is_paired
        return f"{kind}panels of 32, {self._form or self.dtype}"

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
            return rows_of_quantized_panels(
                self._weight, self._form, self.dtype, index, are_paired=self._is_paired
            )
        return rows_of_panels(self._weight, index)[:, : self.in_features].contiguous()


def pairs_codes(cpp: _kernels.KernelSet, dtype: torch.dtype) -> bool:
    """Of codes that rows of ``dtype`` meet, see ``quantized_panels_of``."""
    return bool(cpp.pairs_codes) and dtype == torch.bfloat16


def reads_rows(linear: Linear) -> TypeGuard[CpuLinear]:
    """As they are, without copies that have zeros behind them."""
    return isinstance(linear, CpuLinear) and not linear.is_padded


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
