"""``backfill profile``: time a model on this device and save its cost profile."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from backfill.cli import engine_options as options
from backfill.cli.interrupts import LOADING, interruptible
from backfill.core.errors import BackfillError, ConfigError
from backfill.costs.load import StepLoad
from backfill.costs.profile import CostProfile
from backfill.engine.environment import engine_environment, restart_with
from backfill.engine.options import EngineOptions
from backfill.models.resolve import DEFAULT_MODEL

_ENGINE, _LIMITS = options.ENGINE_DEFAULTS, options.LIMITS


def profile(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = DEFAULT_MODEL,
    revision: options.Revision = None,
    device: options.Device = _ENGINE.device,
    dtype: options.DType = _ENGINE.dtype,
    load_format: options.LoadFormat = _ENGINE.load_format,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = _LIMITS.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = _LIMITS.max_num_batched_tokens,
    block_size: options.BlockSize = _ENGINE.block_size,
    kv_gib: options.KvGib = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = _ENGINE.gpu_memory_utilization,
    threads: options.Threads = None,
    quick: Annotated[bool, typer.Option("--quick", help="A coarse profile in a second or so.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="File to write instead of the one `backfill serve` looks for.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with the profile as JSON on a line.")] = False,
) -> None:
    """Time steps of the model here, fit the cost model and save it. `backfill serve` loads it by itself."""
    restart_with(engine_environment(os.environ))
    console = Console()
    try:
        options.configure_logging("WARNING", "profile")
        config = EngineOptions(
            device=device,
            dtype=dtype,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_gib=kv_gib,
            checkpointing="adaptive",  # for a pool in host memory, whose copies are timed too
            gpu_memory_utilization=gpu_memory_utilization,
            threads=threads,
        ).config()
        with interruptible(LOADING):
            served = options.find_model(model, revision, ())
        config = replace(config, model_dir=str(served.folder))
        from backfill.costs.profiler import FULL, QUICK
        from backfill.execution.create import create_torch_executor
        from backfill.execution.profile import measure_profile, profile_path, save_in_cache

        executor = create_torch_executor(config)
        bar = Progress(
            TextColumn("timing steps"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(), console=console, transient=True,
        )  # fmt: skip
        with interruptible(), bar:
            task = bar.add_task("steps", total=None)
            measured = measure_profile(
                config,
                executor,
                QUICK if quick else FULL,
                lambda done, total: bar.update(task, completed=done, total=total),
            )
        path = out or profile_path(measured.key)
        try:
            if out is None:
                save_in_cache(measured, keep_full=False)
            else:
                measured.save(out)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    except BackfillError as error:
        typer.echo(f"backfill: {error}", err=True)
        raise typer.Exit(1) from None
    _print(console, measured, path)
    if as_json:
        typer.echo(json.dumps({"path": str(path), **asdict(measured)}))


def _print(console: Console, measured: CostProfile, path: Path) -> None:
    table = Table(
        "step", "predicted ms", title=f"{measured.key.model}, {measured.key.dtype}, {measured.key.device}"
    )
    for name, shape in (
        ("prompt of 256 tokens", [(0, 256, True)]),
        ("prompt of 1024 tokens", [(0, 1024, True)]),
        ("1 decode behind 512 tokens", [(512, 1, True)]),
        ("32 decodes behind 512 tokens", [(512, 1, True)] * 32),
        ("32 decodes and 256 prompt tokens", [*[(512, 1, True)] * 32, (0, 256, False)]),
    ):
        table.add_row(name, f"{measured.cost.step_time_s(StepLoad.of(shape)) * 1000:.1f}")
    console.print(table)
    error = measured.error
    console.print(
        f"error on {error.num_steps} steps not fitted on: median {error.median:.1%}, P95 {error.p95:.1%}"
    )
    console.print(f"saved to {path}", markup=False, soft_wrap=True)
