"""Files that commands measure and save, and what they were measured on: their key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from uuid import uuid4

from backfill.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """What times were measured on. They are refused elsewhere.

    Attributes:
        model: the model's shape, and a digest of its dimensions.
        device: kind of device; on CPU also the processor, the kernels and the number of threads.
        dtype: of weights and KV.
    """

    model: str
    device: str
    dtype: str

    def check(self, here: MeasuredOn, file: str, remedy: str) -> None:
        """Raises: ConfigError, naming the file and what differs, if it was measured on something else."""
        for field in fields(self):
            measured, wanted = getattr(self, field.name), getattr(here, field.name)
            if measured != wanted:
                raise ConfigError(
                    f"The {file} is of another {field.name}: measured on {measured!r}, here it is "
                    f"{wanted!r}; {remedy}"
                )


def save_json(path: Path, content: object) -> None:
    """Write the file atomically; after an OSError it is unchanged, and no other file is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two containers on one volume may have the same process id.
    partial = path.with_suffix(f".{uuid4().hex}.partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises: ConfigError when the file cannot be written in the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def load_json(path: Path, kind: str, remedy: str) -> object:
    """Raises: ConfigError naming the file, which is to be a ``kind``, if it cannot be read or is no JSON."""
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The {kind} {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested too deeply
        raise ConfigError(f"The {kind} {path} is not JSON: {remedy}") from error
    return content
