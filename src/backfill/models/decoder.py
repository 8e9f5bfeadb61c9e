"""The shape every architecture has for the executor: a walk over layers that can stop between any two."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from backfill.kernels.base import AttentionMetadata


class HiddenState(NamedTuple):
    """All that one layer hands to the next, one row for each token of the batch.

    The hidden states are ``residual + delta``; the sum is left to the next norm, which fuses it.
    Together with the KV already written, these rows are the whole state of a forward pass between
    two layers: dropping rows here drops their tokens from the rest of the step.
    """

    residual: Tensor  # [T, hidden]
    delta: Tensor | None  # [T, hidden], not yet added


class DecoderModel(Protocol):
    """A decoder-only transformer whose KV lives in a pool of blocks."""

    num_layers: int

    def embed(self, token_ids: Tensor, batch: AttentionMetadata) -> HiddenState:
        """``token_ids`` int64 ``[T]`` to the first layer's input."""
        ...

    def run_layer(
        self, index: int, state: HiddenState, kv_pool: Tensor, batch: AttentionMetadata
    ) -> HiddenState:
        """Run layer ``index`` and write its KV of the batch's tokens. ``state`` is consumed."""
        ...

    def logits(self, state: HiddenState, rows: Tensor) -> Tensor:
        """Logits ``[len(rows), vocab]`` of the rows named by ``rows`` (int64) after the last layer."""
        ...
