"""Folders of models with dummy weights at real sizes, for machines without a model hub."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}


def save_shape(folder: Path, **changes: object) -> None:
    """Write the configuration of Llama-3.1-8B, with these fields changed; there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA_3_1_8B, **changes}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of another model: its tokenizer and vocabulary"
    )
    arguments = parser.parse_args()
    changes: dict[str, object] = {}
    if arguments.tokenizer is not None:
        config = json.loads((arguments.tokenizer / "config.json").read_text())
        changes = {key: config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    save_shape(arguments.folder, **changes)
    for each in arguments.tokenizer.glob("*token*") if arguments.tokenizer else ():
        shutil.copy(each, arguments.folder)


if __name__ == "__main__":
    main()
