"""``backfill simulate blendserve-table2``, ``-grid`` and ``-usage``: BlendServe's evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import cast

import numpy as np
from rich.console import Console
from rich.table import Table

from backfill.blending.requests import OrderName
from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.plots import check_folder
from backfill.cli.sweeps import SweepOptions, cell, live_sweep, names_of, numbers_of
from backfill.cli.tables import print_rows
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.simulation.blend_points import PointFile
from backfill.simulation.blend_run import PoolResult, PoolRun
from backfill.simulation.blend_sources import SOURCES
from backfill.simulation.blendserve import (
    BLEND,
    GRID_DENSITIES,
    GRID_FIGURES,
    GRID_SHARINGS,
    ORDERS,
    PAPER_GRID,
    PAPER_TABLE2,
    REFERENCE,
    TRACES,
    BlendExperiment,
    BlendPoint,
    BlendResult,
    Target,
    run_blend,
    source_figures,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendOptions:
    """The pools of the experiment.

    Attributes:
        source: compute-bound requests of the pools: burstgpt, azure, sharegpt or wildchat. MMLU and videos
            are mixed with them.
        source_lengths: CSV of their prompt and output lengths, instead of those drawn.
        requests: requests of a pool.
        orders: orders to run, separated by commas: fcfs, random, dfs, batchllm, blend.
        interference: how compute and memory traffic of a step disturb each other: blendserve, nanoflow,
            ideal (not at all) or sequential (they do not overlap).
    """

    source: str = "burstgpt"
    source_lengths: Path | None = None
    requests: int = 100_000
    orders: str = ",".join(ORDERS)
    interference: str = "blendserve"

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)

    def experiment(self, options: SweepOptions, targets: Sequence[Target]) -> BlendExperiment:
        """Raises: ConfigError."""
        experiment = BlendExperiment(
            targets=tuple(targets),
            source=self.source,
            orders=cast("tuple[OrderName, ...]", names_of(self.orders, ORDERS)),
            num_requests=self.requests,
            interference=self.interference,
            num_seeds=options.seeds,
            lengths=self.source_lengths,
        )
        experiment.validate()
        return experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class GridOptions:
    """The points of the grid.

    Attributes:
        densities: compute densities of the pools, separated by commas. Default: 0.8 to 1.4 by 0.05.
        sharings: shares of tokens that a perfect prefix cache saves, separated by commas. Default: 0.05 to
            0.45 by 0.1.
        output: file of JSON lines to which each point is appended once it has run. Points that it has are not
            run again, so an interrupted grid goes on. Points of other settings are refused.
    """

    densities: str | None = None
    sharings: str | None = None
    output: Path | None = None

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        check_folder("output", self.output)

    def targets(self) -> list[Target]:
        """Raises: ConfigError."""
        densities = numbers_of("densities", self.densities, GRID_DENSITIES)
        sharings = numbers_of("sharings", self.sharings, GRID_SHARINGS)
        return [Target(density, sharing) for sharing in sharings for density in densities]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOptions:
    """The pool to plot.

    Attributes:
        trace: number of the pool in the paper's table 2.
    """

    trace: int = 2

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        if not 1 <= self.trace <= len(TRACES):
            raise ConfigError(f"`trace` must be 1 to {len(TRACES)}, got {self.trace}.")

    def target(self) -> Target:
        return list(TRACES.values())[self.trace - 1]


def blendserve_table2(pools: BlendOptions, options: SweepOptions) -> None:
    """Run the four pools of BlendServe's table 2 in each order: throughput, prefix sharing, optimum."""
    console = Console()
    experiment = pools.experiment(options, tuple(TRACES.values()))
    console.print("[bold]BlendServe, table 2 and figures 6 and 7[/bold]")
    result = _run(console, "blendserve-table2", experiment, options.jobs)
    _print_sources(console, experiment)
    for name, point in zip(TRACES, result.points, strict=True):
        _print_point(console, name, point)
    _print_summary(console, result)
    options.end(console, None, result.as_json())


def blendserve_grid(
    points: GridOptions,
    options: SweepOptions,
    pools: BlendOptions = BlendOptions(requests=40_000, orders="dfs,blend"),
) -> None:
    """Run BlendServe's figures 9 to 12: throughput of `blend` over `dfs`, against density and sharing.

    Figure 9 is of burstgpt, 10 of azure, 11 of sharegpt, 12 of wildchat.
    """
    console = Console()
    experiment = pools.experiment(options, points.targets())
    figure = f"figure {GRID_FIGURES[experiment.source]}"
    path = options.begin(
        console, f"BlendServe, {figure}: {experiment.source}, mmlu and openvid", "blendserve-grid"
    )
    if points.output is None:
        result = _run(console, "blendserve-grid", experiment, options.jobs)
    else:
        with closing(PointFile(points.output, experiment)) as file:
            num_finished = sum(target in file.finished for target in experiment.targets)
            console.print(
                f"{num_finished} of {len(experiment.targets)} points are in {points.output}",
                markup=False,
                soft_wrap=True,
            )
            result = _run(console, "blendserve-grid", experiment, options.jobs, file)
    _print_grid(console, result)
    if path is not None and not result.speedups():
        console.print(f"No plot: it compares {BLEND} with {REFERENCE}.", highlight=False)
        path = None
    if path is not None:
        from backfill.simulation.blend_plot import save_grid_plot

        save_grid_plot(path, result)
    options.end(console, path, result.as_json())


def blendserve_usage(
    trace: UsageOptions,
    options: SweepOptions,
    pools: BlendOptions = BlendOptions(orders="dfs,blend"),
) -> None:
    """Plot BlendServe's figure 8: compute and memory time of the steps, in each order."""
    console = Console()
    experiment = pools.experiment(options, (trace.target(),))
    path = options.begin(console, f"BlendServe, figure 8: trace {trace.trace}", "blendserve-usage")
    result = _run(console, "blendserve-usage", experiment, options.jobs)
    _print_point(console, f"trace {trace.trace}", result.points[0])
    _print_usage(console, result.points[0])
    if path is not None:
        from backfill.simulation.blend_plot import save_usage_plot

        save_usage_plot(path, result.points[0])
    options.end(console, path, {**result.as_json(), "usage": result.points[0].usage_as_json()})


_POOLS = "source source_lengths requests interference"
_RUNS = "orders seeds jobs"
table2_app = command(
    blendserve_table2,
    {"Pools": _POOLS, "Runs": _RUNS, "Output": "json"},
    prefix="BACKFILL_SIMULATE_BLENDSERVE_TABLE2_",
)
grid_app = command(
    blendserve_grid,
    {"Pools": f"{_POOLS} densities sharings", "Runs": _RUNS, "Output": "output plot json"},
    prefix="BACKFILL_SIMULATE_BLENDSERVE_GRID_",
)
usage_app = command(
    blendserve_usage,
    {"Pools": f"{_POOLS} trace", "Runs": _RUNS, "Output": "plot json"},
    prefix="BACKFILL_SIMULATE_BLENDSERVE_USAGE_",
)

_FIGURES = {
    "tokens_per_s": ("tokens/s", ".0f"),
    "speedup": (f"/ {REFERENCE}", ".3f"),
    "of_optimum": ("/ achievable optimum", ".3f"),
    "of_optimum_with_longest": ("/ with longest output", ".3f"),
    "sharing": ("prompts from cache", ".3f"),
    "of_optimal_sharing": ("/ optimal sharing", ".3f"),
    "num_preemptions": ("preempted", ".0f"),
    "recomputed_share": ("recomputed", ".2%"),
}
_NUM_PARTS = 10  # of a run, whose usage is printed


def _run(
    console: Console,
    scenario: str,
    experiment: BlendExperiment,
    num_processes: int,
    file: PointFile | None = None,
) -> BlendResult:
    def on_done(run: PoolRun, result: PoolResult) -> None:
        mix = run.mix
        console.print(
            f"density {mix.density:g}, sharing {mix.sharing:g}, seed {mix.seed}: {run.order} done, "
            f"{result.num_steps} steps, {result.seconds:.0f} s on the simulated device",
            style="dim",
            soft_wrap=True,
        )

    finished = {} if file is None else file.finished
    num_left = sum(target not in finished for target in experiment.targets)
    num_runs = num_left * experiment.num_seeds * len(experiment.orders)
    with interruptible(), live_sweep(console, num_runs) as progress:
        return run_blend(
            scenario,
            experiment,
            num_processes,
            on_done,
            on_point=lambda point: None if file is None else file.add(point),
            finished=finished,
            progress=progress,
        )


def _print_sources(console: Console, experiment: BlendExperiment) -> None:
    table = Table(title="Sources (and the paper's table 3)")
    for heading in ("source", "sharing", "density"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for name in (experiment.source, "mmlu", "openvid"):
        lengths = experiment.lengths if name == experiment.source else None
        drawn, paper = source_figures(name, lengths), SOURCES[name].paper
        if paper is not None:
            sharing, density = f"{paper.sharing:.2f}", f"{paper.density:.2f}"
            table.add_row(name, f"{drawn.sharing:.2f} ({sharing})", f"{drawn.density:.2f} ({density})")
    console.print(table)


def _print_point(console: Console, name: str, point: BlendPoint) -> None:
    counts = ", ".join(f"{count} {source}" for source, count in point.num_requests.items())
    console.print(
        f"{name}: density {point.drawn.density:.3f} (target {point.target.density:g}), "
        f"sharing {point.drawn.sharing:.3f} of all tokens (target {point.target.sharing:g}); "
        f"{sum(point.num_requests.values())} requests: {counts}"
    )
    columns: dict[str, dict[str, float | None]] = {
        order: {**asdict(figures), "speedup": point.speedup(order)} for order, figures in point.orders.items()
    }
    print_rows(console, name, _FIGURES, columns)


def _print_usage(console: Console, point: BlendPoint) -> None:
    """Of each tenth of the steps, the mean seconds of either resource."""
    columns: dict[str, dict[str, float]] = {}
    for order, result in point.usage.items():
        for name, seconds in (("compute", result.compute_s), ("memory", result.memory_s)):
            parts = enumerate(np.array_split(1000 * seconds, _NUM_PARTS))
            columns[f"{order} {name}"] = {str(index): part.mean() for index, part in parts if len(part)}
    rows = {
        str(index): (f"{index / _NUM_PARTS:.0%} to {(index + 1) / _NUM_PARTS:.0%}", ".1f")
        for index in range(_NUM_PARTS)
    }
    print_rows(console, "ms a step, either resource alone on the device", rows, columns, "steps")


def _print_summary(console: Console, result: BlendResult) -> None:
    """Of ``blend``, beside the paper's figures for its four pools."""
    blended = [point.orders[BLEND] for point in result.points if BLEND in point.orders]
    speedups = result.speedups()
    if not blended:
        return
    found: dict[str, float | None] = {
        "speedup_mean": fmean(speedups) if speedups else None,
        "speedup_least": min(speedups, default=None),
        "speedup_most": max(speedups, default=None),
        "of_optimum": fmean(each.of_optimum for each in blended),
        "of_optimal_sharing": min(each.of_optimal_sharing for each in blended),
    }
    names = {
        "speedup_mean": f"throughput over {REFERENCE}, mean",
        "speedup_least": "least",
        "speedup_most": "most",
        "of_optimum": "over the achievable optimum, mean",
        "of_optimal_sharing": "sharing over the optimum, least",
    }
    table = Table(title=f"{BLEND}, all pools")
    for heading in ("", "here", "paper"):
        table.add_column(heading, justify="right" if heading else "left")
    for key, name in names.items():
        table.add_row(name, cell(found[key], ".3f"), format(PAPER_TABLE2[key], ".3f"))
    console.print(table)


def _print_grid(console: Console, result: BlendResult) -> None:
    columns: dict[str, dict[str, float | None]] = {}
    for point in result.points:
        column = columns.setdefault(f"shared {100 * point.target.sharing:g}%", {})
        column[f"{point.target.density:g}"] = point.speedup()
    rows = {name: (name, ".3f") for each in columns.values() for name in each}
    speedups = result.speedups()
    if speedups:
        print_rows(console, f"Throughput of {BLEND} over {REFERENCE}", rows, columns, "density")
        mean, least, most = PAPER_GRID[result.experiment.source]
        console.print(
            f"mean {fmean(speedups):.3f}, {min(speedups):.3f} to {max(speedups):.3f} "
            f"(paper: {cell(mean, '.3f') or 'no mean'}, {least:g} to {most:g})"
        )
    blended = [point.orders[BLEND] for point in result.points if BLEND in point.orders]
    if blended:
        console.print(
            f"over the achievable optimum {fmean(each.of_optimum for each in blended):.3f}, "
            f"{fmean(each.of_optimum_with_longest for each in blended):.3f} with the longest output's steps; "
            f"sharing over the optimum {fmean(each.of_optimal_sharing for each in blended):.3f} (means)"
        )
