"""Draws routing policies of a fleet side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backfill.simulation.fleet import REPORT_S
from backfill.simulation.fleet_run import ONE_ENGINE, FleetComparison, FleetOutcome
from backfill.simulation.metrics import percentile
from backfill.simulation.plot import write_figure

ROUTER_COLOURS = {
    "slo": "#1b7837",
    "least-loaded": "#e08214",
    "round-robin": "#762a83",
    "prefix": "#2166ac",
    ONE_ENGINE: "#888888",
}
_NUM_WINDOWS = 60


def save_fleet_plot(path: Path, comparison: FleetComparison) -> None:
    """Write a PNG: the first seed over time, and figures of all seeds.

    Raises: ConfigError when the file cannot be written.
    """
    experiment = comparison.experiment
    hardware = experiment.replica_hardware()
    first = next(iter(comparison.outcomes.values()))[0]
    figure = Figure(figsize=(11, 9), layout="constrained")
    figure.suptitle(
        f"{experiment.num_replicas} replicas of {hardware.name}, {hardware.kv_tokens:,} tokens of KV each, "
        f"{len(first.ttft_s):,} online requests"
    )
    grid = figure.add_gridspec(3, 4)
    latency = figure.add_subplot(grid[0, :])
    load = figure.add_subplot(grid[1, :], sharex=latency)
    for router, outcomes in comparison.outcomes.items():
        _draw_latency(latency, router, outcomes[0], experiment.traffic.duration_s)
        if router != ONE_ENGINE:
            _draw_load(load, router, outcomes[0])
    latency.axhline(experiment.slo.ttft_s, color="red", linewidth=0.8, label="objective")
    latency.set(yscale="log", ylabel="P99 TTFT (s)", xlim=(0, experiment.traffic.duration_s))
    latency.legend(fontsize=8)
    load.set(xlabel="s", ylabel="online requests,\nleast and most of a replica", ylim=(0, None))
    bars = {
        "ttft_p99_s": "P99 TTFT (s)",
        "attainment": "both objectives met",
        "hit_rate": "prefix hit rate",
        "offline_tok_s": "offline tokens/s",
    }
    for column, (name, label) in enumerate(bars.items()):
        _draw_bars(figure.add_subplot(grid[2, column]), comparison, name, label)
    write_figure(figure, path)


def _draw_latency(axis: Axes, router: str, outcome: FleetOutcome, duration_s: float) -> None:
    edges = np.linspace(0.0, duration_s, _NUM_WINDOWS + 1)
    windows = np.searchsorted(edges, outcome.arrived_at_s, side="right") - 1
    p99 = [percentile(outcome.ttft_s[windows == window], 99) or np.nan for window in range(_NUM_WINDOWS)]
    axis.plot(edges[:-1], p99, color=ROUTER_COLOURS[router], label=router)


def _draw_load(axis: Axes, router: str, outcome: FleetOutcome) -> None:
    """The band between the replicas with the fewest and the most online requests, means of windows."""
    size = max(1, len(outcome.num_online) // _NUM_WINDOWS)
    rows = outcome.num_online[: len(outcome.num_online) // size * size]
    at_s = np.arange(0, len(rows), size) * REPORT_S
    for values in (rows.min(axis=1), rows.max(axis=1)):
        axis.plot(at_s, values.reshape(-1, size).mean(axis=1), color=ROUTER_COLOURS[router], linewidth=1)


def _draw_bars(axis: Axes, comparison: FleetComparison, name: str, label: str) -> None:
    routers = list(comparison.outcomes)
    values = [comparison.figures(router)[name] for router in routers]
    axis.bar(routers, values, color=[ROUTER_COLOURS[router] for router in routers])
    axis.tick_params(axis="x", rotation=30, labelsize=7)
    axis.set_title(label, fontsize=9)
    for at, value in enumerate(values):
        axis.text(at, value, f"{value:,.0f}" if value >= 100 else f"{value:.3f}", ha="center", fontsize=7)
