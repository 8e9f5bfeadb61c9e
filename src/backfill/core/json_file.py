"""JSON files that commands measure and save."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

from backfill.core.errors import ConfigError


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


def load_json(path: Path, kind: str, remedy: str) -> object:
    """Raises: ConfigError naming the file, which is to be a ``kind``, if it cannot be read or is no JSON."""
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The {kind} {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested too deeply
        raise ConfigError(f"The {kind} {path} is not JSON: {remedy}") from error
    return content
