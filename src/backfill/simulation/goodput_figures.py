"""Figures of a goodput sweep: points, what a policy's points come to, and their plot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from backfill.simulation.variants import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = "online-only"
FIGURES = {
    "goodput_rps": ("goodput req/s", ".2f"),
    "attainment": ("both met", ".1%"),
    "ttft_p99_s": ("TTFT P99 s", ".3f"),
    "itl_p99_s": ("gap P99 s", ".3f"),
    "itl_attainment": ("gaps met", ".2%"),
    "offline_tok_s": ("offline tok/s", ".0f"),
    "offline_rps": ("ended/s", ".3f"),
}
SUMMARY = {
    "over_online_only": "worst goodput / online-only",
    "over_best": "/ best co-serving",
    "ended_over_best": "offline ended / best, load < 0.8",
    "stability": "goodput at 1.0 and more / peak",
}
_LIGHT_LOAD = 0.8
_KEEPS_OBJECTIVES = 0.99  # of the best goodput
_FULL_LOAD = 1.0
_ROW_INCHES = 2.6


class Panel(NamedTuple):
    """Points that differ in their load only.

    Attributes:
        has_offline: beside a flood of offline requests.
    """

    workload: str
    cv: float
    has_offline: bool

    def __str__(self) -> str:
        beside = "beside offline requests" if self.has_offline else "alone"
        return f"{self.workload} {beside}, CV {self.cv:g}"


class GoodputPoint(NamedTuple):
    """Figures of each policy by name (``FIGURES``), at one load of a panel."""

    panel: Panel
    load: float
    capacity_rps: float
    policies: Mapping[str, Mapping[str, float]]

    @property
    def rate_per_s(self) -> float:
        return self.load * self.capacity_rps


Pair = tuple[GoodputPoint, GoodputPoint]
"""Without offline requests, and with them."""


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """One policy over the points of a sweep, beside offline requests or without. None where nothing compares.

    Attributes:
        over_online_only: least ratio of its goodput to that of ``online-only`` at a point where the latter
            has any.
        over_best: least ratio of its goodput to the best of all policies but ``online-only``.
        ended_over_best: least ratio of offline requests that ended to those of the policy that ended most of
            them, at loads below 0.8, among policies whose goodput is within 1 % of the best. Tokens would
            count what a policy has begun and left in host memory too.
        stability: goodput at loads of 1 and above over its own peak at any load: the least of all panels.
    """

    over_online_only: float | None
    over_best: float | None
    ended_over_best: float | None
    stability: float | None


def panels_of(points: Sequence[Pair]) -> dict[Panel, list[GoodputPoint]]:
    """Points by ascending load."""
    found: dict[Panel, list[GoodputPoint]] = {}
    for point in itertools.chain.from_iterable(points):
        found.setdefault(point.panel, []).append(point)
    return found


def summarize(policy: str, points: Sequence[GoodputPoint]) -> PolicySummary:
    goodputs = [
        {name: figures["goodput_rps"] for name, figures in point.policies.items()} for point in points
    ]
    over_reference = [each[policy] / each[REFERENCE] for each in goodputs if each.get(REFERENCE)]
    over_best = []
    for each in goodputs:
        best = max((value for name, value in each.items() if name != REFERENCE), default=0.0)
        if best:
            over_best.append(each[policy] / best)
    return PolicySummary(
        over_online_only=min(over_reference, default=None),
        over_best=min(over_best, default=None),
        ended_over_best=min(_ended_over_best(policy, points), default=None),
        stability=_stability(policy, points),
    )


def _ended_over_best(policy: str, points: Sequence[GoodputPoint]) -> Iterator[float]:
    """See ``PolicySummary``."""
    for point in points:
        most_goodput = max(figures["goodput_rps"] for figures in point.policies.values())
        most_ended = max(
            figures["offline_rps"]
            for figures in point.policies.values()
            if figures["goodput_rps"] >= _KEEPS_OBJECTIVES * most_goodput
        )
        if point.load < _LIGHT_LOAD and most_ended:
            yield point.policies[policy]["offline_rps"] / most_ended


def _stability(policy: str, points: Sequence[GoodputPoint]) -> float | None:
    """See ``PolicySummary``; None where the policy has no goodput, or no load of 1 or above was run."""
    goodputs: dict[Panel, dict[float, float]] = {}
    for point in points:
        by_load = goodputs.setdefault(point.panel, {})
        by_load[point.load] = point.policies[policy]["goodput_rps"]
    ratios = [
        value / max(by_load.values())
        for by_load in goodputs.values()
        for load, value in by_load.items()
        if load >= _FULL_LOAD and max(by_load.values())
    ]
    return min(ratios, default=None)


def draw_panels(figure: Figure, panels: Mapping[Panel, Sequence[GoodputPoint]]) -> None:
    """A row for each workload and CV, goodput on the left and offline tokens on the right.

    Without offline requests lines are dotted.
    """
    rows = list(dict.fromkeys((panel.workload, panel.cv) for panel in panels))
    figure.set_size_inches(11, 1 + _ROW_INCHES * len(rows))
    figure.suptitle("Goodput against load; dotted: without offline requests")
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for panel, of_panel in panels.items():
        row = axes[rows.index((panel.workload, panel.cv))]
        _draw_policies(row[0], of_panel, "goodput_rps", is_dotted=not panel.has_offline)
        if panel.has_offline:
            _draw_policies(row[1], of_panel, "offline_rps")
        else:
            loads, rates = zip(*((point.load, point.rate_per_s) for point in of_panel), strict=True)
            row[0].plot(loads, rates, color="grey", linewidth=0.8, label="arrivals")
        row[0].set(ylabel=f"{panel.workload}, CV {panel.cv:g}\ngoodput (requests/s)")
        row[1].set(ylabel="offline requests ended/s")
    for axis in axes.flat:
        axis.set(xlabel="online load / capacity")
        axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=7)


def _draw_policies(axis: Axes, points: Sequence[GoodputPoint], name: str, *, is_dotted: bool = False) -> None:
    """One line for each policy. ``online-only`` is the same with offline requests, so it is drawn once."""
    for policy in points[0].policies:
        if is_dotted and policy == REFERENCE:
            continue
        axis.plot(
            [point.load for point in points],
            [point.policies[policy][name] for point in points],
            color=COLOURS[policy],
            label=None if is_dotted else policy,
            linestyle=":" if is_dotted else "-",
            marker=".",
        )
