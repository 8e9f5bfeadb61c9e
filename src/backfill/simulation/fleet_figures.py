"""Figures of a fleet's runs, what several seeds come to, and their plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.simulation.fleet import REPORT_S, FleetResult
from backfill.simulation.metrics import percentile
from backfill.simulation.study import mean_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ONE_ENGINE = "one-engine"
"""One engine with the memory and the speed of the fleet, which finds every prefix that fits."""

_NUM_WINDOWS = 60
_COLOURS = {
    "slo": "#1b7837",
    "least-loaded": "#e08214",
    "round-robin": "#762a83",
    "prefix": "#2166ac",
    ONE_ENGINE: "#888888",
}
_BARS = {
    "ttft_p99_s": "P99 TTFT (s)",
    "attainment": "both objectives met",
    "hit_rate": "prefix hit rate",
    "offline_tok_s": "offline tokens/s",
}

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """One policy's figures. Times are in seconds; rates are a second, of the whole fleet.

    Attributes:
        attainment: share of online requests whose first token is within TTFT and whose mean gap is within
            TPOT.
        hit_rate: share of the online requests' prompt tokens that were found in the prefix cache.
        offline_tok_s: prompt and output tokens of offline requests, each counted once.
        most_requests: online requests of the replica with most of them, over the mean.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    attainment: float
    goodput_rps: float
    hit_rate: float
    offline_tok_s: float
    offline_rps: float
    most_requests: float
    num_online: int
    num_steps: int
    num_stopped_steps: int
    scheduling_s: float


@dataclass(frozen=True, slots=True, eq=False)
class FleetOutcome:
    """Figures of a run, and what is drawn of it.

    Attributes:
        arrived_at_s, ttft_s: of each online request.
        num_online: online requests in each replica, ``[time, replica]``, every ``fleet.REPORT_S``.
    """

    seed: int
    figures: FleetFigures
    arrived_at_s: Floats
    ttft_s: Floats
    num_online: Counts


Comparison = Mapping[str, Sequence[FleetOutcome]]
"""Outcomes by routing policy, in the order of the seeds."""


def figures_of(outcomes: Comparison) -> dict[str, dict[str, float]]:
    """Means over the seeds, with P99 TTFT over round-robin's and hit rate over that of one engine."""
    means = {
        router: mean_figures(FleetFigures.__slots__, [each.figures for each in of_seeds])
        for router, of_seeds in outcomes.items()
    }
    found = {router: dict(figures) for router, figures in means.items()}
    for name, other in (("ttft_p99_s", "round-robin"), ("hit_rate", ONE_ENGINE)):
        if other in means and means[other][name] > 0:
            for router, figures in found.items():
                figures[f"{name}_over_{other}"] = means[router][name] / means[other][name]
    return found


def outcome_of(result: FleetResult, slo: SLO, seed: int) -> FleetOutcome:
    ttft_s = np.array([each.ttft_s for each in result.online])
    tpot_s = np.array([each.tpot_s for each in result.online])
    met = (ttft_s <= slo.ttft_s) & (tpot_s <= slo.tpot_s)
    online = [each[ServiceClass.ONLINE] for each in result.counters]
    offline = [each[ServiceClass.OFFLINE] for each in result.counters]
    num_of_replica = np.bincount(
        np.array([each.replica for each in result.online], dtype=np.int64), minlength=len(result.counters)
    )
    num_queried = sum(each.num_prefix_queried_tokens for each in online)
    figures = FleetFigures(
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p99_s=percentile(ttft_s, 99),
        tpot_p99_s=percentile(tpot_s, 99),
        attainment=float(met.mean()),
        goodput_rps=float(met.sum()) / result.duration_s,
        hit_rate=sum(each.num_all_prefix_hit_tokens for each in online) / max(num_queried, 1),
        offline_tok_s=sum(each.num_computed_tokens - each.num_recomputed_tokens for each in offline)
        / result.duration_s,
        offline_rps=sum(result.offline_done) / result.duration_s,
        most_requests=float(num_of_replica.max() / num_of_replica.mean()),
        num_online=len(ttft_s),
        num_steps=result.num_steps,
        num_stopped_steps=result.num_stopped_steps,
        scheduling_s=result.scheduling_s,
    )
    return FleetOutcome(
        seed,
        figures,
        np.array([each.arrived_at_s for each in result.online]),
        ttft_s,
        np.array([list(row) for row in result.num_online], dtype=np.int64),
    )


def draw_comparison(figure: Figure, outcomes: Comparison, ttft_slo_s: float, duration_s: float) -> None:
    """The first seed over time, and figures of all seeds."""
    figure.set_size_inches(11, 9)
    grid = figure.add_gridspec(3, 4)
    latency = figure.add_subplot(grid[0, :])
    load = figure.add_subplot(grid[1, :], sharex=latency)
    for router, of_seeds in outcomes.items():
        _draw_latency(latency, router, of_seeds[0], duration_s)
        if router != ONE_ENGINE:
            _draw_load(load, router, of_seeds[0])
    latency.axhline(ttft_slo_s, color="red", linewidth=0.8, label="objective")
    latency.set(yscale="log", ylabel="P99 TTFT (s)", xlim=(0, duration_s))
    latency.legend(fontsize=8)
    load.set(xlabel="s", ylabel="online requests,\nleast and most of a replica", ylim=(0, None))
    for column, (name, label) in enumerate(_BARS.items()):
        values = {router: figures[name] for router, figures in figures_of(outcomes).items()}
        _draw_bars(figure.add_subplot(grid[2, column]), values, label)


def _draw_latency(axis: Axes, router: str, outcome: FleetOutcome, duration_s: float) -> None:
    edges = np.linspace(0.0, duration_s, _NUM_WINDOWS + 1)
    windows = np.searchsorted(edges, outcome.arrived_at_s, side="right") - 1
    p99 = [percentile(outcome.ttft_s[windows == window], 99) or np.nan for window in range(_NUM_WINDOWS)]
    axis.plot(edges[:-1], p99, color=_COLOURS[router], label=router)


def _draw_load(axis: Axes, router: str, outcome: FleetOutcome) -> None:
    """The band between the replicas with the fewest and the most online requests, means of windows."""
    size = max(1, len(outcome.num_online) // _NUM_WINDOWS)
    rows = outcome.num_online[: len(outcome.num_online) // size * size]
    at_s = np.arange(0, len(rows), size) * REPORT_S
    for values in (rows.min(axis=1), rows.max(axis=1)):
        axis.plot(at_s, values.reshape(-1, size).mean(axis=1), color=_COLOURS[router], linewidth=1)


def _draw_bars(axis: Axes, values: Mapping[str, float], label: str) -> None:
    axis.bar(list(values), list(values.values()), color=[_COLOURS[router] for router in values])
    axis.tick_params(axis="x", rotation=30, labelsize=7)
    axis.set_title(label, fontsize=9)
    for at, value in enumerate(values.values()):
        axis.text(at, value, f"{value:,.0f}" if value >= 100 else f"{value:.3f}", ha="center", fontsize=7)
