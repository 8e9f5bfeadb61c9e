"""Linear layers as models see them, whatever set of kernels packed them; plain and composed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """A weight in the device's fastest layout."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """``x [T, in_features] -> [T, out_features]``, bias included, in x's dtype."""

    @property
    def layout(self) -> str:
        """Linears of one layout and shape may exchange the bytes of their memory."""

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The packed weight and, if there is one, the bias: flat uint8 views, valid as long as the linear."""

    def placed(self, memory: Sequence[Tensor]) -> Linear:
        """A linear of this shape and layout that reads ``memory``, which it keeps.

        ``memory`` has flat uint8 tensors as long as this linear's, each at an address that is a multiple of
        64. Their contents are not set, and may be overwritten while no call runs.
        """


class Table(Linear, Protocol):
    """A weight whose rows can also be looked up."""

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight in x's dtype: int64 ``[T]`` to dense ``[T, in_features]``."""


class PlainLinear:
    """A weight ``[out, in]`` as it is."""

    layout = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def rows(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return as_bytes(self.weight, self.bias)

    def placed(self, memory: Sequence[Tensor]) -> PlainLinear:
        weight = memory[0].view(self.weight.dtype).view(self.weight.shape)
        return PlainLinear(weight, memory[1].view(self.bias.dtype) if self.bias is not None else None)


class ConcatenatedLinear:
    """Linears of the same inputs as one, with their outputs side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(each.out_features for each in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([each(x) for each in self._parts], dim=1)

    @property
    def layout(self) -> str:
        return "; ".join(f"{each.out_features} {each.layout}" for each in self._parts)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return tuple(tensor for each in self._parts for tensor in each.memory)

    def placed(self, memory: Sequence[Tensor]) -> ConcatenatedLinear:
        rest = iter(memory)
        return ConcatenatedLinear([each.placed([next(rest) for _ in each.memory]) for each in self._parts])


class GatedLinear:
    """``silu_and_mul`` of a linear layer, one after the other."""

    def __init__(self, linear: Linear, silu_and_mul: Callable[[Tensor], Tensor]) -> None:
        self._linear = linear
        self._silu_and_mul = silu_and_mul
        self.in_features, self.out_features = linear.in_features, linear.out_features // 2

    def __call__(self, x: Tensor) -> Tensor:
        return self._silu_and_mul(self._linear(x))

    @property
    def layout(self) -> str:
        return self._linear.layout

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return self._linear.memory

    def placed(self, memory: Sequence[Tensor]) -> GatedLinear:
        return GatedLinear(self._linear.placed(memory), self._silu_and_mul)


def as_bytes(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Flat uint8 views of dense tensors; None is left out."""
    return tuple(each.detach().view(-1).view(torch.uint8) for each in tensors if each is not None)
