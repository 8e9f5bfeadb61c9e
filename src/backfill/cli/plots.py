"""Checks before the work that its plot can be drawn and its files written."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from backfill.core.errors import ConfigError

NEEDS = "matplotlib, which is not installed: pip install 'backfill[plot]'"


def can_plot() -> bool:
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    return True


def check_plot(path: Path | None) -> None:
    """Raises: ConfigError for a plot that cannot be drawn or written."""
    if path is None:
        return
    if not can_plot():
        raise ConfigError(f"`plot` needs {NEEDS}.")
    check_folder("plot", path)


def check_folder(field: str, path: Path | None) -> None:
    """Raises: ConfigError naming ``field`` when the file's folder is missing or not writable."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"`{field}` {path} cannot be written: there is no folder {path.parent}.")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"`{field}` {path} cannot be written: the folder {path.parent} is not writable.")
