"""The Llama family: Llama 2 and 3, Mistral, Qwen2 (QKV bias), Qwen3 (per-head q and k norm), SmolLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backfill.kernels.base import AttentionMetadata, Kernels, Linear
from backfill.models.config import ModelConfig
from backfill.models.decoder import HiddenState
from backfill.models.frequencies import inverse_frequencies
from backfill.models.movable import MovableWeights
from backfill.models.shard import ModelShard
from backfill.models.shard_loader import ShardLoader
from backfill.models.vocabulary import OutputProjection, TokenEmbedding
from backfill.models.weights import Checkpoint


@dataclass(slots=True)
class LlamaLayer(MovableWeights):
    """The weights of one layer; projections of the same input are one matrix."""

    input_norm: Tensor
    qkv: Linear  # q heads, k heads, v heads
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """See ``DecoderModel``. The rotary table covers ``max_positions``."""

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
        self.layers: dict[int, LlamaLayer] = {}
        self._device = device
        self._group = shard.group
        self._sizes = sizes = shard.sizes(config)
        self._num_heads = sizes.heads.length
        self._scale = config.attention_scale
        loader = ShardLoader(checkpoint, kernels, device, sizes, "")
        self._embedding: TokenEmbedding | None = None
        self._norm: Tensor | None = None
        self._lm_head: OutputProjection | None = None
        table: Tensor | None = None
        if shard.is_first or config.tie_word_embeddings:
            table = loader.vocabulary_table("model.embed_tokens", config.hidden_size)
        if shard.is_first:
            assert table is not None
            self._embedding = TokenEmbedding(table, sizes.vocabulary, shard.group)
        if shard.is_last:
            self._norm = loader.tensor("model.norm.weight", config.hidden_size)
            if not config.tie_word_embeddings:
                table = loader.vocabulary_table("lm_head", config.hidden_size)
            assert table is not None
            self._lm_head = OutputProjection(kernels.linear(table), config.vocab_size, shard.group)
        self._cos_sin = rotary_table(config, max_positions).to(device)

    def load_layer(self, checkpoint: Checkpoint, index: int) -> LlamaLayer:
        config, sizes = self.config, self._sizes
        loader = ShardLoader(checkpoint, self.kernels, self._device, sizes, f"model.layers.{index}.")
        hidden, inner = config.hidden_size, sizes.inner
        query, kv = sizes.heads.times(config.head_dim), sizes.kv_heads.times(config.head_dim)
        qkv = {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        return LlamaLayer(
            input_norm=loader.tensor("input_layernorm.weight", hidden),
            qkv=loader.column_linear(qkv, hidden, config.qkv_bias),
            q_norm=loader.tensor("self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=loader.tensor("self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
            output=loader.row_linear("self_attn.o_proj", hidden, query, config.o_bias),
            post_attention_norm=loader.tensor("post_attention_layernorm.weight", hidden),
            gate_up=loader.column_linear(gate_up, hidden, config.mlp_bias),
            down=loader.row_linear("mlp.down_proj", hidden, inner, config.mlp_bias),
        )

    def embed(self, token_ids: Tensor, batch: AttentionMetadata) -> HiddenState:
        assert self._embedding is not None, "the first stage embeds"
        return HiddenState(self._embedding(token_ids), None)

    def run_layer(
        self, index: int, state: HiddenState, kv_pool: Tensor, batch: AttentionMetadata
    ) -> HiddenState:
        layer, kernels, config = self.layers[index], self.kernels, self.config
        kv_layer, num_heads = index - self.shard.layers.start, self._num_heads
        x = self._norm_of(state, layer.input_norm)
        qkv = layer.qkv(x)
        kernels.rotate_and_write_kv(
            qkv,
            kv_pool,
            kv_layer,
            batch,
            num_heads,
            self._cos_sin,
            layer.q_norm,
            layer.k_norm,
            config.norm_eps,
        )
        attended = kernels.attention(qkv, kv_pool, kv_layer, batch, num_heads, self._scale)
        x = self._group.all_reduce(layer.output(attended))
        x = kernels.add_rms_norm(x, state.residual, layer.post_attention_norm, config.norm_eps)
        x = self._group.all_reduce(layer.down(kernels.silu_and_mul(layer.gate_up(x))))
        return HiddenState(state.residual, x)

    def logits(self, state: HiddenState, rows: Tensor) -> Tensor | None:
        assert self._norm is not None and self._lm_head is not None, "the last stage has the projection"
        delta = None if state.delta is None else state.delta[rows]
        return self._lm_head(self._norm_of(HiddenState(state.residual[rows], delta), self._norm))

    def _norm_of(self, state: HiddenState, weight: Tensor) -> Tensor:
        if state.delta is None:
            return self.kernels.rms_norm(state.residual, weight, self.config.norm_eps)
        return self.kernels.add_rms_norm(state.delta, state.residual, weight, self.config.norm_eps)


def rotary_table(config: ModelConfig, max_positions: int) -> Tensor:
    """Cosines, then sines, of every position's D/2 angles: float32 ``[max_positions, D]``."""
    assert config.rope is not None, "a model with learned positions has no rotary frequencies"
    frequencies, attention_factor = inverse_frequencies(config.rope, config.head_dim)
    angles = torch.outer(
        torch.arange(max_positions, dtype=torch.float32), torch.as_tensor(frequencies).float()
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
