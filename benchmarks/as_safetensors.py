"""A model as other engines read it: its folder, or a copy of it whose weights are safetensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backfill.models.checkpoint import open_checkpoint


def as_safetensors(folder: Path, target: Path, dtype: torch.dtype) -> Path:
    """``folder``, or ``target`` with the weights of its GGUF file in ``dtype``."""
    if not (folder / "model.gguf").is_file():
        return folder
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    checkpoint = open_checkpoint(folder, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.get(name, parameter.shape))
    model.save_pretrained(target)
    for file in folder.glob("*token*.json"):
        shutil.copy(file, target)
    return target
