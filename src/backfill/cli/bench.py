"""``backfill bench``: the group of commands that measure."""

from __future__ import annotations

import typer

from backfill.cli.bench_coserve import coserve
from backfill.cli.bench_serve import ManyValuesCommand, serve
from backfill.cli.bench_throughput import throughput

bench_app = typer.Typer(help="Measure a server or the engine.", no_args_is_help=True)
bench_app.command("serve", cls=ManyValuesCommand)(serve)
bench_app.command("throughput")(throughput)
bench_app.command("coserve")(coserve)
