"""Makes the folder of the model in a GGUF file: configuration, tokenizer, and the file itself."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backfill.core.errors import ModelError
from backfill.models.config import ModelConfig
from backfill.models.gguf.config import generation_config, hf_config
from backfill.models.gguf.file import GgufFile
from backfill.models.gguf.tensors import check_types, planned_tensors
from backfill.models.gguf.tokenizer import build_tokenizer

WEIGHTS_FILE = "model.gguf"


def folder_of_gguf(
    source: str | Path,
    folder: str | Path,
    *,
    moves: bool = False,
    extra_files: Mapping[str, str] | None = None,
) -> Path:
    """Make ``folder``, which must not exist, of the model in ``source``.

    The folder is complete or absent: it is written under another name, synced, and renamed. Weights are not
    read: ``model.gguf`` there is the file, or a link to it.

    Args:
        moves: the file itself goes into the folder.
        extra_files: further files, text by name, in which a cache marks its work.
    Returns: ``folder``.
    Raises:
        ModelNotFound: no such file.
        CorruptModel: not a GGUF file, truncated, or inconsistent.
        UnsupportedModel: an architecture, tokenizer, rope scaling or tensor type that is not implemented.
        ModelError: the folder cannot be written.
    """
    source, folder = Path(source), Path(folder)
    file = GgufFile(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        try:
            _write_folder(file, staging)
            for name, text in (extra_files or {}).items():
                _write_text(staging / name, text)
            if moves:
                _sync(source)
                source.rename(staging / WEIGHTS_FILE)
            else:
                (staging / WEIGHTS_FILE).symlink_to(source.resolve())
            _sync(staging)
            staging.chmod(0o755)
            staging.rename(folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write the model's folder {folder}: {error.strerror or error}") from None
    return folder


def _write_folder(file: GgufFile, folder: Path) -> None:
    """Write configuration and tokenizer.

    Raises: CorruptModel, UnsupportedModel; OSError if a file cannot be written.
    """
    config = hf_config(file)
    _write_json(folder / "config.json", config)
    ModelConfig.from_folder(folder)  # raises for what the decoder cannot run, and for inconsistent sizes
    check_types(planned_tensors(file, config))
    tokenizer, tokenizer_config = build_tokenizer(file, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    _sync(folder / "tokenizer.json")
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", generation_config(file, config))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False))


def _write_text(path: Path, text: str) -> None:
    """Write ``text`` and a newline as UTF-8, synced to the disk. Raises: OSError."""
    with path.open("w", encoding="utf-8") as out:
        out.write(text + "\n")
        out.flush()
        os.fsync(out.fileno())


def _sync(path: Path) -> None:
    """Flush a file or a folder's list of names to the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
