"""The result of ``bench coserve``: figures of each policy, beside those of earlier results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backfill.bench.coserve import CoserveRun
from backfill.bench.coserve_figures import (
    WINDOW_S,
    CoserveFigures,
    Timeline,
    figures_of,
    median_figures,
    policy_json,
    timeline_of,
)
from backfill.bench.coserve_load import CoserveLoad
from backfill.core.errors import ConfigError
from backfill.core.measured_on import writing

_COLOURS = {
    "online-only": "#2166ac",
    "priority": "#e08214",
    "fcfs": "#b2182b",
    "round-robin": "#762a83",
    "slo": "#1b7837",
}
_OTHER_COLOURS = ("#4d4d4d", "#c51b7d", "#01665e", "#8c510a")


@dataclass(slots=True)
class CoserveResult:
    """What was measured so far, by policy.

    Attributes:
        model: its name at the server.
        earlier: entries of ``policies`` in earlier results.
        rounds: figures of each round.
        timelines: of each policy's first round, and of earlier results.
    """

    load: CoserveLoad
    model: str
    earlier: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    rounds: dict[str, list[CoserveFigures]] = field(default_factory=dict)
    timelines: dict[str, Timeline] = field(default_factory=dict)

    def add(self, name: str, run: CoserveRun) -> CoserveFigures:
        """Add one round of a policy. Returns its figures."""
        figures = figures_of(run)
        self.model = run.model
        self.rounds.setdefault(name, []).append(figures)
        if len(self.rounds[name]) == 1:
            self.timelines[name] = timeline_of(run)
        return figures

    def add_earlier(self, path: Path) -> list[str]:
        """Add an earlier result. Returns the settings of the load that differ from ours.

        Raises: ConfigError for a file that is no result of this command.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["scenario"] != "coserve":
                raise KeyError("scenario")
            timelines = {name: Timeline(**each) for name, each in content.get("timelines", {}).items()}
            ours, theirs = self.load.as_json(), content["load"]
            differing = [key for key in ours if theirs.get(key) != ours[key] and key != "offline_mode"]
            self.earlier |= content["policies"]
            self.timelines |= timelines
        except OSError as error:
            raise ConfigError(f"`compare` {path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"`compare` {path} is no result of bench coserve --result.") from error
        return differing

    def as_json(self) -> dict[str, Any]:
        """The result without timelines."""
        known = {each.name for each in dataclasses.fields(CoserveFigures)}
        baselines = {
            name: CoserveFigures(**{key: value for key, value in entry.items() if key in known})
            for name, entry in self.earlier.items()
        }
        baselines |= {name: median_figures(rounds) for name, rounds in self.rounds.items()}
        policies = {name: policy_json(rounds, baselines) for name, rounds in self.rounds.items()}
        for name, entry in self.earlier.items():
            # Its figures stay; its ratios are to the baselines of this result.
            ratios = policy_json([baselines[name]], baselines)
            changed = {key: ratios[key] for key in ratios.keys() - known}
            policies.setdefault(name, {**entry, **changed})
        return {
            "scenario": "coserve",
            "model": self.model,
            "slo": {"ttft_s": self.load.ttft_slo, "tpot_s": self.load.tpot_slo},
            "load": self.load.as_json(),
            "policies": policies,
        }

    def save(self, result: Path | None, plot: Path | None) -> None:
        """Write the result with its timelines, and the plot.

        Raises: ConfigError when a file cannot be written.
        """
        if result is not None:
            timelines = {name: dataclasses.asdict(each) for name, each in self.timelines.items()}
            content = json.dumps({**self.as_json(), "timelines": timelines})
            with writing(result):
                result.write_text(content + "\n", encoding="utf-8")
        if plot is not None and self.timelines:
            draw(plot, self.timelines, self.load, self.title)

    @property
    def title(self) -> str:
        load = self.load
        offline = {"batch": "a batch", "none": "no offline load"}.get(
            load.offline_mode, f"{load.offline_concurrency} offline at once"
        )
        return (
            f"{self.model}: {load.rate:g} online requests/s of {load.lengths('input_len')} in, "
            f"{load.lengths('output_len')} out, beside {offline}; {load.duration:g} s"
        )


def draw(path: Path, timelines: Mapping[str, Timeline], load: CoserveLoad, title: str) -> None:
    """Write a PNG of four panels with one time axis: latency and throughput, one colour for each policy.

    Raises: ConfigError when it cannot be written.
    """
    from matplotlib.figure import Figure

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
    with writing(path):
        figure.savefig(path, dpi=110, format="png")


def _columns(points: Sequence[tuple[float, float | None]]) -> NDArray[np.float64]:
    """Times and values as two rows; a value of None is NaN, which is not drawn."""
    return np.array(points, dtype=np.float64).reshape(-1, 2).T
