"""The Llama family: Llama 2 and 3, Mistral, Qwen2 (QKV bias), Qwen3 (per-head q and k norm), SmolLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backfill.kernels.base import AttentionMetadata, Kernels, Linear
from backfill.models.config import ModelConfig
from backfill.models.decoder import HiddenState
from backfill.models.frequencies import inverse_frequencies
from backfill.models.movable import MovableWeights
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
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.num_layers = config.num_layers
        self.layers: dict[int, LlamaLayer] = {}
        self._device = device
        self._scale = config.attention_scale
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.get("model.embed_tokens.weight", shape).to(device, copy=True)
        self._norm = checkpoint.get("model.norm.weight", (config.hidden_size,)).to(device, copy=True)
        if config.tie_word_embeddings:
            self._lm_head = kernels.linear(self._embedding)
        else:
            self._lm_head = kernels.linear(checkpoint.get("lm_head.weight", shape).to(device))
        self._cos_sin = rotary_table(config, max_positions).to(device)

    def load_layer(self, checkpoint: Checkpoint, index: int) -> LlamaLayer:
        config, device = self.config, self._device
        prefix = f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def norm(name: str, size: int) -> Tensor:
            return checkpoint.get(f"{prefix}.{name}.weight", (size,)).to(device, copy=True)

        def linear(names: dict[str, int], in_size: int, has_bias: bool) -> Linear:
            """One matrix of the named ones; ``names`` has their output sizes."""
            weights = [
                checkpoint.get(f"{prefix}.{name}.weight", (size, in_size)) for name, size in names.items()
            ]
            bias = None
            if has_bias:
                biases = [checkpoint.get(f"{prefix}.{name}.bias", (size,)) for name, size in names.items()]
                bias = torch.cat(biases).to(device)
            return self.kernels.linear(torch.cat(weights).to(device), bias)

        qkv_sizes = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        return LlamaLayer(
            input_norm=norm("input_layernorm", hidden),
            qkv=linear(qkv_sizes, hidden, config.qkv_bias),
            q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
            output=linear({"self_attn.o_proj": hidden}, q_size, config.o_bias),
            post_attention_norm=norm("post_attention_layernorm", hidden),
            gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
            down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
        )

    def embed(self, token_ids: Tensor, batch: AttentionMetadata) -> HiddenState:
        return HiddenState(F.embedding(token_ids, self._embedding), None)

    def run_layer(
        self, index: int, state: HiddenState, kv_pool: Tensor, batch: AttentionMetadata
    ) -> HiddenState:
        layer, kernels, config = self.layers[index], self.kernels, self.config
        x = self._norm_of(state, layer.input_norm)
        qkv = layer.qkv(x)
        kernels.rotate_and_write_kv(
            qkv,
            kv_pool,
            index,
            batch,
            config.num_heads,
            self._cos_sin,
            layer.q_norm,
            layer.k_norm,
            config.norm_eps,
        )
        attended = kernels.attention(qkv, kv_pool, index, batch, config.num_heads, self._scale)
        x = layer.output(attended)
        x = kernels.add_rms_norm(x, state.residual, layer.post_attention_norm, config.norm_eps)
        x = layer.down(kernels.silu_and_mul(layer.gate_up(x)))
        return HiddenState(state.residual, x)

    def logits(self, state: HiddenState, rows: Tensor) -> Tensor:
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
