"""What of a model one rank holds: layers of a pipeline stage, and a part of each (tensor parallel).

Megatron-LM's split (Shoeybi et al. 2019, section 3): the first matrix of attention and of the MLP is cut by
columns, the second by rows, so that each half of a layer needs one sum over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the control plane, too, asks for sizes, and has no torch
    from torch import Tensor


class TensorGroup(Protocol):
    """The ranks that share every layer of a stage. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """In ``[0, size)``."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the ranks, on each of them; ``x``, contiguous, is consumed."""

    def gather_columns(self, x: Tensor) -> Tensor | None:
        """``[T, C]`` of all ranks side by side, ``[T, size * C]``, on rank 0; None on the others."""


@dataclass(frozen=True, slots=True)
class SoleRank:
    """A group of one: nothing is exchanged."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of a model that one rank holds and computes.

    Attributes:
        layers: those of the rank's pipeline stage, by their index in the model.
        num_layers: of the whole model.
    """

    group: TensorGroup
    layers: range
    num_layers: int

    @classmethod
    def whole(cls, num_layers: int) -> ModelShard:
        """All of a model, on a rank of its own."""
        return cls(SoleRank(), range(num_layers), num_layers)

    @property
    def is_first(self) -> bool:
        """The stage embeds the tokens."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """The stage has the final norm and the output projection."""
        return self.layers.stop == self.num_layers
