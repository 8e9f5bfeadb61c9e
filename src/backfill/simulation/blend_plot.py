"""Draws BlendServe's figures 8 and 9."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from backfill.core.errors import ConfigError
from backfill.simulation.blendserve import BLEND, REFERENCE, BlendPoint, BlendResult

_ROW_INCHES = 2.2


def save_grid_plot(path: Path, result: BlendResult) -> None:
    """Write a PNG like figure 9: throughput of ``blend`` over ``dfs`` for each density and sharing.

    Raises: ConfigError when the file cannot be written.
    """
    densities = sorted({point.target.density for point in result.points})
    sharings = sorted({point.target.sharing for point in result.points}, reverse=True)
    values = np.full((len(sharings), len(densities)), np.nan)
    for point in result.points:
        row, column = sharings.index(point.target.sharing), densities.index(point.target.density)
        values[row, column] = np.nan if (speedup := point.speedup()) is None else speedup
    figure = Figure(figsize=(1.5 + 0.7 * len(densities), 1.5 + 0.6 * len(sharings)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="white", fontsize=8)
    axes.set_xticks(range(len(densities)), [f"{each:.2f}" for each in densities])
    axes.set_yticks(range(len(sharings)), [f"{each:.2f}" for each in sharings])
    axes.set(xlabel="compute density", ylabel="prefix sharing")
    experiment = result.experiment
    axes.set_title(
        f"Throughput of {BLEND} over {REFERENCE}: {experiment.source}, mmlu and openvid, "
        f"{experiment.num_requests} requests"
    )
    figure.colorbar(image)
    _write(figure, path)


def save_usage_plot(path: Path, point: BlendPoint) -> None:
    """Write a PNG like figure 8: compute and memory seconds of steps, a row for each order.

    Raises: ConfigError when the file cannot be written.
    """
    figure = Figure(figsize=(10, 1 + _ROW_INCHES * len(point.usage)), layout="constrained")
    figure.suptitle(
        f"Resources of a step, density {point.target.density:g}, sharing {point.target.sharing:g}"
    )
    axes = figure.subplots(len(point.usage), 1, squeeze=False)[:, 0]
    for axis, (order, result) in zip(axes, point.usage.items(), strict=True):
        steps = np.linspace(0, result.num_steps, len(result.compute_s))
        axis.plot(steps, 1000 * result.compute_s, label="compute", color="#b2182b")
        axis.plot(steps, 1000 * result.memory_s, label="memory", color="#2166ac")
        axis.set(ylabel=f"{order}\nms alone")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    axes[-1].set(xlabel="step")
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
