"""``backfill simulate selectn-...``: the figures of Select-N's evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.sweeps import SweepOptions, cell, names_of, numbers_of
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.simulation.selectn_figures import FIGURES, SelectnExperiment, run_selectn
from backfill.simulation.selectn_result import LARGEST_BATCH, OTHER, RESIDENT, Row, SelectnResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectnOptions:
    """The points of a figure.

    Attributes:
        models: models, separated by commas: opt-6.7b, opt-13b, qwen2-beta-7b, llama-2-13b, llama-13b.
            Default: the paper's.
        batches: requests of a step, separated by commas. Default: the paper's.
        slacks: of the objectives over the P99 without offloading, separated by commas; 0.5 is half as long
            again. Default: the paper's.
        steps: simulated steps of each interval, 100 to 100000.
    """

    models: str | None = None
    batches: str | None = None
    slacks: str | None = None
    steps: int = 1000

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)

    def experiment(self, scenario: str) -> SelectnExperiment:
        """Raises: ConfigError."""
        figure = FIGURES[scenario]
        batches = numbers_of("batches", self.batches, figure.batches)
        if any(batch != int(batch) for batch in batches):
            raise ConfigError(f"`batches` must be whole numbers, got {self.batches!r:.80}.")
        experiment = replace(
            figure,
            models=names_of(self.models, figure.models),
            batches=tuple(int(batch) for batch in batches),
            slacks=numbers_of("slacks", self.slacks, figure.slacks),
            num_steps=self.steps,
        )
        if figure.models:
            experiment.validate()
        else:
            replace(experiment, models=("opt-13b",)).validate()
        return experiment


def selectn_slo(points: SelectnOptions, options: SweepOptions) -> None:
    """Run Select-N's figure 9: TTFT and TPOT over their objectives, beside DeepSpeed's interval 1."""
    _run("selectn-slo", "Select-N, figure 9: latency over its objective", points, options)


def selectn_memory(points: SelectnOptions, options: SweepOptions) -> None:
    """Run Select-N's figure 10: host memory and throughput, beside FlexGen's static estimate.

    Batch sizes with the objective of the time without offloading; then the largest decode batch that memory
    allows, with objectives in seconds.
    """
    _run("selectn-memory", "Select-N, figure 10: host memory and throughput", points, options)


def selectn_interval(points: SelectnOptions, options: SweepOptions) -> None:
    """Run Select-N's figure 11: every interval with one objective."""
    _run("selectn-interval", "Select-N, figure 11: every interval", points, options)


def selectn_contention(points: SelectnOptions, options: SweepOptions) -> None:
    """Run Select-N's figure 12: two devices on one bus."""
    _run("selectn-contention", "Select-N, figure 12: two devices on one bus", points, options)


def selectn_maxlen(points: SelectnOptions, options: SweepOptions) -> None:
    """Compute Select-N's figure 14: tokens of KV at each interval."""
    _run("selectn-maxlen", "Select-N, figure 14: largest total length", points, options)


def _app(function: Callable[[SelectnOptions, SweepOptions], None], name: str, points: str) -> object:
    return command(
        function,
        {"Points": points, "Runs": "jobs", "Output": "plot json"},
        prefix=f"BACKFILL_SIMULATE_SELECTN_{name}_",
    )


slo_app = _app(selectn_slo, "SLO", "models slacks steps")
memory_app = _app(selectn_memory, "MEMORY", "models batches slacks steps")
interval_app = _app(selectn_interval, "INTERVAL", "models slacks steps")
contention_app = _app(selectn_contention, "CONTENTION", "batches steps")
maxlen_app = _app(selectn_maxlen, "MAXLEN", "models")


class _Column(NamedTuple):
    heading: str
    of: Callable[[Row], str]


def _optimum(row: Row) -> str:
    if not (row.exists and row.found):
        return "none"
    return _interval(row.optimum) if row.searched else ""


def _interval(interval: int | None) -> str:
    return "-" if interval is None else str(interval)


def _offloaded(row: Row) -> str:
    return f"{row.portion:.1%}" if row.portion is not None else _interval(row.interval)


_COLUMNS = {
    "x": _Column("", lambda row: "-" if row.system == RESIDENT and row.x > 1 else f"{row.x:g}"),
    "system": _Column("system", lambda row: row.system),
    "offloaded": _Column("i", _offloaded),
    "optimum": _Column("best", _optimum),
    "batch": _Column("batch", lambda row: str(row.batch_size)),
    "slo": _Column("SLO ms", lambda row: cell(None if row.slo_s is None else 1000 * row.slo_s, ".0f")),
    "p99": _Column("P99 / SLO", lambda row: cell(row.over_slo, ".3f")),
    "tpot": _Column(
        "TPOT / SLO",
        lambda row: "" if row.tpot_p99_s is None or not row.slo_s else f"{row.tpot_p99_s / row.slo_s:.3f}",
    ),
    "smaller": _Column("i-1 / SLO", lambda row: cell(row.smaller_over_slo, ".3f")),
    "host": _Column("host GB", lambda row: f"{row.host_bytes / 1e9:.2f}"),
    "kv": _Column("KV tokens", lambda row: f"{row.kv_tokens:,}" if row.kv_tokens >= 0 else "no room"),
    "tokens": _Column("tok/s", lambda row: f"{row.tokens_per_s:.0f}"),
}
# What ``x`` is, and the columns behind it, by figure or kind of group.
_TABLES = {
    "selectn-slo": ("slack", "system offloaded optimum slo p99 tpot smaller host tokens"),
    "selectn-memory": ("batch", "system offloaded optimum p99 smaller host kv tokens"),
    LARGEST_BATCH: ("SLO s", "system offloaded batch p99 host kv tokens"),
    "selectn-interval": ("i", "system optimum p99 tpot smaller host kv tokens"),
    "selectn-contention": ("batch", "system offloaded optimum p99 host kv tokens"),
    "selectn-maxlen": ("i", "system host kv"),
}
_OF_INTERVALS = ("selectn-interval", "selectn-maxlen")


def _run(scenario: str, title: str, points: SelectnOptions, options: SweepOptions) -> None:
    console = Console()
    experiment = points.experiment(scenario)
    path = options.begin(console, title, scenario)
    with interruptible():
        result = run_selectn(experiment, options.jobs)
    for line in result.settings:
        console.print(line, style="dim", highlight=False, markup=False)
    for group, rows in result.groups.items():
        _print_rows(console, scenario, group, rows)
    _print_compared(console, result)
    if path is not None:
        from backfill.simulation.selectn_plot import save_selectn_plot

        save_selectn_plot(path, result, title)
    options.end(console, path, result.as_json())


def _print_rows(console: Console, scenario: str, group: str, rows: list[Row]) -> None:
    kind = LARGEST_BATCH if group.endswith(LARGEST_BATCH) else scenario
    x_heading, names = _TABLES[kind]
    columns = [_COLUMNS[name] for name in ("x", *names.split())]
    table = Table(title=group, pad_edge=False, padding=(0, 0, 0, 1))
    for column in columns:
        is_name = column.heading == "system"
        table.add_column(column.heading or x_heading, justify="left" if is_name else "right", no_wrap=is_name)
    before = rows[0]
    for row in rows:
        if scenario in _OF_INTERVALS:
            if row is not before and row.system == OTHER and row.host_bytes == before.host_bytes:
                continue  # as many layers are offloaded
        elif row.x != before.x:
            table.add_section()
        before = row
        table.add_row(*(column.of(row) for column in columns))
    console.print(table)


def _print_compared(console: Console, result: SelectnResult) -> None:
    compared = result.compared()
    if not compared:
        return
    table = Table(title="Beside the paper", pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("figure")
    table.add_column("here", justify="right")
    table.add_column("paper", justify="right")
    for each in compared:
        table.add_row(each.name, each.ours, each.paper)
    console.print(table)
