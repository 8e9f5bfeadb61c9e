"""The Llama family: Llama 2 and 3, Mistral, Qwen2 (QKV bias), Qwen3 (per-head q and k norm), SmolLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backfill.kernels.inputs import AttentionMetadata, DecoderInputs
from backfill.kernels.linears import Linear
from backfill.kernels.stop_signal import StopSignal
from backfill.models.config import ModelConfig
from backfill.models.decoder import DecoderModel, HiddenState
from backfill.models.frequencies import inverse_frequencies
from backfill.models.movable import MovableWeights
from backfill.models.shard_loader import ShardLoader
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
    gate_up: Linear  # silu(gate) * up
    down: Linear


class LlamaModel(DecoderModel):
    """See ``DecoderModel``. The rotary table covers ``max_positions``."""

    _PREFIX = "model."

    def _load_ends(self, loader: ShardLoader, max_positions: int) -> None:
        self._norm = loader.tensor("norm.weight", self.config.hidden_size) if self.shard.is_last else None
        self._cos_sin = rotary_table(self.config, max_positions).to(self._device)

    def load_layer(self, checkpoint: Checkpoint, index: int) -> LlamaLayer:
        config, sizes, loader = self.config, self._sizes, self._layer_loader(checkpoint, index)
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
            gate_up=self.kernels.gated(loader.column_linear(gate_up, hidden, config.mlp_bias)),
            down=loader.row_linear("mlp.down_proj", hidden, inner, config.mlp_bias),
        )

    def embed(self, token_ids: Tensor, batch: AttentionMetadata) -> HiddenState:
        return HiddenState(self._look_up(token_ids), None)

    @property
    def heeds_stops(self) -> bool:
        return self._group.size == 1 and self._device.type == "cpu"

    def run_layers(
        self,
        layers: range,
        state: HiddenState,
        kv_pool: Tensor,
        batch: AttentionMetadata,
        stop: StopSignal | None = None,
    ) -> tuple[HiddenState, int]:
        kernels, eps, (residual, delta) = self.kernels, self.config.norm_eps, state
        inputs = DecoderInputs(kv_pool, batch, self._num_heads, self._cos_sin, self._scale, eps)
        here = layers.start - self.shard.layers.start
        if self._group.size == 1:
            weights = [self.layers[index] for index in layers]
            delta, done = kernels.decoder_layers(weights, residual, delta, here, inputs, stop)
            return HiddenState(residual, delta), done
        for layer, index in enumerate(layers, here):
            x, added_to = (residual, None) if delta is None else (delta, residual)
            half = kernels.attention_block(self.layers[index], x, added_to, layer, inputs)
            whole = kernels.mlp_block(self.layers[index], self._group.all_reduce(half), residual, eps)
            delta = self._group.all_reduce(whole)
        return HiddenState(residual, delta), len(layers)

    def logits(self, state: HiddenState, rows: Tensor) -> Tensor | None:
        assert self._norm is not None, "the last stage has the norm"
        return self._project(self._norm_of(state.rows(rows), self._norm))

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
