"""Draws the sweeps: figures against the rate of online requests, one colour for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backfill.simulation.bros import SLO_OF_ALL, BrosPoint, BrosResult
from backfill.simulation.goodput import GoodputPoint, GoodputResult
from backfill.simulation.plot import COLOURS, write_figure

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


def save_bros_plot(path: Path, result: BrosResult) -> None:
    """Write a PNG with a row for each model and workload. Raises: ConfigError when it cannot be written."""
    rows: dict[tuple[str, str], list[BrosPoint]] = {}
    for point in result.points:
        rows.setdefault((point.setting.workload, point.setting.model), []).append(point)
    figure = Figure(figsize=(15, 1 + _ROW_INCHES * len(rows)), layout="constrained")
    figure.suptitle("BROS, figures 10 and 11: online latency and offline throughput")
    axes = figure.subplots(len(rows), 4, squeeze=False)
    names = {
        "normalized_latency_s": "latency/token (s)",
        "ttft_attainment": f"TTFT within {SLO_OF_ALL.ttft_s:g} s",
        "tpot_attainment": f"TPOT within {SLO_OF_ALL.tpot_s:g} s",
        "offline_rps": "offline requests/s",
    }
    for row, ((workload, model), points) in zip(axes, rows.items(), strict=True):
        rates = [point.setting.rate_per_s for point in points]
        for axis, (name, label) in zip(row, names.items(), strict=True):
            for policy in result.experiment.policies:
                values = [point.policies[policy][name] for point in points]
                axis.plot(rates, values, color=COLOURS[policy], label=policy, marker=".")
            axis.set(xlabel="online requests/s", ylabel=label)
            axis.set_ylim(bottom=0)
        row[0].set(ylabel=f"{model}, {workload}\nlatency/token (s)")
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
