"""Draws runs under several policies: latency and throughput over time, one colour for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from backfill.bench.coserve_figures import WINDOW_S, Timeline
from backfill.bench.coserve_load import CoserveLoad
from backfill.core.errors import ConfigError

_COLOURS = {
    "online-only": "#2166ac",
    "priority": "#e08214",
    "fcfs": "#b2182b",
    "round-robin": "#762a83",
    "slo": "#1b7837",
}
_OTHER_COLOURS = ("#4d4d4d", "#c51b7d", "#01665e", "#8c510a")


def save_plot(path: Path, timelines: Mapping[str, Timeline], load: CoserveLoad, title: str) -> None:
    """Write a PNG of four panels with one time axis. Raises: ConfigError when it cannot be written."""
    figure = Figure(figsize=(11, 11), layout="constrained")
    figure.suptitle(title)
    ttft, itl, online, offline = figure.subplots(4, 1, sharex=True)
    others = iter(_OTHER_COLOURS * len(timelines))
    for name, timeline in timelines.items():
        color = _COLOURS.get(name) or next(others)
        ttfts = _columns(sorted(timeline.ttfts))
        ttft.plot(*ttfts, color=color, label=name, linestyle=":", linewidth=0.6, marker="o", markersize=3)
        # Timelines have the end of each window; draw at its middle.
        gaps = _columns([(at_s - WINDOW_S / 2, p99) for at_s, p99 in timeline.itl_p99s])
        itl.plot(*gaps, color=color, label=name, marker=".")
        by_online = _columns([(at_s - WINDOW_S / 2, rate) for at_s, rate, _ in timeline.rates])
        online.plot(*by_online, color=color, label=name)
        by_offline = [(at_s - WINDOW_S / 2, rate) for at_s, _, rate in timeline.rates]
        offline.plot(*_columns(by_offline), color=color, label=name)
    for axes, limit_s, name in (
        (ttft, load.ttft_slo, "TTFT of each request (s)"),
        (itl, load.tpot_slo, f"P99 inter-token gap in {WINDOW_S:g} s (s)"),
    ):
        axes.axhline(limit_s, color="red", linewidth=0.8, label="objective")
        axes.set(yscale="log", ylabel=name)
    online.set(ylabel="online tokens/s")
    offline.set(ylabel="offline tokens/s", xlabel="s", xlim=(0, load.end_s))
    for axes in (online, offline):
        axes.set_ylim(bottom=0)
    for axes in (ttft, itl, online, offline):
        axes.axvspan(0, load.warmup, color="grey", alpha=0.15, linewidth=0)
    ttft.legend(fontsize=8, ncols=len(timelines) + 1, loc="upper right")
    _write(figure, path, dpi=110)


def _columns(points: Sequence[tuple[float, float | None]]) -> NDArray[np.float64]:
    """Times and values as two rows; a value of None is NaN, which is not drawn."""
    return np.array(points, dtype=np.float64).reshape(-1, 2).T


def _write(figure: Figure, path: Path, *, dpi: int) -> None:
    """Raises: ConfigError when the file cannot be written."""
    try:
        figure.savefig(path, dpi=dpi, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
