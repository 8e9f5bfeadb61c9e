"""Makes the folder of the model in a GGUF file: configuration, tokenizer, and the file itself."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backfill.core.durable_files import sync
from backfill.core.errors import ModelError
from backfill.models.gguf.config import generation_config, hf_config
from backfill.models.gguf.file import GgufFile
from backfill.models.gguf.tensors import check_types, planned_tensors
from backfill.models.gguf.tokenizer import build_tokenizer
from backfill.models.weight_files import GGUF_FILE


def describe_gguf(source: Path) -> dict[str, str]:
    """The files that describe the model in ``source``, text by name: configuration and tokenizer.

    Weights are not read.

    Raises:
        ModelNotFound: no such file.
        CorruptModel: not a GGUF file, truncated, or inconsistent.
        UnsupportedModel: an architecture, tokenizer, rope scaling or tensor type that is not implemented.
    """
    file = GgufFile(source)
    config = hf_config(file)
    check_types(planned_tensors(file, config))
    tokenizer, tokenizer_config = build_tokenizer(file, config)
    return {
        "config.json": _json(config),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _json(tokenizer_config),
        "generation_config.json": _json(generation_config(file, config)),
    }


def write_folder(source: Path, folder: Path, files: Mapping[str, str], *, moves: bool = False) -> None:
    """Make ``folder``, which must not exist, of the model in ``source``.

    The folder is complete or absent: it is written under another name, synced, and renamed.

    Args:
        files: text by name: what ``describe_gguf`` gives, and what a cache marks its work with.
        moves: the GGUF file itself goes into the folder; else a link to it.
    Raises: ModelError: the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        try:
            for name, text in files.items():
                (staging / name).write_text(text + "\n", encoding="utf-8")
                sync(staging / name)
            if moves:
                sync(source)
                source.rename(staging / GGUF_FILE)
            else:
                (staging / GGUF_FILE).symlink_to(source.resolve())
            sync(staging)
            staging.chmod(0o755)
            staging.rename(folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write the model's folder {folder}: {error.strerror or error}") from None


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
