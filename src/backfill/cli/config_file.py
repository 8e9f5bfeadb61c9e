"""Files of ``--config``: options by name, in TOML or YAML."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path

from backfill.core.errors import ConfigError
from backfill.core.options import Option


def read_config(path: Path, options: Mapping[str, Option]) -> dict[str, object]:
    """Values by option; ``-`` and ``_`` are equal in names, and null is the default.

    Raises: ConfigError for a file that cannot be read, an unknown name and a value of the wrong type.
    """
    values: dict[str, object] = {}
    for key, value in _load(path).items():
        name = str(key).replace("-", "_")
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"{path}: unknown option {key}{hint}")
        if value is not None:
            try:
                options[name].check(value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {str(error).replace('`', '')}") from None
            values[name] = value
    return values


def _load(path: Path) -> Mapping[object, object]:
    try:
        content: object
        if path.suffix in (".yaml", ".yml"):
            import yaml

            try:
                content = yaml.safe_load(path.read_bytes()) or {}
            except yaml.YAMLError as error:
                raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
        elif path.suffix == ".toml":
            content = tomllib.loads(path.read_text())
        else:
            raise ConfigError(f"{path} must be named .toml, .yaml or .yml.", field="config")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold options by name.")
    return content
