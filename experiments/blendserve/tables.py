"""Tables of orders on pools, beside the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from backfill.simulation.tables import cell, print_rows
from experiments.blendserve.mix import Usage
from experiments.blendserve.result import (
    BLEND,
    PAPER_GRID,
    PAPER_TABLE2,
    REFERENCE,
    BlendPoint,
    speedups_of,
)
from experiments.blendserve.sources import SOURCES, TraceFigures

_SOURCE_SAMPLE = 20_000


def source_figures(source: str, lengths: Path | None = None, seed: int = 1) -> TraceFigures:
    """Sharing and density of one source by itself, beside the paper's table 3. Raises: ConfigError."""
    rng = np.random.default_rng(seed)
    kind = SOURCES[source]
    if lengths is None:
        return Usage.of(kind.draw(_SOURCE_SAMPLE, rng)).figures
    return Usage.of(kind.draw_from(lengths, _SOURCE_SAMPLE, rng)).figures


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


def print_sources(console: Console, source: str, source_lengths: Path | None) -> None:
    table = Table(title="Sources (and the paper's table 3)")
    for heading in ("source", "sharing", "density"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for name in (source, "mmlu", "openvid"):
        lengths = source_lengths if name == source else None
        drawn, paper = source_figures(name, lengths), SOURCES[name].paper
        if paper is not None:
            sharing, density = f"{paper.sharing:.2f}", f"{paper.density:.2f}"
            table.add_row(name, f"{drawn.sharing:.2f} ({sharing})", f"{drawn.density:.2f} ({density})")
    console.print(table)


def print_point(console: Console, name: str, point: BlendPoint) -> None:
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


def print_usage(console: Console, point: BlendPoint) -> None:
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


def print_summary(console: Console, points: Sequence[BlendPoint]) -> None:
    """Of ``blend``, beside the paper's figures for its four pools."""
    blended = [point.orders[BLEND] for point in points if BLEND in point.orders]
    speedups = speedups_of(points)
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


def print_grid(console: Console, source: str, points: Sequence[BlendPoint]) -> None:
    columns: dict[str, dict[str, float | None]] = {}
    for point in points:
        column = columns.setdefault(f"shared {100 * point.target.sharing:g}%", {})
        column[f"{point.target.density:g}"] = point.speedup()
    rows = {name: (name, ".3f") for each in columns.values() for name in each}
    speedups = speedups_of(points)
    if speedups:
        print_rows(console, f"Throughput of {BLEND} over {REFERENCE}", rows, columns, "density")
        mean, least, most = PAPER_GRID[source]
        console.print(
            f"mean {fmean(speedups):.3f}, {min(speedups):.3f} to {max(speedups):.3f} "
            f"(paper: {cell(mean, '.3f') or 'no mean'}, {least:g} to {most:g})"
        )
    blended = [point.orders[BLEND] for point in points if BLEND in point.orders]
    if blended:
        console.print(
            f"over the achievable optimum {fmean(each.of_optimum for each in blended):.3f}, "
            f"{fmean(each.of_optimum_with_longest for each in blended):.3f} with the longest output's steps; "
            f"sharing over the optimum {fmean(each.of_optimal_sharing for each in blended):.3f} (means)"
        )
