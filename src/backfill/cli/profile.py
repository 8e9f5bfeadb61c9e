"""``backfill profile``: time a model on this device and save its cost profile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from backfill.cli.command import VARIABLES, command
from backfill.cli.interrupts import LOADING, interruptible
from backfill.cli.profile_offload import measure_record, print_record
from backfill.cli.startup import configure_logging, find_folder
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.costs.load import StepLoad
from backfill.costs.profile import CostProfile
from backfill.engine.environment import engine_environment, restart_with
from backfill.engine.options import ModelOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How much to measure, and where the profile goes.

    Attributes:
        quick: a coarse profile in a second or so.
        offload: measure the performance record instead, from which ``offload_interval`` auto follows: what
            each layer takes, and the transfer of its weights.
        out: file to write instead of the one that backfill serve looks for.
        json: end with the profile as JSON on a line.
    """

    quick: bool = False
    offload: bool = False
    out: Path | None = None
    json: bool = False


def profile(options: ProfileOptions, model: ModelOptions, engine: EngineConfig) -> None:
    """Time steps of the model here, fit the cost model and save it. `backfill serve` loads it by itself."""
    restart_with(engine_environment(os.environ))
    console = Console()
    configure_logging("WARNING", "profile")
    with interruptible(LOADING):
        folder = find_folder(model)
    scheduler = replace(
        engine.scheduler,
        max_prefill_chunk_tokens=engine.scheduler.max_num_batched_tokens,
        checkpointing="adaptive",  # for a pool in host memory, whose copies are timed too
    )
    config = replace(engine, model_dir=str(folder), scheduler=scheduler)
    if options.offload:
        with interruptible(), _bar(console) as bar:
            analysis, path = measure_record(
                config, is_quick=options.quick, out=options.out, on_load=_advance(bar)
            )
        print_record(console, analysis, path, config, as_json=options.json)
        return
    measured, path = _measure(config, options, console)
    _print(console, measured, path)
    if options.json:
        print(json.dumps({"path": str(path), **asdict(measured)}))


app = command(
    profile,
    {
        "Model": "model revision dtype load_format max_model_len",
        "Engine": "device tensor_parallel_size pipeline_parallel_size executor threads num_micro_batches "
        "gpu_memory_utilization device_memory offload_interval offload_bus offload_bus_gib_per_s",
        "Scheduling": "max_num_seqs max_num_batched_tokens ttft_slo tpot_slo",
        "KV memory": "kv_gib block_size",
        "Profile": "quick offload out json",
    },
    positional="model",
    variables=VARIABLES,
)


def _measure(config: EngineConfig, options: ProfileOptions, console: Console) -> tuple[CostProfile, Path]:
    """The profile and the file it was saved in. Raises: ConfigError."""
    from backfill.bus.throttle import open_bus
    from backfill.costs.profiler import FULL, QUICK
    from backfill.engine.interval_choice import with_chosen_interval
    from backfill.execution.profile import measure_profile, profile_path, save_in_cache
    from backfill.parallel.create import create_executor

    config = with_chosen_interval(config)
    executor = create_executor(config, open_bus(config))
    with interruptible(), _bar(console) as bar:
        measured = measure_profile(config, executor, QUICK if options.quick else FULL, _advance(bar))
    path = options.out or profile_path(measured.key)
    try:
        if options.out is None:
            save_in_cache(measured, keep_full=False)
        else:
            measured.save(options.out)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    return measured, path


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("timing steps"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(), console=console, transient=True,
    )  # fmt: skip


def _advance(bar: Progress) -> Callable[[int, int], None]:
    """Shows the steps done, and all steps, on a new line of the bar."""
    task = bar.add_task("steps", total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


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
