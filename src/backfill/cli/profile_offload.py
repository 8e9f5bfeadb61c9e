"""``backfill profile --offload``: measure the performance record of a model on this device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.offloading.choice import IntervalChooser

if TYPE_CHECKING:
    from backfill.execution.analyzer import Analysis
    from backfill.offloading.record import PerformanceRecord

OnLoad = Callable[[int, int], None]


def measure_record(
    config: EngineConfig, *, is_quick: bool, out: Path | None, on_load: OnLoad
) -> tuple[Analysis, Path]:
    """Measure the record and save it in ``out``, or where engines look for it. Raises: BackfillError."""
    if config.num_ranks > 1:
        raise ConfigError(
            f"is measured in one process, and these are {config.num_ranks} ranks; leave one of them out.",
            field="offload",
        )
    from backfill.execution.analyzer import analyze, record_path
    from backfill.offloading.loads import FULL_LOADS, QUICK_LOADS

    analysis = analyze(config, QUICK_LOADS if is_quick else FULL_LOADS, on_load)
    path = out or record_path(analysis.record.key)
    try:
        analysis.record.save(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    return analysis, path


def print_record(
    console: Console, analysis: Analysis, path: Path, config: EngineConfig, *, as_json: bool
) -> None:
    """Print the record with the intervals that hold the configured or default objectives."""
    from backfill.engine.interval_choice import load_limits, objectives, on_bus

    record = on_bus(analysis.record, config)
    intervals = range(1, record.num_layers + 1)
    chooser = IntervalChooser(record, load_limits(config), (*intervals, None))
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
