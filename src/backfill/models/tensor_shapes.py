"""The tensors that a model's file must have, and how many weights they are.

Without one of them a model is refused before an engine starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from backfill.models.config import OPT_POSITION_OFFSET, Architecture, ModelConfig

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Names and shapes, as ``build_model`` asks for them."""
    prefix = "model.decoder." if config.architecture is Architecture.OPT else "model."
    table = config.vocab_size, config.embedding_size
    yield f"{prefix}embed_tokens.weight", table
    for name, shape in (*input_shapes(config), *output_shapes(config)):
        yield f"{prefix}{name}", shape
    if not config.tie_word_embeddings:
        yield "lm_head.weight", table
    for index in range(config.num_layers):
        for name, shape in _whole_layer(config):
            yield f"{prefix}layers.{index}.{name}", shape


def num_parameters(config: ModelConfig) -> int:
    """Weights as stored, a tied output projection counted once."""
    return num_elements(tensor_shapes(config))


def layer_parameters(config: ModelConfig) -> int:
    """Weights of one layer."""
    return num_elements(_whole_layer(config))


def num_elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for _, shape in shapes)


def input_shapes(config: ModelConfig) -> Shapes:
    """Before the first layer, without the embedding table."""
    hidden, width = config.hidden_size, config.embedding_size
    if config.architecture is Architecture.OPT:
        yield "embed_positions.weight", (config.max_position_embeddings + OPT_POSITION_OFFSET, hidden)
        if width != hidden:
            yield "project_in.weight", (hidden, width)


def output_shapes(config: ModelConfig) -> Shapes:
    """After the last layer, without the output projection to the vocabulary."""
    hidden, width = config.hidden_size, config.embedding_size
    if config.architecture is Architecture.LLAMA:
        yield "norm.weight", (hidden,)
        return
    if config.final_layer_norm:
        yield from _layer_norm("final_layer_norm", hidden)
    if width != hidden:
        yield "project_out.weight", (width, hidden)


def layer_shapes(
    config: ModelConfig, num_heads: int, num_kv_heads: int, inner: int, *, has_output_biases: bool = True
) -> Shapes:
    """A layer, or a part of one.

    Args:
        inner: of ``intermediate_size``.
        has_output_biases: the biases of the projections back to ``hidden_size`` are in this part.
    """
    hidden, head = config.hidden_size, config.head_dim
    is_opt = config.architecture is Architecture.OPT
    query, kv = num_heads * head, num_kv_heads * head
    if is_opt:
        yield from _layer_norm("self_attn_layer_norm", hidden)
        yield from _layer_norm("final_layer_norm", hidden)
    else:
        yield "input_layernorm.weight", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)
    for name, size in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
        yield from _linear(f"self_attn.{name}", size, hidden, config.qkv_bias)
    output, last = ("self_attn.out_proj", "fc2") if is_opt else ("self_attn.o_proj", "mlp.down_proj")
    yield from _linear(output, hidden, query, config.o_bias and has_output_biases)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    for name in ("fc1",) if is_opt else ("mlp.gate_proj", "mlp.up_proj"):
        yield from _linear(name, inner, hidden, config.mlp_bias)
    yield from _linear(last, hidden, inner, config.mlp_bias and has_output_biases)


def _whole_layer(config: ModelConfig) -> Shapes:
    return layer_shapes(config, config.num_heads, config.num_kv_heads, config.intermediate_size)


def _linear(name: str, out_size: int, in_size: int, has_bias: bool) -> Shapes:
    yield f"{name}.weight", (out_size, in_size)
    if has_bias:
        yield f"{name}.bias", (out_size,)


def _layer_norm(name: str, size: int) -> Shapes:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)
