"""Tiny random models of every architecture, saved as Hugging Face folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

_COMMON = {"vocab_size": 199, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
_LLAMA_LIKE = {**_COMMON, "intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 256}
_OPT = {**_COMMON, "ffn_dim": 96, "max_position_embeddings": 128}

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {**_LLAMA_LIKE, "tie_word_embeddings": True}),
    "llama-biased": (transformers.LlamaConfig, {**_LLAMA_LIKE, "attention_bias": True, "mlp_bias": True}),
    "llama2-linear-rope": (
        transformers.LlamaConfig,
        {**_LLAMA_LIKE, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama3-rope": (
        transformers.LlamaConfig,
        {
            **_LLAMA_LIKE,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500000.0,
            },
        },
    ),
    "llama-yarn": (
        transformers.LlamaConfig,
        {
            **_LLAMA_LIKE,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            },
        },
    ),
    "mistral": (transformers.MistralConfig, {**_LLAMA_LIKE, "head_dim": 16, "sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, {**_LLAMA_LIKE, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {**_LLAMA_LIKE, "head_dim": 24}),
    "opt": (transformers.OPTConfig, {**_OPT, "word_embed_proj_dim": 48}),
    "opt-350m": (transformers.OPTConfig, {**_OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
}


def save_tiny_model(kind: str, folder: Path, seed: int = 0, **changed: Any) -> transformers.PreTrainedModel:
    """A float32 model of ``CONFIGS[kind]`` with weights large enough that its tokens depend on its input."""
    config_type, values = CONFIGS[kind]
    torch.manual_seed(seed)
    config = config_type(
        **{**values, **changed}, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero in transformers, where a missing bias would not show
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def save_tiny_llama_config(folder: Path, **changes: Any) -> None:
    """A folder without weights, for dummy ones."""
    _, values = CONFIGS["llama"]
    config = {
        **values,
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    transformers.LlamaConfig(**config).save_pretrained(folder)


def save_small_model(folder: Path, tokenizer: Path) -> None:
    """A random model that answers in milliseconds, with the vocabulary and the tokenizer files of another.

    A token takes 1 KiB of KV in float32: 4 layers, K and V of 2 heads of 16.
    """
    save_tiny_model(
        "llama", folder, vocab_size=49152, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32768,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
