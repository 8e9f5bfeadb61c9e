"""OPT: learned positions, LayerNorm, ReLU; the model of the BROS and Select-N papers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backfill.kernels.base import AttentionMetadata, Kernels, Linear
from backfill.models.config import OPT_POSITION_OFFSET, ModelConfig
from backfill.models.decoder import HiddenState
from backfill.models.movable import MovableWeights
from backfill.models.shard import ModelShard
from backfill.models.shard_loader import ShardLoader
from backfill.models.vocabulary import OutputProjection, TokenEmbedding
from backfill.models.weights import Checkpoint


@dataclass(slots=True)
class LayerNorm(MovableWeights):
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


@dataclass(slots=True)
class OPTLayer(MovableWeights):
    attention_norm: LayerNorm
    qkv: Linear
    output: Linear
    final_norm: LayerNorm
    fc1: Linear
    fc2: Linear


class OPTModel:
    """See ``DecoderModel``. ``delta`` stays None: LayerNorm is not fused with the residual sum.

    The 350M size differs: norms come after each block, the embedding is narrower than the layers and is
    projected in and out, and there is no final norm.
    """

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
        self.layers: dict[int, OPTLayer] = {}
        self._scale = config.attention_scale
        self._device = device
        self._group = shard.group
        self._sizes = sizes = shard.sizes(config)
        self._num_heads = sizes.heads.length
        hidden, embed_dim = config.hidden_size, config.embedding_size
        loader = ShardLoader(checkpoint, kernels, device, sizes, "model.decoder.")
        self._embedding: TokenEmbedding | None = None
        self._project_in: Linear | None = None
        self._final_norm: LayerNorm | None = None
        self._project_out: Linear | None = None
        self._lm_head: OutputProjection | None = None
        table: Tensor | None = None
        if shard.is_first or config.tie_word_embeddings:
            table = loader.vocabulary_table("embed_tokens", embed_dim)
        if shard.is_first:
            assert table is not None
            self._embedding = TokenEmbedding(table, sizes.vocabulary, shard.group)
            if embed_dim != hidden:
                self._project_in = loader.linear("project_in", hidden, embed_dim)
            num_rows = config.max_position_embeddings + OPT_POSITION_OFFSET
            positions = loader.tensor("embed_positions.weight", num_rows, hidden)
            self._positions = positions[OPT_POSITION_OFFSET : OPT_POSITION_OFFSET + max_positions].clone()
        if shard.is_last:
            if config.final_layer_norm:
                self._final_norm = _layer_norm(loader, "final_layer_norm", hidden)
            if embed_dim != hidden:
                self._project_out = loader.linear("project_out", embed_dim, hidden)
            if not config.tie_word_embeddings:
                head = ShardLoader(checkpoint, kernels, device, sizes, "")
                table = head.vocabulary_table("lm_head", embed_dim)
            assert table is not None
            self._lm_head = OutputProjection(kernels.linear(table), config.vocab_size, shard.group)

    def load_layer(self, checkpoint: Checkpoint, index: int) -> OPTLayer:
        config, sizes = self.config, self._sizes
        loader = ShardLoader(checkpoint, self.kernels, self._device, sizes, f"model.decoder.layers.{index}.")
        hidden, query = config.hidden_size, sizes.heads.times(config.head_dim)
        qkv = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), query)
        return OPTLayer(
            attention_norm=_layer_norm(loader, "self_attn_layer_norm", hidden),
            qkv=loader.column_linear(qkv, hidden, config.qkv_bias),
            output=loader.row_linear("self_attn.out_proj", hidden, query, config.o_bias),
            final_norm=_layer_norm(loader, "final_layer_norm", hidden),
            fc1=loader.column_linear({"fc1": sizes.inner}, hidden, config.mlp_bias),
            fc2=loader.row_linear("fc2", hidden, sizes.inner, config.mlp_bias),
        )

    def embed(self, token_ids: Tensor, batch: AttentionMetadata) -> HiddenState:
        assert self._embedding is not None, "the first stage embeds"
        hidden = self._embedding(token_ids)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        return HiddenState(hidden + F.embedding(batch.positions, self._positions), None)

    def run_layer(
        self, index: int, state: HiddenState, kv_pool: Tensor, batch: AttentionMetadata
    ) -> HiddenState:
        layer, norm_first = self.layers[index], self.config.do_layer_norm_before
        hidden = state.residual
        x = layer.attention_norm(hidden) if norm_first else hidden
        hidden = hidden + self._attend(layer, index, x, kv_pool, batch)
        if not norm_first:
            hidden = layer.attention_norm(hidden)
        x = layer.final_norm(hidden) if norm_first else hidden
        hidden = hidden + self._group.all_reduce(layer.fc2(F.relu(layer.fc1(x))))
        if not norm_first:
            hidden = layer.final_norm(hidden)
        return HiddenState(hidden, None)

    def logits(self, state: HiddenState, rows: Tensor) -> Tensor | None:
        assert self._lm_head is not None, "the last stage has the projection"
        hidden = state.residual[rows]
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._lm_head(hidden)

    def _attend(
        self, layer: OPTLayer, index: int, x: Tensor, kv_pool: Tensor, batch: AttentionMetadata
    ) -> Tensor:
        qkv, kv_layer, num_heads = layer.qkv(x), index - self.shard.layers.start, self._num_heads
        self.kernels.rotate_and_write_kv(qkv, kv_pool, kv_layer, batch, num_heads, None)
        attended = self.kernels.attention(qkv, kv_pool, kv_layer, batch, num_heads, self._scale)
        return self._group.all_reduce(layer.output(attended))


def _layer_norm(loader: ShardLoader, name: str, size: int) -> LayerNorm:
    return LayerNorm(loader.tensor(f"{name}.weight", size), loader.tensor(f"{name}.bias", size))
