"""``backfill pull``: fetch a model once, so that serving it starts without a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from backfill.cli.command import VARIABLES, command
from backfill.cli.interrupts import interruptible
from backfill.engine.options import ModelOptions
from backfill.models.resolve import resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions(ModelOptions):
    """What to fetch.

    Attributes:
        download_dir: cache folder of GGUF models. Hub models go to HF_HOME. Default: ~/.cache/backfill.
    """

    download_dir: Path | None = None


def pull(options: PullOptions) -> None:
    """Fetch MODEL, and print the folder it is in."""
    with interruptible(), _ProgressBar(Console(stderr=True)) as bar:
        folder = resolve_model(
            options.model, cache_dir=options.download_dir, revision=options.revision, progress=bar.update
        )
    print(folder)


app = command(pull, {"Model": "model revision download_dir"}, positional="model", variables=VARIABLES)


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
