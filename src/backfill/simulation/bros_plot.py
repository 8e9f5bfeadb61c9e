"""Draws BROS's figures 13 and 14, and what the KV pool is used for over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backfill.simulation.bros import SLO_OF_ALL
from backfill.simulation.bros_cache import CachePoint, CacheResult
from backfill.simulation.bros_overhead import GROUPS, PAPER_SHARES, OverheadPoint, OverheadResult
from backfill.simulation.kv_usage import SAMPLE_S, KVUsage, KVUse
from backfill.simulation.plot import COLOURS, write_figure

_ROW_INCHES = 2.8
_COLUMN_INCHES = 3.4
_USE_COLOURS = ("#2166ac", "#e08214", "#762a83", "#fdb863", "#d9d9d9", "#ffffff")  # as in ``KVUse``


def save_cache_plot(path: Path, result: CacheResult) -> None:
    """Write a PNG with a row for each point: attainments, then each policy's use of the pool over time.

    Raises: ConfigError when it cannot be written.
    """
    policies = result.experiment.policies
    rows, columns = len(result.points), 1 + len(policies)
    size = (_COLUMN_INCHES * columns, 1 + _ROW_INCHES * rows)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle("BROS, figure 13: attainments, and KV blocks by class over time (first seed)")
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, point in zip(axes, result.points, strict=True):
        _draw_attainments(row[0], point)
        for axis, policy in zip(row[1:], policies, strict=True):
            _draw_usage(axis, point.usages[policy])
            axis.set(title=policy, xlabel="s", ylim=(0, 1))
    axes[0][1].legend(fontsize=7, loc="lower right")
    write_figure(figure, path)


def _draw_attainments(axis: Axes, point: CachePoint) -> None:
    names = {
        "ttft_attainment": f"TTFT within\n{SLO_OF_ALL.ttft_s:g} s",
        "tpot_attainment": f"TPOT within\n{SLO_OF_ALL.tpot_s:g} s",
    }
    width = 0.8 / len(point.policies)
    for index, (policy, figures) in enumerate(point.policies.items()):
        at = np.arange(len(names)) + index * width
        axis.bar(at, [figures[name] for name in names], width, color=COLOURS[policy], label=policy)
    axis.set_xticks(np.arange(len(names)) + 0.4 - width / 2, list(names.values()), fontsize=8)
    setting = point.setting
    label = f"{setting.model}, {setting.workload}\n{setting.rate_per_s:g} requests/s"
    axis.set(ylim=(0, 1), ylabel=label)
    axis.legend(fontsize=7)


def _draw_usage(axis: Axes, usage: KVUsage) -> None:
    at_s = np.arange(len(usage.samples)) * SAMPLE_S
    shares = np.array([sample.use for sample in usage.samples]).T / usage.num_blocks
    axis.stackplot(at_s, shares, labels=KVUse._fields, colors=_USE_COLOURS)


def save_overhead_plot(path: Path, result: OverheadResult) -> None:
    """Write a PNG with a row for each model: breakdown of an iteration, and decisions by running requests.

    Raises: ConfigError when it cannot be written.
    """
    models = result.experiment.models
    figure = Figure(figsize=(11, 1 + _ROW_INCHES * len(models)), layout="constrained")
    figure.suptitle("BROS, figure 14: decisions measured on this machine beside steps of a simulated one")
    axes = figure.subplots(len(models), 2, squeeze=False)
    for row, model in zip(axes, models, strict=True):
        points = result.of_model(model)
        _draw_breakdown(row[0], points)
        _draw_groups(row[1], points)
        row[0].set(ylabel=f"{model}\nms of an iteration, medians")
        if model in PAPER_SHARES:
            low, high = PAPER_SHARES[model]
            row[0].set(title=f"paper: {low:.1%} to {high:.1%} for scheduling")
    write_figure(figure, path)


def _draw_breakdown(axis: Axes, points: list[OverheadPoint]) -> None:
    bars = [(point.setting, policy, each) for point in points for policy, each in point.policies.items()]
    at = np.arange(len(bars))
    step_ms = np.array([each.step_ms for *_, each in bars])
    decision_ms = np.array([each.decision_ms for *_, each in bars])
    axis.bar(at, step_ms, color="#bdbdbd", label="step, simulated")
    colours = [COLOURS[policy] for _, policy, _ in bars]
    axis.bar(at, decision_ms, bottom=step_ms, color=colours, label="decision, measured")
    for x, height, (*_, each) in zip(at, step_ms + decision_ms, bars, strict=True):
        axis.annotate(f"{each.share:.1%}", (x, height), ha="center", va="bottom", fontsize=7)
    names = [f"{setting.workload} {setting.rate_per_s:g}/s\n{policy}" for setting, policy, _ in bars]
    axis.set_xticks(at, names, fontsize=6, rotation=30)
    axis.margins(y=0.15)
    axis.legend(fontsize=7)


def _draw_groups(axis: Axes, points: list[OverheadPoint]) -> None:
    for point in points:
        for policy, groups in point.groups.items():
            values = [groups[most].decision_ms if most in groups else np.nan for most in GROUPS]
            label = f"{policy}, {point.setting.workload} {point.setting.rate_per_s:g}/s"
            axis.plot(range(len(GROUPS)), values, color=COLOURS[policy], marker=".", label=label)
    axis.set_xticks(range(len(GROUPS)), [f"up to {most}" for most in GROUPS])
    axis.set(xlabel="requests that hold blocks", ylabel="decision (ms)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6)
