"""Draws Select-N's figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backfill.core.errors import ConfigError
from backfill.simulation.selectn_result import (
    ALONE,
    DEEPSPEED,
    LARGEST_BATCH,
    OTHER,
    RESIDENT,
    SELECT_N,
    Row,
    SelectnResult,
)

_ROW_INCHES = 2.6
_LOG_FROM = 4.0  # times the objective
_COLOURS = {
    SELECT_N: "#1b7837",
    OTHER: "#7f7f7f",
    DEEPSPEED: "#b2182b",
    RESIDENT: "#2166ac",
    ALONE: "#e08214",
    "flexgen": "#762a83",
    "flexgen-flops": "#c2a5cf",
    "flexgen-slo": "#de77ae",
}
_PANELS: dict[str, Callable[[Row], float | None]] = {
    "P99 / SLO": lambda row: row.over_slo,
    "host memory (GB)": lambda row: row.host_bytes / 1e9,
    "KV tokens": lambda row: max(0, row.kv_tokens),
    "tokens/s": lambda row: row.tokens_per_s,
}
_SHOWN = {"selectn-maxlen": ("host memory (GB)", "KV tokens")}
_X = {
    "selectn-slo": "slack of the objective",
    "selectn-memory": "batch size",
    "selectn-contention": "batch size",
}


def save_selectn_plot(path: Path, result: SelectnResult, title: str) -> None:
    """Write a PNG with a row for each group. Raises: ConfigError when the file cannot be written."""
    panels = _SHOWN.get(result.scenario, tuple(_PANELS))
    groups = result.groups
    figure = Figure(figsize=(4 * len(panels), 1 + _ROW_INCHES * len(groups)), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(len(groups), len(panels), squeeze=False)
    for row, (group, rows) in zip(axes, groups.items(), strict=True):
        for axis, panel in zip(row, panels, strict=True):
            _draw(axis, rows, _PANELS[panel])
            x_label = _X.get(result.scenario, "interval")
            axis.set(ylabel=panel, xlabel="objective (s)" if group.endswith(LARGEST_BATCH) else x_label)
            if panel == "P99 / SLO":
                axis.axhline(1.0, color="red", linewidth=0.8)
                if max(row.over_slo or 1.0 for row in rows) > _LOG_FROM:
                    axis.set_yscale("log")
                    continue
            axis.set_ylim(0.0, 1.1 * axis.dataLim.y1 or 1.0)
        row[0].set_title(group, loc="left", fontsize=8)
        row[0].legend(fontsize=6)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def _draw(axis: Axes, rows: list[Row], figure_of: Callable[[Row], float | None]) -> None:
    for system in dict.fromkeys(row.system for row in rows):
        of_system = {system, SELECT_N} if system == OTHER else {system}
        points = [
            (row.x, value)
            for row in rows
            if row.system in of_system and (value := figure_of(row)) is not None
        ]
        axis.plot(
            [x for x, _ in points],
            [value for _, value in points],
            color=_COLOURS[system],
            label=system,
            marker="o" if system == SELECT_N else ".",
            linewidth=1,
        )
