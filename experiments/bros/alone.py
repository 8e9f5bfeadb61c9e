"""BROS's figure 12: online requests that share the device with no offline ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from backfill.cli.studies import command_of
from backfill.simulation.study import Outcomes, mean_figures
from backfill.simulation.tables import print_rows
from backfill.simulation.variants import COLOURS, Simulation, figures_of
from backfill.simulation.workloads import LengthSource
from experiments.bros.tradeoff import SLO_OF_ALL, Bros, BrosPoint, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "fcfs"
# Section 7.3, over vLLM; over which rates is not said.
PAPER = {"latency_reduction": 0.2936, "throughput_ratio": 1.08}
_FIGURES = ("normalized_latency_s", "ttft_p50_s", "ttft_p99_s", "attainment", "online_tok_s")
_ROWS = {
    "normalized_latency_s": ("latency/token s", ".3f"),
    "ttft_p50_s": ("TTFT P50 s", ".3f"),
    "ttft_p99_s": ("TTFT P99 s", ".3f"),
    "attainment": ("both met", ".1%"),
    "online_tok_s": ("tokens/s", ".0f"),
}
_RATIOS = {"latency_reduction": ("latency lower by", ".1%"), "throughput_ratio": ("tokens/s, times", ".3f")}


@dataclass(frozen=True, kw_only=True)
class Alone(Bros[BrosPoint]):
    """Run BROS's figure 12: latencies and throughput of online requests alone, beside the paper's ratios.

    The plot has the normalized latencies.
    """

    policies: str = f"{BASELINE},bros,slo"

    scenario: ClassVar[str] = "bros-alone"
    title: ClassVar[str] = "BROS, figure 12: online requests alone"

    def simulate(self) -> Callable[[Simulation], Any]:
        return figures_of

    def simulation(self, setting: Setting, policy: str, lengths: LengthSource, seed: int) -> Simulation:
        beside = super().simulation(setting, policy, lengths, seed)
        return replace(beside, workload=replace(beside.workload, offline=()))

    def point(self, setting: Setting, outcomes: Outcomes) -> BrosPoint:
        return BrosPoint(setting, {policy: mean_figures(_FIGURES, runs) for policy, runs in outcomes.items()})

    def report(self, console: Console, points: Sequence[BrosPoint]) -> None:
        for point in points:
            print_rows(console, f"{point.setting}", _ROWS, point.policies)
        if found := comparisons(points):
            print_rows(console, f"Over {BASELINE}, means", _RATIOS, {**found, "bros (paper)": PAPER})

    def as_json(self, points: Sequence[BrosPoint]) -> dict[str, Any]:
        return {
            "slo": asdict(SLO_OF_ALL),
            "duration_s": self.duration,
            "points": [{**point.setting._asdict(), "policies": dict(point.policies)} for point in points],
            f"over {BASELINE}": comparisons(points),
            "paper": {"bros": PAPER},
        }

    def draw(self, figure: Figure, points: Sequence[BrosPoint]) -> None:
        """A panel for each model and workload."""
        panels: dict[tuple[str, str], list[BrosPoint]] = {}
        for point in points:
            panels.setdefault(point.setting[:2], []).append(point)
        figure.set_size_inches(4 * len(panels), 3.5)
        figure.suptitle("BROS, figure 12: online requests alone")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (names, of_panel) in zip(axes, panels.items(), strict=True):
            rates = [point.setting.rate_per_s for point in of_panel]
            for policy in self.all_policies:
                values = [point.policies[policy]["normalized_latency_s"] for point in of_panel]
                axis.plot(rates, values, color=COLOURS[policy], label=policy, marker=".")
            axis.set(title=", ".join(names), xlabel="online requests/s", ylabel="latency/token (s)")
            axis.set_ylim(bottom=0)
        axes[0].legend(fontsize=7)


def comparisons(points: Sequence[BrosPoint]) -> dict[str, dict[str, float]]:
    """Each policy over the baseline, means of the points in which that served requests; empty if none."""
    points = [point for point in points if point.policies.get(BASELINE, {}).get("online_tok_s")]
    if not points:
        return {}

    def over(policy: str) -> dict[str, float]:
        pairs = [(point.policies[policy], point.policies[BASELINE]) for point in points]
        latency = fmean(a["normalized_latency_s"] / b["normalized_latency_s"] for a, b in pairs)
        ratio = fmean(a["online_tok_s"] / b["online_tok_s"] for a, b in pairs)
        return {"latency_reduction": 1.0 - latency, "throughput_ratio": ratio}

    return {policy: over(policy) for policy in points[0].policies if policy != BASELINE}


app = command_of(Alone, "EXPERIMENTS_")
