"""What of a model one rank holds: layers of a pipeline stage, and a part of each (tensor parallel).

Megatron-LM's split (Shoeybi et al. 2019, section 3): the first matrix of attention and of the MLP is cut by
columns, the second by rows, so that each half of a layer needs one sum over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from backfill.models.config import ModelConfig
from backfill.models.tensor_shapes import input_shapes, layer_shapes, num_elements, output_shapes

if TYPE_CHECKING:  # the control plane, too, asks for sizes, and has no torch
    from torch import Tensor

_INNER_MULTIPLE = 32  # INPUT_MULTIPLE in kernels/quantized.py and PANEL in panels.py, which need torch


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


class SoleRank:
    """A group of one: nothing is exchanged."""

    rank = 0
    size = 1

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

    def sizes(self, config: ModelConfig) -> ShardSizes:
        return ShardSizes(config, self.layers, self.group.rank, self.group.size)


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[start, stop)`` of a dimension of ``size``."""

    size: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def times(self, width: int) -> Span:
        """The same with ``width`` elements for each."""
        return Span(self.size * width, self.start * width, self.stop * width)


@dataclass(frozen=True, slots=True)
class ShardSizes:
    """How much of a model one rank holds: what is known without the other ranks.

    Rank 0 of a stage holds the most.

    Attributes:
        layers: of the stage, by their index in the model.
        rank: in ``[0, size)``, among the ranks that share every layer of the stage.
    """

    config: ModelConfig
    layers: range
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.config.num_layers

    @property
    def heads(self) -> Span:
        return self._part_of(self.config.num_heads)

    @property
    def kv_heads(self) -> Span:
        """Those that the rank's query heads read; ranks have the same one if there are more ranks."""
        num, size = self.config.num_kv_heads, self.size
        if size <= num:
            return self._part_of(num)
        head = self.rank * num // size
        return Span(num, head, head + 1)

    @property
    def inner(self) -> Span:
        """Of ``intermediate_size``: as even as can be, at multiples of 32 where each rank gets one.

        There quantized weights can be divided, and the kernels' panels end.
        """
        multiples, rest = divmod(self.config.intermediate_size, _INNER_MULTIPLE)
        if rest or multiples < self.size:
            return self._part_of(self.config.intermediate_size)
        return self._part_of(multiples).times(_INNER_MULTIPLE)

    @property
    def vocabulary(self) -> Span:
        """Of the token ids; the last parts may be shorter, see ``vocabulary_rows``."""
        size, rows = self.config.vocab_size, self.vocabulary_rows
        return Span(size, min(self.rank * rows, size), min((self.rank + 1) * rows, size))

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding table and of the output projection: the same on all ranks, with padding."""
        return -(-self.config.vocab_size // self.size)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that the rank holds."""
        heads, kv_heads, inner = self.heads.length, self.kv_heads.length, self.inner.length
        shapes = layer_shapes(self.config, heads, kv_heads, inner, has_output_biases=self.rank == 0)
        return num_elements(shapes)

    @property
    def table_parameters(self) -> int:
        """Weights of the embedding table and the output projection that the rank holds; tied ones are one."""
        has_both = self.is_first and self.is_last and not self.config.tie_word_embeddings
        num_tables = 2 if has_both else 1 if self.is_first or self.is_last else 0
        return num_tables * self.vocabulary_rows * self.config.embedding_size

    @property
    def other_parameters(self) -> int:
        """Weights outside the layers and the tables that the rank holds."""
        of_input = num_elements(input_shapes(self.config)) if self.is_first else 0
        return of_input + (num_elements(output_shapes(self.config)) if self.is_last else 0)

    def _part_of(self, number: int) -> Span:
        """This rank's part of a dimension; the first ranks have one more where it does not divide."""
        least, more = divmod(number, self.size)
        start = self.rank * least + min(self.rank, more)
        return Span(number, start, start + least + (self.rank < more))
