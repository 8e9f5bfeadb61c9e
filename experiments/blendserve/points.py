"""Finished points of a BlendServe grid in a file of JSON lines, so that an interrupted grid goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backfill.core.durable_files import write_all
from backfill.core.errors import ConfigError
from experiments.blendserve.mix import MixSpec
from experiments.blendserve.pool import HARDWARE
from experiments.blendserve.result import BlendPoint, Target

_DIGEST_DIGITS = 16
_HEAD = b'{"settings": '
# The option that sets each setting, where one does.
_OPTIONS = {
    "source": "`source`",
    "source_lengths": "`source_lengths`",
    "num_requests": "`requests`",
    "num_seeds": "`seeds`",
    "orders": "`orders`",
    "interference": "`interference`",
    "steps": "`steps`",
}


def read_points(path: Path, settings: Mapping[str, Any]) -> dict[Target, BlendPoint]:
    """The points of a file, which is begun if there is none, those of other targets included.

    Raises: ConfigError for a file that cannot be used, or that has points of other settings.
    """
    try:
        with path.open("a+b", buffering=0) as file:
            file.seek(0)
            *lines, torn = file.read().split(b"\n")
            if not _HEAD.startswith(torn[: len(_HEAD)]):
                raise _foreign(path, len(lines) + 1)
            points = [_point(path, settings, number, line) for number, line in enumerate(lines, 1)]
            # A line without an end was being written when its command was ended.
            file.truncate(file.tell() - len(torn))
    except OSError as error:
        raise _unusable(path, error) from error
    return {point.target: point for point in points}


def add_point(path: Path, settings: Mapping[str, Any], point: BlendPoint) -> None:
    """Append a line with a finished point and the settings of its runs. Raises: ConfigError."""
    line = json.dumps({"settings": settings, **point.as_json()}) + "\n"
    try:
        with path.open("ab", buffering=0) as file:
            write_all(file.fileno(), line.encode())
    except OSError as error:
        raise _unusable(path, error) from error


def _point(path: Path, expected: Mapping[str, Any], number: int, line: bytes) -> BlendPoint:
    """Raises: ConfigError."""
    try:
        content = json.loads(line)
        settings, point = content["settings"], BlendPoint.from_json(content)
        others = [name for name, value in expected.items() if settings[name] != value]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _foreign(path, number) from None
    if others:
        name = others[0]
        raise ConfigError(
            f"`output` {path} has points of other settings: {_OPTIONS.get(name, name)} was "
            f"{_shown(settings[name])}, and is {_shown(expected[name])}. Give the same settings, "
            "or another file."
        )
    return point


def _foreign(path: Path, number: int) -> ConfigError:
    return ConfigError(f"`output` {path}: line {number} is no point of a grid.")


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"`output` {path} cannot be written: {error.strerror or error}.")


def settings_of(
    mix: MixSpec, orders: Sequence[str], interference: str, steps: str, num_seeds: int
) -> dict[str, Any]:
    """What a point's figures depend on beside its target; a file of lengths counts by its content."""
    return {
        "hardware": HARDWARE,
        "source": mix.source,
        "source_lengths": None if mix.lengths is None else _digest_of(mix.lengths),
        "num_requests": mix.num_requests,
        "num_seeds": num_seeds,
        "orders": list(orders),
        "interference": interference,
        "steps": steps,
    }


def _digest_of(path: Path) -> str:
    """Raises: ConfigError."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGEST_DIGITS]
    except OSError as error:
        raise ConfigError(f"`source_lengths` {path} cannot be read: {error.strerror or error}.") from error


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
