"""Reads a JSON file of a model folder and checks each value.

transformers' configuration classes import torch, which the HTTP process must not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from backfill.core.errors import CorruptModel, ModelNotFound, UnsupportedModel

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object whose values are checked when they are read; errors name file, key and value."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def from_file(cls, path: Path) -> Fields:
        """Parse ``path``. Raises: ModelNotFound if it cannot be read; CorruptModel if it holds no object."""
        return cls(path, _read_object(path))

    def unsupported(self, feature: str, found: str, supported: Iterable[str]) -> UnsupportedModel:
        """The error, for the caller to raise, of a valid value that is not implemented."""
        return UnsupportedModel(
            f"{self.path}: {feature} {found} is not supported; supported: {', '.join(supported)}"
        )

    def wrong(self, key: str, expected: str) -> CorruptModel:
        """The error, for the caller to raise, of a value of the wrong type or range."""
        return CorruptModel(
            f"{self.path}: {self.prefix}{key} must be {expected}, got {self.values.get(key)!r}"
        )

    def section(self, key: str) -> Fields | None:
        """The object under ``key``; None if it is absent or null. Raises: CorruptModel."""
        value = self._optional(key, dict, "an object")
        return None if value is None else Fields(self.path, value, f"{self.prefix}{key}.")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer, required unless there is a default. Raises: CorruptModel."""
        value = self._optional(key, int, "a positive integer")
        if value is None and default is not None:
            return default
        if value is None or value < 1:
            raise self.wrong(key, "a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Any integer; None if it is absent or null. Raises: CorruptModel."""
        return self._optional(key, int, "an integer")

    def optional_number(
        self, key: str, *, minimum: float = -math.inf, maximum: float = math.inf
    ) -> float | None:
        """A number in [minimum, maximum]; None if it is absent or null. Raises: CorruptModel."""
        bounds = f" in [{minimum:g}, {maximum:g}]" if math.isfinite(minimum) else ""
        value = self._optional(key, (int, float), f"a number{bounds}")
        if value is None:
            return None
        if not minimum <= value <= maximum:
            raise self.wrong(key, f"a number{bounds}")
        return float(value)

    def positive(self, key: str, default: float | None = None, *, is_nullable: bool = True) -> float:
        """A finite number above 0, required unless there is a default. Raises: CorruptModel.

        Args:
            is_nullable: null stands for the default, as an absent key does.
        """
        if not is_nullable and key in self.values and self.values[key] is None:
            raise self.wrong(key, "a positive number")
        value = self.optional_number(key)
        if value is None and default is not None:
            return default
        if value is None or not 0 < value < math.inf:
            raise self.wrong(key, "a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; the default if it is absent or null. Raises: CorruptModel."""
        value = self._optional(key, bool, "true or false")
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        """A string; the default if it is absent or null. Raises: CorruptModel."""
        value = self._optional(key, str, "a string")
        return default if value is None else value

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """One id, a list of ids, or none; the default if the key is absent, not if it is null.

        Raises: CorruptModel.
        """
        value = self.values.get(key, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise self.wrong(key, "a token id or a list of them")
        # Older configurations write -1 for "none".
        return tuple(i for i in ids if i >= 0)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """The first of ``token_ids``. Raises: CorruptModel."""
        return next(iter(self.token_ids(key, default)), None)

    def _optional(self, key: str, kind: type[V] | tuple[type[V], ...], expected: str) -> V | None:
        """A value of type ``kind``; None if it is absent or null. A boolean is no integer.

        Raises: CorruptModel, saying what was ``expected``.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(key, expected)
        return value


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not valid JSON: {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFound(f"{path} does not exist") from None
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} must hold a JSON object")
    return value
