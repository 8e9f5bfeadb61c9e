"""Loads what one rank holds of a model's matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backfill.kernels.base import Kernels, Linear
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
        return self._kernels.linear(self._on_device(weight))

    def column_linear(self, outputs: Mapping[str, Span], in_size: int, has_bias: bool) -> Linear:
        """One matrix of the named ones, with the rank's part of each one's outputs, one after the other."""
        weights = [
            self._weight(f"{name}.weight", (span.size, in_size), 0, span) for name, span in outputs.items()
        ]
        bias = None
        if has_bias:
            biases = [self._part(f"{name}.bias", (span.size,), 0, span) for name, span in outputs.items()]
            bias = torch.cat(biases).to(self._device)
        return self._kernels.linear(self._on_device(_concatenated(weights)), bias)

    def row_linear(self, name: str, out_size: int, inputs: Span, has_bias: bool) -> Linear:
        """The rank's part of a matrix's inputs: the sum of all ranks' results is the whole matrix's.

        Rank 0 adds the bias.
        """
        weight = self._weight(f"{name}.weight", (out_size, inputs.size), 1, inputs)
        bias = None
        if has_bias and self._sizes.rank == 0:
            bias = self.tensor(f"{name}.bias", out_size)
        return self._kernels.linear(self._on_device(weight), bias)

    def vocabulary_table(self, name: str, width: int) -> Linear:
        """The rank's rows of a table with one for each token id, and zeros: ``[vocabulary_rows, width]``."""
        span = self._sizes.vocabulary
        table = self._weight(f"{name}.weight", (span.size, width), 0, span)
        if missing := self._sizes.vocabulary_rows - span.length:
            if isinstance(table, QuantizedWeight):
                table = table.padded(missing)
            else:
                table = F.pad(table, (0, 0, 0, missing))
        return self._kernels.linear(self._on_device(table))

    def _weight(self, name: str, shape: Sequence[int], dim: int, span: Span) -> Tensor | QuantizedWeight:
        return self._checkpoint.weight(self._prefix + name, shape, _part_of(dim, span))

    def _part(self, name: str, shape: Sequence[int], dim: int, span: Span) -> Tensor:
        return self._checkpoint.get(self._prefix + name, shape, _part_of(dim, span))

    def _on_device(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        return weight if isinstance(weight, QuantizedWeight) else weight.to(self._device, copy=True)


def _part_of(dim: int, span: Span) -> Part | None:
    return None if span.length == span.size else Part(dim, span.start, span.stop)


def _concatenated(weights: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    """Rows of codes where all are codes."""
    codes = [each for each in weights if isinstance(each, QuantizedWeight)]
    if len(codes) == len(weights):
        return QuantizedWeight.concatenated(codes)
    return torch.cat([each.dequantized() if isinstance(each, QuantizedWeight) else each for each in weights])
