"""OPT: learned positions, LayerNorm, ReLU; the model of the BROS and Select-N papers."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from backfill.kernels.inputs import AttentionMetadata
from backfill.kernels.linears import Linear
from backfill.kernels.stop_signal import StopSignal
from backfill.models.config import OPT_POSITION_OFFSET
from backfill.models.decoder import DecoderModel, HiddenState
from backfill.models.movable import MovableWeights
from backfill.models.shard_loader import ShardLoader
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


class OPTModel(DecoderModel):
    """See ``DecoderModel``. ``delta`` stays None: LayerNorm is not fused with the residual sum.

    The 350M size differs: norms come after each block, the embedding is narrower than the layers and is
    projected in and out, and there is no final norm.
    """

    _PREFIX = "model.decoder."

    def _load_ends(self, loader: ShardLoader, max_positions: int) -> None:
        config, shard = self.config, self.shard
        hidden, embed_dim = config.hidden_size, config.embedding_size
        self._project_in: Linear | None = None
        self._final_norm: LayerNorm | None = None
        self._project_out: Linear | None = None
        if shard.is_first:
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

    def load_layer(self, checkpoint: Checkpoint, index: int) -> OPTLayer:
        config, sizes, loader = self.config, self._sizes, self._layer_loader(checkpoint, index)
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
        hidden = self._look_up(token_ids)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        return HiddenState(hidden + F.embedding(batch.positions, self._positions), None)

    def run_layers(
        self,
        layers: range,
        state: HiddenState,
        kv_pool: Tensor,
        batch: AttentionMetadata,
        stop: StopSignal | None = None,
    ) -> tuple[HiddenState, int]:
        assert stop is None, "see heeds_stops"
        hidden = state.residual
        for index in layers:
            hidden = self._run_layer(index, hidden, kv_pool, batch)
        return HiddenState(hidden, None), len(layers)

    def _run_layer(self, index: int, hidden: Tensor, kv_pool: Tensor, batch: AttentionMetadata) -> Tensor:
        layer, norm_first = self.layers[index], self.config.do_layer_norm_before
        x = layer.attention_norm(hidden) if norm_first else hidden
        hidden = hidden + self._attended(layer, x, index - self.shard.layers.start, kv_pool, batch)
        if not norm_first:
            hidden = layer.attention_norm(hidden)
        x = layer.final_norm(hidden) if norm_first else hidden
        hidden = hidden + self._group.all_reduce(layer.fc2(F.relu(layer.fc1(x))))
        if not norm_first:
            hidden = layer.final_norm(hidden)
        return hidden

    def _attended(
        self, layer: OPTLayer, x: Tensor, index: int, kv_pool: Tensor, batch: AttentionMetadata
    ) -> Tensor:
        """From a layer's normed rows to the sum of its attention over the ranks."""
        kernels, num_heads, qkv = self.kernels, self._num_heads, layer.qkv(x)
        kernels.rotate_and_write_kv(qkv, kv_pool, index, batch, num_heads, None)
        attended = kernels.attention(qkv, kv_pool, index, batch, num_heads, self._scale)
        return self._group.all_reduce(layer.output(attended))

    def logits(self, state: HiddenState, rows: Tensor) -> Tensor | None:
        hidden = state.residual[rows]
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._project(hidden)


def _layer_norm(loader: ShardLoader, name: str, size: int) -> LayerNorm:
    return LayerNorm(loader.tensor(f"{name}.weight", size), loader.tensor(f"{name}.bias", size))
