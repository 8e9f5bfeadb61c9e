"""Entry point of the ``backfill`` command."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from backfill.cli.bench import bench_app
from backfill.cli.profile import profile
from backfill.cli.pull import pull
from backfill.cli.run_batch import run_batch
from backfill.cli.serve import serve
from backfill.cli.simulate import simulate

app = typer.Typer(
    name="backfill",
    help="Serve one language model to latency-critical and batch requests on the same accelerators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(run_batch)
app.command()(pull)
app.command()(profile)
app.command()(simulate)
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from backfill import __version__

        typer.echo(f"backfill {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; ``--some_option`` and ``--some-option`` are equal, as in vLLM."""
    sys.argv[1:] = [_with_hyphens(argument) for argument in sys.argv[1:]]
    app()


def _with_hyphens(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    # Up to a "=" or a space: `--server-option "--profile my_profile.json"` is an argument too.
    name = re.split(r"[=\s]", argument, maxsplit=1)[0]
    return name.replace("_", "-") + argument[len(name) :]
