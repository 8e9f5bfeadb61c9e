"""Tiny GGUF files of every architecture, as llama.cpp's converter writes them."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.initialization import no_init_weights

from backfill.models.checkpoint import open_checkpoint
from backfill.models.gguf.folder import describe_gguf, write_folder

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
CORPUS = [
    "def add(x, y):\n    return x + y\n",
    "the cat sat on the mat; the dog's 12345 cats",
    "héllo wörld 你好 🎉",
]
SPECIALS = ["<|end|>", "<|user|>", "<|pad|>"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def make_model(config: Any) -> torch.nn.Module:
    """A random model with weights exact in bf16, large enough that positions and heads matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).bfloat16())
    return model


def folder_of_gguf(source: Path, folder: Path) -> Path:
    """``folder``, made of the model in ``source``."""
    write_folder(source, folder, describe_gguf(source))
    return folder


def transformers_model(folder: Path) -> Any:
    """The model in a folder of a GGUF file as transformers computes it, in float32."""
    config = AutoConfig.from_pretrained(folder)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.tie_weights()
    checkpoint = open_checkpoint(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.get(name, parameter.shape))
    return model


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order in which llama.cpp stores q and k of Llama models."""
    rows = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def stored_tensors(model: Any) -> dict[str, np.ndarray]:
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values, stored = tensor.float().numpy(), name
        if model.config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = interleave(values, getattr(model.config, heads))
        for long, short in NAMES.items():
            stored = stored.replace(long, short)
        tensors[stored] = np.ascontiguousarray(values)
    return tensors


def make_vocabulary(pre_tokenizer: Any = None) -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level BPE; the special tokens come last."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return [*tokens, *SPECIALS], [" ".join(merge) for merge in model["merges"]]


def write_gguf(
    path: Path,
    arch: str,
    config: Any,
    tensors: Mapping[str, np.ndarray],
    *,
    pre: str | None = "gpt-2",
    quant: Quant | None = None,
    other_quants: Mapping[str, Quant] | None = None,
    extra: Mapping[str, Any] | None = None,
    vocabulary: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter lays it out; ``extra`` adds or replaces metadata."""
    tokens, merges = vocabulary or make_vocabulary()
    writer = gguf.GGUFWriter(path, arch)
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", 16),
    }
    fields: dict[str, Any] = {f"{arch}.{key}": value for key, value in sizes.items()}
    fields[f"{arch}.attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    fields[f"{arch}.rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    fields |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": tokens.index("<|user|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|pad|>"),
        "tokenizer.chat_template": TEMPLATE,
    }
    for key, value in (fields | dict(extra or {})).items():
        if value is not None:
            add_field(writer, key, value)
    for name, values in tensors.items():
        if quant is not None and values.ndim == 2:
            kind = (other_quants or {}).get(name, quant)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header(*, num_tensors: int = 0, num_fields: int = 0) -> bytes:
    """The start of a file of version 3; the counts may be wrong."""
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_fields)


def string(text: str, num_bytes: int | None = None) -> bytes:
    """A string of the header that claims ``num_bytes``."""
    encoded = text.encode()
    return struct.pack("<Q", len(encoded) if num_bytes is None else num_bytes) + encoded


def array_field(kind: int, length: int) -> bytes:
    """A metadata field up to its values: an array that claims ``length`` values of ``GGUFValueType`` kind."""
    return string("k") + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, length)


def tensor_header(name: str, *dims: int, num_dims: int | None = None, offset: int = 0) -> bytes:
    """A float32 tensor of ``dims``, the fastest first, that claims ``num_dims``."""
    number = len(dims) if num_dims is None else num_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", number, *dims, Quant.F32, offset)


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def write_tiny(path: Path, **options: Any) -> Path:
    """The smallest valid Llama file; for tests of everything but the weights."""
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 1}, tie_word_embeddings=True)
    return write_gguf(path, "llama", config, stored_tensors(make_model(config)), **options)
