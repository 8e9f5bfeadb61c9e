"""Which files of a folder hold a model's weights; the HTTP process, which has no torch, looks too."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from backfill.core.errors import CorruptModel, ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    from backfill.core.config import LoadFormat

GGUF_FILE = "model.gguf"
_LFS_POINTER = b"version https://git-lfs"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def find_weights(folder: Path, load_format: LoadFormat = "auto") -> Path:
    """The file that holds the weights, or the index of those that do: safetensors before GGUF.

    Args:
        load_format: safetensors: nothing else will do.
    Raises:
        ModelNotFound: the folder holds no weights, or a link to what is not there.
        UnsupportedModel: it holds only another format.
    """
    for name in (_INDEX, _SINGLE):
        if (folder / name).is_file():
            return folder / name
    gguf = folder / GGUF_FILE
    if load_format == "auto" and os.path.lexists(gguf):
        if not gguf.is_file():
            raise ModelNotFound(told_dangling(gguf) or f"{gguf} is not a file")
        return gguf
    for name in (_INDEX, _SINGLE):
        if dangling := told_dangling(folder / name):
            raise ModelNotFound(dangling)
    if any(folder.glob("pytorch_model*.bin")):
        raise UnsupportedModel(
            f"{folder} holds only pytorch_model.bin: convert it to safetensors "
            "(transformers: model.save_pretrained(folder))"
        )
    raise ModelNotFound(f"{folder} holds no weights: neither {_SINGLE} nor {_INDEX}")


def told_dangling(path: Path) -> str | None:
    """Says that ``path`` is a link to a file that is not there; None if it is none."""
    if path.exists() or not path.is_symlink():
        return None
    return f"{path} is a link to {os.path.realpath(path)}, which is not there any more"


def check_fetched(path: Path) -> None:
    """Refuse what Git LFS leaves in place of a file not fetched yet. Raises: CorruptModel, OSError."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CorruptModel(f"{path} is a pointer of Git LFS, and not the file: run git lfs pull")


def is_index(path: Path) -> bool:
    """Of what ``find_weights`` gives."""
    return path.name == _INDEX


def shards_of(index: Path) -> dict[str, Path]:
    """The file of each tensor that an index lists.

    Raises: CorruptModel, also where a file is missing or lies outside the folder.
    """
    weight_map = None
    with suppress(ValueError, AttributeError, OSError, RecursionError):
        weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CorruptModel(f"{index} is not a safetensors index")
    for file in sorted(set(weight_map.values())):
        if not file or Path(file).name != file:
            raise CorruptModel(f"{index} names a file outside its folder: {file}")
        path = index.parent / file
        if not path.is_file():
            raise CorruptModel(told_dangling(path) or f"{path} does not exist, but {index.name} lists it")
    return {name: index.parent / file for name, file in weight_map.items()}
