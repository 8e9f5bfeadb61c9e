"""The interface of a model to the executor: layers run one by one, so that a step can stop between two."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from backfill.kernels.base import AttentionMetadata
from backfill.models.movable import MovableWeights
from backfill.models.shard import ModelShard
from backfill.models.weights import Checkpoint


class HiddenState(NamedTuple):
    """The state of a forward pass between two layers, besides the KV written: a row for each token.

    The hidden states are ``residual + delta``; the next norm computes the sum, fused. A token whose
    row is dropped is not computed by the following layers.
    """

    residual: Tensor  # [T, hidden]
    delta: Tensor | None  # [T, hidden], not yet added


class DecoderModel(Protocol):
    """A decoder-only transformer whose KV lives in a pool of blocks, or a rank's part of one.

    ``num_layers`` and the indices of layers are those of the whole model; ``shard.layers`` are here. All
    ranks of ``shard.group`` make the same calls: a layer exchanges data twice, at last in its result.
    """

    num_layers: int
    shard: ModelShard

    @property
    def layers(self) -> MutableMapping[int, Any]:
        """Weights of layers by index, of the model's own type: those that ``run_layer`` can run."""

    def load_layer(self, checkpoint: Checkpoint, index: int) -> MovableWeights:
        """Load and pack the weights of a layer, for ``layers``. Raises: CorruptModel."""

    def embed(self, token_ids: Tensor, batch: AttentionMetadata) -> HiddenState:
        """``token_ids`` int64 ``[T]`` to the first layer's input, on the first stage."""

    def run_layer(
        self, index: int, state: HiddenState, kv_pool: Tensor, batch: AttentionMetadata
    ) -> HiddenState:
        """Run layer ``index`` of ``layers`` and write its KV of the batch's tokens. ``state`` is consumed.

        ``kv_pool`` has the layers of ``shard`` and the rank's KV heads only.
        """

    def logits(self, state: HiddenState, rows: Tensor) -> Tensor | None:
        """Logits ``[len(rows), vocab]`` of the rows named by ``rows`` (int64) after the last layer.

        On rank 0 of the last stage; None on its other ranks.
        """
