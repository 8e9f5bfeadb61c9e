"""What all models have: layers that run in ranges, so that a step can stop between two, and both ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from backfill.kernels.base import Kernels
from backfill.kernels.inputs import AttentionMetadata
from backfill.kernels.linears import Linear, Table
from backfill.kernels.stop_signal import StopSignal
from backfill.models.config import ModelConfig
from backfill.models.movable import MovableWeights
from backfill.models.shard import ModelShard
from backfill.models.shard_loader import ShardLoader
from backfill.models.weights import Checkpoint


class HiddenState(NamedTuple):
    """The state of a forward pass between two layers, besides the KV written: a row for each token.

    The hidden states are ``residual + delta``; the next norm computes the sum, fused. A token whose
    row is dropped is not computed by the following layers.
    """

    residual: Tensor  # [T, hidden]
    delta: Tensor | None  # [T, hidden], not yet added

    def rows(self, index: Tensor) -> HiddenState:
        """A copy of the rows that ``index`` (int64) names."""
        return HiddenState(self.residual[index], None if self.delta is None else self.delta[index])

    @staticmethod
    def concatenated(states: Sequence[HiddenState]) -> HiddenState:
        """Rows of one state after another, all with ``delta`` or all without."""
        deltas = [each.delta for each in states if each.delta is not None]
        return HiddenState(
            torch.cat([each.residual for each in states]), torch.cat(deltas) if deltas else None
        )


class DecoderModel(ABC):
    """A decoder-only transformer whose KV lives in a pool of blocks, or a rank's part of one.

    ``num_layers`` and the indices of layers are those of the whole model; ``shard.layers`` are here. All
    ranks of ``shard.group`` make the same calls: a layer exchanges data twice, at last in its result.

    Attributes:
        layers: weights of layers by index, of the model's own type: those that ``run_layers`` can run.

    Args:
        max_positions: that requests can have.
    Raises: CorruptModel if a weight is missing or does not have the shape that ``config`` implies.
    """

    _PREFIX: ClassVar[str]  # of the names of all tensors but the output projection

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        kernels: Kernels,
        *,
        max_positions: int,
        device: torch.device,
        shard: ModelShard,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.shard = shard
        self.num_layers = config.num_layers
        self.layers: MutableMapping[int, Any] = {}
        self._device = device
        self._group = shard.group
        self._sizes = shard.sizes(config)
        self._num_heads = self._sizes.heads.length
        self._scale = config.attention_scale
        self._table: Table | None = None  # of the first stage
        self._lm_head: Linear | None = None  # of the last one
        loader = ShardLoader(checkpoint, kernels, device, self._sizes, self._PREFIX)
        table: Table | None = None
        if shard.is_first or config.tie_word_embeddings:
            table = loader.vocabulary_table("embed_tokens", config.embedding_size)
        if shard.is_first:
            self._table = table
        if shard.is_last:
            if not config.tie_word_embeddings:
                head = ShardLoader(checkpoint, kernels, device, self._sizes, "")
                table = head.vocabulary_table("lm_head", config.embedding_size)
            self._lm_head = table
        self._load_ends(loader, max_positions)

    @abstractmethod
    def _load_ends(self, loader: ShardLoader, max_positions: int) -> None:
        """Load what the model has outside its layers, beside the embedding and the output projection."""

    @abstractmethod
    def load_layer(self, checkpoint: Checkpoint, index: int) -> MovableWeights:
        """Load and pack the weights of a layer, for ``layers``. Raises: CorruptModel."""

    @abstractmethod
    def embed(self, token_ids: Tensor, batch: AttentionMetadata) -> HiddenState:
        """``token_ids`` int64 ``[T]`` to the first layer's input, on the first stage."""

    @property
    def heeds_stops(self) -> bool:
        """Whether ``run_layers`` takes a stop.

        Not where the device computes behind the host, which is layers ahead when it looks.
        """
        return False

    @abstractmethod
    def run_layers(
        self,
        layers: range,
        state: HiddenState,
        kv_pool: Tensor,
        batch: AttentionMetadata,
        stop: StopSignal | None = None,
    ) -> tuple[HiddenState, int]:
        """Run the layers, at least one, and write their KV of the batch's tokens. ``state`` is consumed.

        Args:
            kv_pool: the layers of ``shard`` and the rank's KV heads only.
            stop: ends the call early. None unless ``heeds_stops``.
        Returns: the state, and how many layers were run.
        """

    @abstractmethod
    def logits(self, state: HiddenState, rows: Tensor) -> Tensor | None:
        """Logits ``[len(rows), vocab]`` of the rows named by ``rows`` (int64) after the last layer.

        On rank 0 of the last stage; None on its other ranks.
        """

    def _layer_loader(self, checkpoint: Checkpoint, index: int) -> ShardLoader:
        prefix = f"{self._PREFIX}layers.{index}."
        return ShardLoader(checkpoint, self.kernels, self._device, self._sizes, prefix)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        """``[T]`` to ``[T, width]``. Each rank has the rows of some ids, and zeros for the others."""
        assert self._table is not None, "the first stage embeds"
        if self._group.size == 1:
            return self._table.rows(token_ids)
        held = self._sizes.vocabulary
        rows = token_ids - held.start
        is_held = (rows >= 0) & (rows < held.length)
        found = self._table.rows(rows * is_held)
        return self._group.all_reduce(found.masked_fill_(~is_held[:, None], 0.0))

    def _project(self, x: Tensor) -> Tensor | None:
        """``[T, width]`` to logits of the whole vocabulary on rank 0; None on the others."""
        assert self._lm_head is not None, "the last stage has the projection"
        logits = self._group.gather_columns(self._lm_head(x))
        if logits is None or logits.shape[1] == self.config.vocab_size:
            return logits
        return logits[:, : self.config.vocab_size]  # without the last ranks' padding
