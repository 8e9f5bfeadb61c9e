"""Draws runs under several policies: latency and throughput over time, one colour for each policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from backfill.bench.coserve_figures import WINDOW_S, Timeline
from backfill.bench.coserve_load import CoserveLoad
from backfill.bench.plot import write_figure

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
        style = {"color": _COLOURS.get(name) or next(others), "label": name}
        _draw(ttft, timeline.ttfts, linestyle=":", linewidth=0.6, marker="o", markersize=3, **style)
        # Timelines have the end of each window; draw at its middle.
        _draw(itl, [(at - WINDOW_S / 2, p99) for at, p99 in timeline.itl_p99s], marker=".", **style)
        rates = [(at - WINDOW_S / 2, by_online, by_offline) for at, by_online, by_offline in timeline.rates]
        _draw(online, [(at, rate) for at, rate, _ in rates], **style)
        _draw(offline, [(at, np.nan if rate is None else rate) for at, _, rate in rates], **style)
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
    write_figure(figure, path, dpi=110)


def _draw(axes: Any, points: list[tuple[float, float]], **style: Any) -> None:
    at_s, values = zip(*sorted(points), strict=True) if points else ((), ())
    axes.plot(at_s, values, **style)
