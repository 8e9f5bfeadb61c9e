"""Draws a run: distributions of latency, throughput over time, and the timeline of every request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from backfill.bench.metrics import concurrency_steps, tokens_by_second
from backfill.bench.record import Outcome, RequestRecord
from backfill.core.errors import ConfigError

# Ratio of the highest to the lowest value from which the axis is logarithmic.
_LOG_RATIO = 20
_WAIT, _DECODE, _FAILED = "#e08214", "#2166ac", "#b2182b"


def save_plot(path: Path, records: Sequence[RequestRecord], title: str) -> None:
    """Write a PNG of four panels. Raises: ConfigError when it cannot be written."""
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    (long, short), (rate, timelines) = figure.subplots(2, 2)
    _plot_distribution(
        long,
        {"TTFT": [r.ttft_s for r in completed], "E2EL": [r.latency_s for r in completed]},
    )
    _plot_distribution(
        short,
        {
            "ITL (every gap)": [gap for r in completed for gap in r.itls_s],
            "TPOT (per request)": [r.tpot_s for r in completed if r.tpot_s is not None],
        },
    )
    _plot_rate(rate, records)
    _plot_timelines(timelines, records)
    write_figure(figure, path, dpi=120)


def write_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Raises: ConfigError when the file cannot be written."""
    try:
        figure.savefig(path, dpi=dpi, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def _plot_distribution(axes: Axes, samples: dict[str, list[float]]) -> None:
    for name, values in samples.items():
        if values:
            ordered = np.sort(values) * 1000
            share = np.arange(1, len(ordered) + 1) / len(ordered)
            axes.step(ordered, share, where="post", label=f"{name}, P99 {np.percentile(ordered, 99):.1f} ms")
    axes.set(xlabel="ms", ylabel="share of the sample", ylim=(0, 1.01), title=" and ".join(samples))
    axes.axhline(0.99, color="grey", linewidth=0.6, linestyle=":")
    if any(samples.values()):
        lowest, highest = axes.dataLim.intervalx
        if highest > _LOG_RATIO * max(lowest, 1e-3):
            axes.set_xscale("log")
        axes.legend(loc="lower right")


def _plot_rate(axes: Axes, records: Sequence[RequestRecord]) -> None:
    per_second = tokens_by_second(records)
    axes.bar(range(len(per_second)), per_second, width=1.0, align="edge", color=_DECODE, alpha=0.6)
    axes.set(xlabel="s", ylabel="output tokens in a second", title="Throughput and requests at the server")
    axes.yaxis.label.set_color(_DECODE)
    running = axes.twinx()
    steps = concurrency_steps(records)
    running.step([at for at, _ in steps], [count for _, count in steps], where="post", color="black")
    running.set(ylabel="requests at the server")
    running.set_ylim(bottom=0)


def _plot_timelines(axes: Axes, records: Sequence[RequestRecord]) -> None:
    waits, decodes, failures = [], [], []
    for record in records:
        if record.sent_at_s is None:
            continue
        sent, row = record.sent_at_s, record.index
        if record.outcome is Outcome.FAILED:
            failures.append([(sent, row), (sent + record.ended_after_s, row)])
            axes.plot(sent + record.ended_after_s, row, "x", color=_FAILED, markersize=4)
        else:
            first = sent + (record.ttft_s if record.chunk_after_s else record.ended_after_s)
            waits.append([(sent, row), (first, row)])
            decodes.append([(first, row), (max(sent + record.latency_s, first), row)])
    for name, lines, color in (
        ("to first token", waits, _WAIT),
        ("decoding", decodes, _DECODE),
        ("failed", failures, _FAILED),
    ):
        if lines:
            axes.add_collection(LineCollection(lines, colors=color, label=name, linewidths=1.2))
    axes.set(xlabel="s", ylabel="request", title="Requests")
    axes.autoscale()
    if waits or failures:
        axes.legend(loc="upper left")
