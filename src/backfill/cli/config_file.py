"""Files of ``--config``: options by name, in TOML or YAML."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from backfill.core.errors import ConfigError
from backfill.core.options import Option


def read_config(path: Path, options: Mapping[str, Option]) -> dict[str, object]:
    """Values by option; ``-`` and ``_`` are equal in names, and null is the default.

    Args:
        options: by each name that a file may use.
    Raises: ConfigError for a file that cannot be read, an unknown or repeated name and a value of the wrong
        type. It shows no value of a secret.
    """
    values: dict[str, object] = {}
    for key, value in _load(path):
        name = str(key).replace("-", "_")
        option = options.get(name)
        if option is None:
            near = difflib.get_close_matches(name, options, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"{path}: unknown option {key}{hint}")
        if option.name in values:
            raise ConfigError(f"{path}: {key} is given twice.")
        if value is not None:
            try:
                option.check(value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {str(error).replace('`', '')}") from None
            values[option.name] = value
    return values


def _load(path: Path) -> Sequence[tuple[object, object]]:
    """Names and values in their order. A YAML file may give a name twice; TOML's parser refuses that."""
    try:
        if path.suffix in (".yaml", ".yml"):
            return _load_yaml(path)
        if path.suffix != ".toml":
            raise ConfigError(f"{path} must be named .toml, .yaml or .yml.")
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    return list(content.items())


def _load_yaml(path: Path) -> Sequence[tuple[object, object]]:
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_bytes())
        node = loader.get_single_node()
        if node is None:
            return ()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path} must hold options by name.")
        return [(each.value, loader.construct_object(value, deep=True)) for each, value in node.value]
    except yaml.MarkedYAMLError as error:  # its text quotes the line, which may hold a key
        mark = error.problem_mark
        where = "" if mark is None else f" (at line {mark.line + 1}, column {mark.column + 1})"
        raise ConfigError(f"{path} is not YAML: {error.problem}{where}.") from None
    except yaml.YAMLError:
        raise ConfigError(f"{path} is not YAML.") from None
