"""Both ends of a model, divided over the ranks by token ids."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from backfill.kernels.base import Linear
from backfill.models.shard import Span, TensorGroup


class TokenEmbedding:
    """Looks token ids up. Each rank has the rows of some, and zeros for the others.

    Args:
        table: ``[rows, width]``, of the ids from ``held.start`` on.
    """

    def __init__(self, table: Tensor, held: Span, group: TensorGroup) -> None:
        self._table = table
        self._held = held
        self._group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 ``[T]`` to ``[T, width]``."""
        if self._group.size == 1:
            return F.embedding(token_ids, self._table)
        rows = token_ids - self._held.start
        is_held = (rows >= 0) & (rows < self._held.length)
        found = F.embedding(rows * is_held, self._table)
        return self._group.all_reduce(found.masked_fill_(~is_held[:, None], 0.0))


class OutputProjection:
    """Logits of the whole vocabulary on rank 0, from each rank's part of it."""

    def __init__(self, linear: Linear, vocab_size: int, group: TensorGroup) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, x: Tensor) -> Tensor | None:
        """``[T, width]`` to ``[T, vocab]``; None on ranks other than 0."""
        logits = self._group.gather_columns(self._linear(x))
        if logits is None or logits.shape[1] == self._vocab_size:
            return logits
        return logits[:, : self._vocab_size]  # without the last ranks' padding
