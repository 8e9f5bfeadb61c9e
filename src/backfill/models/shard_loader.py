"""Loads what one rank holds of a model's matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backfill.kernels.base import Kernels
from backfill.kernels.linears import ConcatenatedLinear, Linear, Table
from backfill.kernels.quantized import QuantizedWeight
from backfill.models.shard import ShardSizes, Span
from backfill.models.weights import Checkpoint, Part


class ShardLoader:
    """Reads tensors below ``prefix``, or this rank's part of them, and packs them for its device."""

    def __init__(
        self, checkpoint: Checkpoint, kernels: Kernels, device: torch.device, sizes: ShardSizes, prefix: str
    ) -> None:
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._device = device
        self._sizes = sizes
        self._prefix = prefix

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor that every rank has all of."""
        return self._checkpoint.get(self._prefix + name, shape).to(self._device, copy=True)

    def linear(self, name: str, out_size: int, in_size: int) -> Linear:
        """A projection without bias that every rank has all of."""
        weight = self._checkpoint.weight(f"{self._prefix}{name}.weight", (out_size, in_size))
        return self._linear(weight, None)

    def column_linear(self, outputs: Mapping[str, Span], in_size: int, has_bias: bool) -> Linear:
        """One matrix of the named ones, with the rank's part of each one's outputs, one after the other.

        Where they are not of one format, one matrix each.
        """
        weights = [
            self._weight(f"{name}.weight", (span.size, in_size), 0, span) for name, span in outputs.items()
        ]
        biases = [
            self._part(f"{name}.bias", (span.size,), 0, span) if has_bias else None
            for name, span in outputs.items()
        ]
        one = _concatenated(weights)
        if one is None:
            return ConcatenatedLinear(list(map(self._linear, weights, biases)))
        return self._linear(
            one, torch.cat([each for each in biases if each is not None]) if has_bias else None
        )

    def row_linear(self, name: str, out_size: int, inputs: Span, has_bias: bool) -> Linear:
        """The rank's part of a matrix's inputs: the sum of all ranks' results is the whole matrix's.

        Rank 0 adds the bias.
        """
        weight = self._weight(f"{name}.weight", (out_size, inputs.size), 1, inputs)
        bias = None
        if has_bias and self._sizes.rank == 0:
            bias = self.tensor(f"{name}.bias", out_size)
        return self._linear(weight, bias)

    def vocabulary_table(self, name: str, width: int) -> Table:
        """The rank's rows of a table with one for each token id, and zeros: ``[vocabulary_rows, width]``."""
        span = self._sizes.vocabulary
        table = self._weight(f"{name}.weight", (span.size, width), 0, span)
        if missing := self._sizes.vocabulary_rows - span.length:
            if isinstance(table, QuantizedWeight):
                table = table.padded(missing)
            else:
                table = F.pad(table, (0, 0, 0, missing))
        return self._linear(table, None)

    def _weight(self, name: str, shape: Sequence[int], dim: int, span: Span) -> Tensor | QuantizedWeight:
        return self._checkpoint.weight(self._prefix + name, shape, _part_of(dim, span))

    def _part(self, name: str, shape: Sequence[int], dim: int, span: Span) -> Tensor:
        return self._checkpoint.get(self._prefix + name, shape, _part_of(dim, span))

    def _linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Table:
        if isinstance(weight, Tensor):
            weight = weight.to(self._device)
        return self._kernels.linear(weight, None if bias is None else bias.to(self._device))


def _part_of(dim: int, span: Span) -> Part | None:
    return None if span.length == span.size else Part(dim, span.start, span.stop)


def _concatenated(weights: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight | None:
    """The rows of all; None if they are not of one format."""
    codes = [each for each in weights if isinstance(each, QuantizedWeight)]
    if not codes:
        return torch.cat([each for each in weights if isinstance(each, Tensor)])
    is_one = len(codes) == len(weights) and len({each.format for each in codes}) == 1
    return QuantizedWeight.concatenated(codes) if is_one else None
