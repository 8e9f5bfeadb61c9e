"""Draws a scenario's result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backfill.core.errors import ConfigError
from backfill.simulation.metrics import percentile
from backfill.simulation.replay import BIN_S, ReplayResult
from backfill.simulation.scenarios import COLOURS, PointResult, ScenarioResult

_WINDOW_S = 20.0


def save_plot(path: Path, result: ScenarioResult) -> None:
    """Write a PNG: latency and throughput over time, or at each setting of a sweep.

    Raises: ConfigError when the file cannot be written.
    """
    figure = Figure(figsize=(10, 9), layout="constrained")
    figure.suptitle(result.scenario.title)
    axes = figure.subplots(3, 1)
    if len(result.points) == 1:
        _plot_timeline(axes, result.points[0], result)
    else:
        _plot_sweep(axes, result)
    write_figure(figure, path)


def new_figure() -> Figure:
    """An empty figure that lays itself out."""
    return Figure(layout="constrained")


def write_figure(figure: Figure, path: Path) -> None:
    """Write a PNG. Raises: ConfigError when the file cannot be written."""
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def _plot_timeline(axes: Sequence[Axes], point: PointResult, result: ScenarioResult) -> None:
    slo = result.scenario.slo
    for policy, replay in point.replays.items():
        colour = COLOURS[policy]
        starts = np.arange(0.0, replay.duration_s, _WINDOW_S)
        for axis, samples in ((axes[0], _ttfts(replay)), (axes[1], _gaps(replay))):
            worst = [percentile(_within(samples, start), 99) or np.nan for start in starts]
            axis.plot(starts, worst, color=colour, label=policy)
        at_s = np.arange(len(replay.timeline)) * BIN_S
        tokens = [each.total() / BIN_S for each in replay.timeline]
        axes[2].plot(at_s, tokens, color=colour, label=policy, linewidth=1)
    for axis, limit, name in ((axes[0], slo.ttft_s, "TTFT"), (axes[1], slo.tpot_s, "inter-token gap")):
        axis.axhline(limit, color="red", linewidth=0.8, label="objective")
        axis.set(yscale="log", ylabel=f"P99 {name} (s)")
        axis.legend(fontsize=8)
    axes[2].set(xlabel="s", ylabel="tokens/s, online and offline", xlim=(0, replay.duration_s))


def _plot_sweep(axes: Sequence[Axes], result: ScenarioResult) -> None:
    labels = [", ".join(f"{name} {value:g}" for name, value in p.setting.items()) for p in result.points]
    for axis, name in zip(axes, ("ttft_p99_s", "itl_p99_s", "offline_tok_s"), strict=True):
        for index, policy in enumerate(result.points[0].metrics):
            width = 0.8 / len(result.points[0].metrics)
            at = np.arange(len(labels)) + index * width
            values = [getattr(point.metrics[policy], name) for point in result.points]
            axis.bar(at, values, width, color=COLOURS[policy], label=policy)
        axis.set(ylabel=name)
        axis.set_xticks(np.arange(len(labels)) + 0.3, labels, fontsize=7)
    axes[0].set(yscale="log")
    axes[0].legend(fontsize=8)


def _ttfts(replay: ReplayResult) -> list[tuple[float, float]]:
    return [(record.arrived_at_s, record.ttft_s) for record in replay.online]


def _gaps(replay: ReplayResult) -> list[tuple[float, float]]:
    return [
        (before, after - before)
        for record in replay.online
        for before, after in zip(record.token_at_s, record.token_at_s[1:], strict=False)
    ]


def _within(samples: list[tuple[float, float]], start_s: float) -> list[float]:
    return [value for at_s, value in samples if start_s <= at_s < start_s + _WINDOW_S]
