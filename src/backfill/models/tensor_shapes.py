"""The tensors that a model's file must have, so that one without them is refused before an engine starts."""

from __future__ import annotations

from collections.abc import Iterator

from backfill.models.config import OPT_POSITION_OFFSET, Architecture, ModelConfig

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Names and shapes, as ``build_model`` asks for them."""
    of_layer = _opt_layer if config.architecture is Architecture.OPT else _llama_layer
    prefix = "model.decoder." if config.architecture is Architecture.OPT else "model."
    table = config.vocab_size, config.embedding_size
    yield f"{prefix}embed_tokens.weight", table
    for name, shape in _ends(config):
        yield f"{prefix}{name}", shape
    if not config.tie_word_embeddings:
        yield "lm_head.weight", table
    for index in range(config.num_layers):
        for name, shape in of_layer(config):
            yield f"{prefix}layers.{index}.{name}", shape


def _ends(config: ModelConfig) -> Shapes:
    hidden, width = config.hidden_size, config.embedding_size
    if config.architecture is Architecture.LLAMA:
        yield "norm.weight", (hidden,)
        return
    yield "embed_positions.weight", (config.max_position_embeddings + OPT_POSITION_OFFSET, hidden)
    if config.final_layer_norm:
        yield from _layer_norm("final_layer_norm", hidden)
    if width != hidden:
        yield "project_in.weight", (hidden, width)
        yield "project_out.weight", (width, hidden)


def _llama_layer(config: ModelConfig) -> Shapes:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _attention(config, "o_proj")
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    yield from _linear("mlp.gate_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.up_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, config.mlp_bias)


def _opt_layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from _layer_norm("self_attn_layer_norm", hidden)
    yield from _layer_norm("final_layer_norm", hidden)
    yield from _attention(config, "out_proj")
    yield from _linear("fc1", inner, hidden, config.mlp_bias)
    yield from _linear("fc2", hidden, inner, config.mlp_bias)


def _attention(config: ModelConfig, output: str) -> Shapes:
    hidden = config.hidden_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, size in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
        yield from _linear(f"self_attn.{name}", size, hidden, config.qkv_bias)
    yield from _linear(f"self_attn.{output}", hidden, query, config.o_bias)


def _linear(name: str, out_size: int, in_size: int, has_bias: bool) -> Shapes:
    yield f"{name}.weight", (out_size, in_size)
    if has_bias:
        yield f"{name}.bias", (out_size,)


def _layer_norm(name: str, size: int) -> Shapes:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)
