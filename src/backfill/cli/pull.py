"""``backfill pull``: fetch a model once, so that serving it starts without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from backfill.cli.interrupts import interruptible
from backfill.core.errors import BackfillError
from backfill.models.resolve import DEFAULT_MODEL, KNOWN_MODELS, resolve_model


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help=f"Known name ({', '.join(KNOWN_MODELS)}), model folder, .gguf file, or hub id org/name."
        ),
    ] = DEFAULT_MODEL,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a Hugging Face hub model.")
    ] = None,
    download_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="BACKFILL_CACHE_ROOT",
            help="Cache folder of converted models (default: ~/.cache/backfill). Hub models go to HF_HOME.",
        ),
    ] = None,
) -> None:
    """Fetch MODEL, convert it if need be, and print the folder it is in."""
    console = Console(stderr=True)
    try:
        with interruptible(), _ProgressBar(console) as bar:
            folder = resolve_model(model, cache_dir=download_dir, revision=revision, progress=bar.update)
    except BackfillError as error:
        typer.echo(f"backfill: {error}", err=True)
        raise typer.Exit(code=1) from None
    typer.echo(str(folder))


class _ProgressBar:
    """Shows the steps of ``resolve_model`` on standard error: a bar on a terminal, else one line a step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None
        self._step = ""

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._task is not None:
            self._progress.stop()

    def update(self, step: str, done: int, total: int) -> None:
        if step != self._step:
            self._step = step
            self._begin(step, total)
        if self._task is not None:
            self._progress.update(self._task, completed=done)

    def _begin(self, step: str, total: int) -> None:
        # pip draws its own bar while it downloads; two at once would overwrite each other.
        if step == "downloading" or not self._console.is_terminal:
            self._console.print(f"{step} ({total / 1e6:.0f} MB)", highlight=False)
            return
        self._task = self._progress.add_task(step, total=total)
        self._progress.start()
