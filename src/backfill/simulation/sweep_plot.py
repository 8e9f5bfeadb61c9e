"""Draws the sweeps: figures against the rate of online requests, one colour for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backfill.simulation.goodput import GoodputPoint, GoodputResult
from backfill.simulation.plot import write_figure
from backfill.simulation.scenarios import COLOURS

_ROW_INCHES = 2.6


def save_goodput_plot(path: Path, result: GoodputResult) -> None:
    """Write a PNG: a row for each workload and CV, goodput on the left and offline tokens on the right.

    Without offline requests lines are dotted. Raises: ConfigError when the file cannot be written.
    """
    rows = list(dict.fromkeys((panel.workload, panel.cv) for panel in result.panels()))
    figure = Figure(figsize=(11, 1 + _ROW_INCHES * len(rows)), layout="constrained")
    figure.suptitle(f"Goodput against load, {result.sweep.hardware}; dotted: without offline requests")
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for panel, points in result.panels().items():
        row = axes[rows.index((panel.workload, panel.cv))]
        _draw_policies(row[0], points, "goodput_rps", is_dotted=not panel.has_offline)
        if panel.has_offline:
            _draw_policies(row[1], points, "offline_tok_s")
        else:
            loads = [point.setting.load for point in points]
            row[0].plot(
                loads, [point.rate_per_s for point in points], color="grey", linewidth=0.8, label="arrivals"
            )
        row[0].set(ylabel=f"{panel.workload}, CV {panel.cv:g}\ngoodput (requests/s)")
        row[1].set(ylabel="offline tokens/s")
    for axis in axes.flat:
        axis.set(xlabel="online load / capacity")
        axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=7)
    write_figure(figure, path)


def _draw_policies(axis: Axes, points: Sequence[GoodputPoint], name: str, *, is_dotted: bool = False) -> None:
    """One line for each policy. ``online-only`` is the same with offline requests, so it is drawn once."""
    for policy in points[0].policies:
        if is_dotted and policy == "online-only":
            continue
        axis.plot(
            [point.setting.load for point in points],
            [point.policies[policy][name] for point in points],
            color=COLOURS[policy],
            label=None if is_dotted else policy,
            linestyle=":" if is_dotted else "-",
            marker=".",
        )
