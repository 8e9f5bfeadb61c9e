"""``backfill profile``: time a model on this device, and save its cost profile or its performance record."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from backfill.cli.command import VARIABLES, command
from backfill.cli.interrupts import LOADING, interruptible
from backfill.cli.live import note
from backfill.cli.startup import configure_logging, find_folder
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.measured_on import writing
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.costs.profile import CostProfile
from backfill.engine.environment import engine_environment, restart_with
from backfill.engine.options import ModelOptions, check_engine
from backfill.offloading.choice import IntervalChooser

if TYPE_CHECKING:
    from backfill.engine.analyzer import Analysis
    from backfill.offloading.record import PerformanceRecord


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
    if options.out is not None and options.out.is_dir():
        raise ConfigError(f"{options.out} is a folder, and a file is needed.", field="out")
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
    check_engine(config, needs_tokenizer=False)
    if options.offload:
        with interruptible(), _bar(console) as bar:
            analysis, path = _measure_record(config, options, _advance(bar))
        _print_record(console, analysis, path, config, as_json=options.json)
        return
    measured, path = _measure(config, options, console)
    _print(console, measured, path)
    if options.json:
        print(json.dumps({"path": str(path), **asdict(measured)}))


app = command(
    profile,
    {
        "Model": "model revision dtype quantization load_format max_model_len",
        "Engine": "device tensor_parallel_size pipeline_parallel_size executor threads num_micro_batches "
        "gpu_memory_utilization device_memory offload_interval offload_bus offload_bus_gib_per_s",
        "Scheduling": "max_num_seqs max_num_batched_tokens ttft_slo tpot_slo",
        "KV memory": "kv_gib kv_dtype block_size",
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
    with writing(path):
        if options.out is None:
            save_in_cache(measured, keep_full=False)
        else:
            measured.save(options.out)
    return measured, path


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("timing steps"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(), console=console, transient=True,
    )  # fmt: skip


def _advance(bar: Progress) -> Callable[[int, int], None]:
    """Shows the steps done, and all steps: on a new line of the bar, or without a terminal each tenth."""
    task = bar.add_task("steps", total=None)

    def tell(done: int, total: int) -> None:
        if bar.console.is_terminal:
            bar.update(task, completed=done, total=total)
        elif 10 * done // total > 10 * (done - 1) // total:
            note(f"{done} of {total} steps timed")

    return tell


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


def _measure_record(
    config: EngineConfig, options: ProfileOptions, on_load: Callable[[int, int], None]
) -> tuple[Analysis, Path]:
    """Measure the record and save it, where engines look for it by default. Raises: BackfillError."""
    from backfill.engine.analyzer import analyze, record_path
    from backfill.offloading.loads import FULL_LOADS, QUICK_LOADS
    from backfill.parallel.memories import with_device_of_ranks

    analysis = analyze(with_device_of_ranks(config), QUICK_LOADS if options.quick else FULL_LOADS, on_load)
    path = options.out or record_path(analysis.record.key)
    with writing(path):
        analysis.record.save(path)
    return analysis, path


def _print_record(
    console: Console, analysis: Analysis, path: Path, config: EngineConfig, *, as_json: bool
) -> None:
    """Print the record with the intervals that hold the configured or default objectives."""
    from backfill.engine.interval_choice import load_limits, objectives, on_bus

    record = on_bus(analysis.record, config)
    chooser = IntervalChooser(record, load_limits(config), (*record.intervals, None))
    slo = objectives(config, chooser)
    rows = [_row(record, slo, index) for index in range(len(record.loads))]
    table = Table(title=f"{record.key.model}, {record.key.dtype}, {record.key.device}")
    for name in ("phase", "batch", "length", "layer ms", "transfer ms", "step ms", "interval"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["phase"]),
            str(row["batch_size"]),
            str(row["length"]),
            f"{1000 * row['compute_s']:.2f}",
            f"{1000 * record.transfer_s:.2f}",
            f"{1000 * row['resident_step_s']:.1f}",
            str(row["interval"]),
        )
    console.print(table)
    console.print(
        f"interval: the smallest that holds a first token within {slo.ttft_s:.3g} s (prefill), each next "
        f"within {slo.tpot_s:.3g} s (decode); none: no offloading does; late: not even without offloading"
    )
    best = chooser.smallest_interval(slo)
    console.print(
        f"99 % of transfers alone within {1000 * analysis.alone_s:.2f} ms, beside layers within "
        f"{1000 * analysis.beside_s:.2f} ms; interval {best or 'none'} holds every load that is in time"
    )
    console.print(f"saved to {path}", markup=False, soft_wrap=True)
    if as_json:
        figures = {"alone_s": analysis.alone_s, "beside_s": analysis.beside_s}
        content = {
            "path": str(path),
            **asdict(analysis.record),
            **figures,
            "objectives": asdict(slo),
            "interval": best,
        }
        print(json.dumps({**content, "loads": rows}))


def _row(record: PerformanceRecord, slo: SLO, index: int) -> dict[str, Any]:
    """A load of the record and the interval that its objective needs: a number, none or late."""
    load = record.loads[index]
    objective_s = slo.ttft_s if load.phase == "prefill" else slo.tpot_s
    resident_s = record.times_of(load).resident_step_s
    interval = record.smallest_interval(load.phase, load.batch_size, load.length, objective_s)
    needed: int | str = "late" if resident_s > objective_s else interval or "none"
    return {**asdict(load), "resident_step_s": resident_s, "interval": needed}
