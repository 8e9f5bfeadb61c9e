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
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.num_layers = config.num_layers
        self.layers: dict[int, OPTLayer] = {}
        self._scale = config.attention_scale
        self._device = device
        hidden, embed_dim = config.hidden_size, config.word_embed_proj_dim or config.hidden_size

        def tensor(name: str, *shape: int) -> Tensor:
            return checkpoint.get(f"model.decoder.{name}", shape).to(device)

        self._embedding = tensor("embed_tokens.weight", config.vocab_size, embed_dim).clone()
        num_rows = config.max_position_embeddings + OPT_POSITION_OFFSET
        self._positions = tensor("embed_positions.weight", num_rows, hidden)[
            OPT_POSITION_OFFSET : OPT_POSITION_OFFSET + max_positions
        ].clone()
        self._project_in: Linear | None = None
        self._project_out: Linear | None = None
        if embed_dim != hidden:
            self._project_in = kernels.linear(tensor("project_in.weight", hidden, embed_dim))
            self._project_out = kernels.linear(tensor("project_out.weight", embed_dim, hidden))
        self._final_norm: LayerNorm | None = None
        if config.final_layer_norm:
            self._final_norm = LayerNorm(
                tensor("final_layer_norm.weight", hidden).clone(),
                tensor("final_layer_norm.bias", hidden).clone(),
            )
        head = self._embedding
        if not config.tie_word_embeddings:
            head = checkpoint.get("lm_head.weight", (config.vocab_size, embed_dim)).to(device)
        self._lm_head = kernels.linear(head)

    def load_layer(self, checkpoint: Checkpoint, index: int) -> OPTLayer:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        prefix = f"model.decoder.layers.{index}"

        def tensor(name: str, *shape: int) -> Tensor:
            return checkpoint.get(f"{prefix}.{name}", shape).to(self._device)

        def norm(name: str) -> LayerNorm:
            weight, bias = tensor(f"{name}.weight", hidden), tensor(f"{name}.bias", hidden)
            return LayerNorm(weight.clone(), bias.clone())

        def linear(names: tuple[str, ...], out_size: int, in_size: int) -> Linear:
            weight = torch.cat([tensor(f"{name}.weight", out_size, in_size) for name in names])
            bias = torch.cat([tensor(f"{name}.bias", out_size) for name in names])
            return self.kernels.linear(weight, bias)

        return OPTLayer(
            attention_norm=norm("self_attn_layer_norm"),
            qkv=linear(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), hidden, hidden),
            output=linear(("self_attn.out_proj",), hidden, hidden),
            final_norm=norm("final_layer_norm"),
            fc1=linear(("fc1",), inner, hidden),
            fc2=linear(("fc2",), hidden, inner),
        )

    def embed(self, token_ids: Tensor, batch: AttentionMetadata) -> HiddenState:
        hidden = F.embedding(token_ids, self._embedding)
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
        hidden = hidden + layer.fc2(F.relu(layer.fc1(x)))
        if not norm_first:
            hidden = layer.final_norm(hidden)
        return HiddenState(hidden, None)

    def logits(self, state: HiddenState, rows: Tensor) -> Tensor:
        hidden = state.residual[rows]
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._lm_head(hidden)

    def _attend(
        self, layer: OPTLayer, index: int, x: Tensor, kv_pool: Tensor, batch: AttentionMetadata
    ) -> Tensor:
        qkv, num_heads = layer.qkv(x), self.config.num_heads
        self.kernels.rotate_and_write_kv(qkv, kv_pool, index, batch, num_heads, None)
        return layer.output(self.kernels.attention(qkv, kv_pool, index, batch, num_heads, self._scale))
