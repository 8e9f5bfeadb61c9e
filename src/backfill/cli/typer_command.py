"""Commands that are still written for typer, run below the command line of cyclopts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from cyclopts import App, Parameter

CLICK_COMMANDS: dict[str, Any] = {}  # by name, for tests of their options


def typer_command(name: str, function: Callable[..., None], **settings: Any) -> App:
    """An app that gives all its arguments to the typer command."""
    below = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    below.command(name, **settings)(function)
    command = CLICK_COMMANDS[name] = typer.main.get_command(below)

    def run(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
        command.main(list(arguments), prog_name=f"backfill {name}")

    return App(
        name.rsplit(maxsplit=1)[-1],
        default_command=run,
        help_flags=(),
        version_flags=(),
        end_of_options_delimiter="",
    )
