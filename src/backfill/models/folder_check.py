"""Refuses a model's folder for what can be known of its files without torch: before an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backfill.core.errors import CorruptModel, ModelError, ModelNotFound
from backfill.models.config import ModelConfig
from backfill.models.fields import Fields
from backfill.models.quantization import stored_quantization
from backfill.models.resolve import told_what_to_delete
from backfill.models.safetensors_files import SafetensorsFiles
from backfill.models.tensor_shapes import tensor_shapes
from backfill.models.weight_files import check_fetched, find_weights, told_dangling

if TYPE_CHECKING:
    from backfill.core.config import LoadFormat

_TOKENIZER = "tokenizer.json"
# The others can be converted by transformers.
_TOKENIZER_FILES = (_TOKENIZER, "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


class _Vocabulary(msgspec.Struct):
    vocab: msgspec.Raw


class _TokenizerFile(msgspec.Struct):
    """What transformers needs of a ``tokenizer.json``."""

    model: _Vocabulary
    added_tokens: list[msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET


def check_complete(folder: Path, load_format: LoadFormat) -> None:
    """Raise ModelError for a folder that lacks weights, a tokenizer, or both."""
    has_tokenizer = _has_tokenizer(folder)
    try:
        if load_format != "dummy":
            find_weights(folder, load_format)
    except ModelNotFound as error:
        if has_tokenizer:
            raise
        raise ModelNotFound(f"{error}; and it has no {_TOKENIZER}") from None
    if not has_tokenizer:
        raise _no_tokenizer(folder)


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder without a tokenizer, and files of one that are none.

    Whether the library makes a tokenizer of it is found when it is loaded, which takes far longer.

    Raises: ModelError, CorruptModel.
    """
    if not _has_tokenizer(folder):
        raise _no_tokenizer(folder)
    if (settings := folder / "tokenizer_config.json").is_file():
        Fields.from_file(settings)
    path = folder / _TOKENIZER
    if not path.is_file():
        return
    try:
        check_fetched(path)
        found = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except msgspec.ValidationError as error:
        raise CorruptModel(f"{path} is not a valid tokenizer: {str(error).replace('`', '')}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptModel(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    if found.added_tokens is msgspec.UNSET:
        raise CorruptModel(f"{path} has no added_tokens, which must be there; if it adds none, write []")


def check_weights(folder: Path, load_format: LoadFormat, model: ModelConfig) -> None:
    """Refuse weights for what their files' headers say: no weight is read.

    Of a GGUF file they were read when its folder was made.

    Raises: ModelError, CorruptModel.
    """
    if load_format == "dummy":
        return
    with told_what_to_delete(folder, reads_weights=True):
        if find_weights(folder, load_format).suffix == ".gguf":
            return
        files = SafetensorsFiles(folder)
        stored = stored_quantization(Fields.from_file(folder / "config.json"))
        for name, shape in tensor_shapes(model):
            if stored is None or len(shape) < 2 or not files.has_codes(name, stored):
                files.check(name, shape)
                files.check_floats(name)
            else:
                files.check_codes(name, shape, stored)


def _no_tokenizer(folder: Path) -> ModelError:
    path = folder / _TOKENIZER
    return ModelError(f"{told_dangling(path) or f'{folder} has no {_TOKENIZER}'}.")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)
