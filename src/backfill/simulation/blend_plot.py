"""Draws BlendServe's figures 8 to 12."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from backfill.simulation.blendserve import BLEND, REFERENCE, BlendPoint, BlendResult
from backfill.simulation.plot import write_figure

_ROW_INCHES = 2.2
# A grid of few points still has room for its title, and one whose points gain the same for a scale.
_LEAST_INCHES = (6.4, 2.8)
_LEAST_SPAN = 0.1


def save_grid_plot(path: Path, result: BlendResult) -> None:
    """Write a PNG like figures 9 to 12: throughput of ``blend`` over ``dfs`` for each density and sharing.

    Raises: ConfigError when the file cannot be written.
    """
    write_figure(grid_figure(result), path)


def grid_figure(result: BlendResult) -> Figure:
    """Colours begin at 1, or at the least value below it, so that they say how much is gained."""
    densities = sorted({point.target.density for point in result.points})
    sharings = sorted({point.target.sharing for point in result.points}, reverse=True)
    values = np.full((len(sharings), len(densities)), np.nan)
    for point in result.points:
        row, column = sharings.index(point.target.sharing), densities.index(point.target.density)
        values[row, column] = np.nan if (speedup := point.speedup()) is None else speedup
    least_width, least_height = _LEAST_INCHES
    size = max(1.5 + 0.7 * len(densities), least_width), max(1.5 + 0.6 * len(sharings), least_height)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    least = np.nanmin(values, initial=1.0)
    most = np.nanmax(values, initial=least + _LEAST_SPAN)
    image = axes.imshow(values, cmap="viridis", aspect="auto", vmin=least, vmax=most)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            is_light = value > (least + most) / 2
            axes.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                color="black" if is_light else "white",
                fontsize=8,
            )
    axes.set_xticks(range(len(densities)), [f"{each:g}" for each in densities])
    axes.set_yticks(range(len(sharings)), [f"{each:g}" for each in sharings])
    axes.set(xlabel="compute density", ylabel="prefix sharing")
    experiment = result.experiment
    seeds = f", mean of {experiment.num_seeds} seeds" if experiment.num_seeds > 1 else ""
    axes.set_title(
        f"Throughput of {BLEND} over {REFERENCE}\n{experiment.source}, mmlu and openvid; "
        f"{experiment.num_requests:,} requests a point{seeds}",
        fontsize=10,
    )
    figure.colorbar(image)
    return figure


def save_usage_plot(path: Path, point: BlendPoint) -> None:
    """Write a PNG like figure 8: compute and memory seconds of steps, a row for each order.

    Raises: ConfigError when the file cannot be written.
    """
    write_figure(usage_figure(point), path)


def usage_figure(point: BlendPoint) -> Figure:
    """All rows have the same axes."""
    figure = Figure(figsize=(10, 1 + _ROW_INCHES * len(point.usage)), layout="constrained")
    figure.suptitle(
        f"Resources of a step, density {point.target.density:g}, sharing {point.target.sharing:g}"
    )
    axes = figure.subplots(len(point.usage), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axis, (order, result) in zip(axes, point.usage.items(), strict=True):
        steps = np.linspace(0, result.num_steps, len(result.compute_s))
        axis.plot(steps, 1000 * result.compute_s, label="compute", color="#b2182b")
        axis.plot(steps, 1000 * result.memory_s, label="memory", color="#2166ac")
        axis.set(ylabel=f"{order}\nms alone")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    axes[-1].set(xlabel="step")
    return figure
