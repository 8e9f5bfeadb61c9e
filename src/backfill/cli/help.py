"""What ``--help`` prints: plain lines, whole on a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

_MAX_WIDTH = 100
_INDENT = 2
_TEXT_COLUMN = 28


class HelpText:
    """A cyclopts help formatter.

    Args:
        description: what stands above the options; None takes the app's help.
        positional: name of the argument without a flag.
    """

    def __init__(self, description: str | None = None, positional: str = "") -> None:
        self._description = description
        self._positional = positional

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one group of commands or options."""
        if not panel.entries:
            return
        lines = [f"{panel.title}:"]
        for entry in panel.entries:
            text = _plain(entry.description) + (" [required]" if entry.required else "")
            lines += _entry_lines(_names(entry), text, _width(console))
        _print(console, "\n".join((*lines, "")))

    def render_usage(self, console: Console, options: ConsoleOptions, usage: object) -> None:
        if usage:
            text = _plain(usage).removeprefix("Usage: ")
            _print(console, f"Usage: {text.replace('ARGS', self._positional or 'ARGS')}\n")

    def render_description(self, console: Console, options: ConsoleOptions, description: object) -> None:
        for paragraph in (self._description or _plain(description or "")).split("\n\n"):
            _print(console, textwrap.fill(" ".join(paragraph.split()), _width(console)) + "\n")


def _plain(text: object) -> str:
    """What cyclopts wraps in a renderable of rich."""
    return str(getattr(text, "primary_renderable", text)).strip()


def _names(entry: HelpEntry) -> str:
    """A flag that can be negated is ``--[no-]name``."""
    names = [*entry.positive_shorts, *entry.positive_names]
    if entry.negative_names:
        names = [name.replace("--", "--[no-]", 1) for name in names]
    if entry.positional_label:
        return entry.positional_label
    return ", ".join(names) + (f" {entry.metavar}" if entry.metavar else "")


def _entry_lines(names: str, text: str, width: int) -> list[str]:
    """The names, and the text beside them in a column, or below where they are long."""
    wrapped = textwrap.wrap(text, width - _TEXT_COLUMN, break_on_hyphens=False)
    head = " " * _INDENT + names
    if len(head) >= _TEXT_COLUMN - 1:
        return [head, *(" " * _TEXT_COLUMN + line for line in wrapped)]
    first, *others = wrapped or [""]
    return [head.ljust(_TEXT_COLUMN) + first, *(" " * _TEXT_COLUMN + line for line in others)]


def _width(console: Console) -> int:
    return min(console.width, _MAX_WIDTH)


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
