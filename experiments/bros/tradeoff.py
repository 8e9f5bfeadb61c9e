"""BROS's figures 10 and 11: online latency against the throughput of offline requests."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from backfill.cli.studies import command_of
from backfill.core.errors import ConfigError
from backfill.core.options import bounded
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.simulation.replay import Workload
from backfill.simulation.study import MOST, Outcomes, Point, Run, Study, mean_figures
from backfill.simulation.tables import cell, table_of
from backfill.simulation.variants import COLOURS, VARIANTS, Simulation, figures_of
from backfill.simulation.workloads import (
    SHAREGPT,
    DrawnLengths,
    LengthSource,
    TraceLengths,
    num_requests,
    online_requests,
)
from backfill.workloads.lengths import LengthDistribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The testbed of section 7.1, by model.
MODELS: Mapping[str, str] = {
    "opt-13b": "a100-40g-opt-13b-tp2",
    "opt-30b": "a100-40g-opt-30b-tp4",
    "llama-3-70b": "a100-80g-llama-3-70b-tp8",
}
# Table 2: means and standard deviations; offline lengths are uniform (section 7.1).
LMSYS = DrawnLengths(
    LengthDistribution(91, 148.52 / 90.50, "lognormal"),
    LengthDistribution(237, 228.21 / 237.04, "lognormal"),
)
BROS_OFFLINE = DrawnLengths(LengthDistribution(768, 1 / 3), LengthDistribution(80, 0.6))
WORKLOADS: Mapping[str, LengthSource] = {"sharegpt": SHAREGPT, "lmsys": LMSYS}
SLO_OF_ALL = SLO(ttft_s=0.4, tpot_s=0.2)
RATES_PER_S = (1.0, 3.0, 5.0, 8.0, 11.0, 15.0)
ALL_RATES_PER_S = tuple(float(rate) for rate in range(1, 16))
POLICIES = ("online-only", "fcfs", "round-robin", "bros", "slo")
LEAST_DURATION_S = 1  # a trace that is shorter says nothing
BASELINES = ("fcfs", "round-robin")
FIGURES = (
    "normalized_latency_s",
    "ttft_attainment",
    "tpot_attainment",
    "attainment",
    "offline_rps",
    "ttft_p99_s",
)
# Section 7.2. The paper's baselines are vLLM, which serves in order of arrival, and round-robin.
PAPER: Mapping[str, Any] = {
    "sharegpt": {
        "bros": {
            "over fcfs": {
                "latency_reduction": 0.7420,
                "offline_reduction": 0.1129,
                "ttft_attainment_ratio": 36.38,
                "tpot_attainment_ratio": 1.73,
            },
            "over round-robin": {
                "latency_reduction": 0.5431,
                "offline_reduction": 0.0880,
                "ttft_attainment_ratio": 11.75,
                "tpot_attainment_ratio": 1.47,
            },
            "tpot_attainment": 0.6549,
        },
        "fcfs": {"ttft_attainment": 0.0128},
        "round-robin": {"ttft_attainment": 0.1055, "tpot_attainment": 0.4734},
    },
    "lmsys": {
        "bros": {
            "over fcfs": {
                "latency_reduction": 0.6961,
                "offline_reduction": 0.1767,
                "ttft_attainment_ratio": 21.42,
                "tpot_attainment_ratio": 2.62,
            },
            "over round-robin": {
                "latency_reduction": 0.2577,
                "offline_reduction": 0.1518,
                "ttft_attainment_ratio": 14.23,
                "tpot_attainment_ratio": 2.28,
            },
            "tpot_attainment": 0.7538,
        },
        "round-robin": {"tpot_attainment": 0.4281},
    },
}
FEASIBLE_ATTAINMENT = 0.9
_MAX_STEP_TOKENS = 2048  # vLLM's of 2024 for these models: a prompt is whole where the step has room for it
_NUM_OFFLINE = 4000
_ROW_INCHES = 2.6
_COLUMNS = {
    "normalized_latency_s": ("latency/token s", ".3f"),
    "ttft_attainment": ("TTFT met", ".1%"),
    "tpot_attainment": ("TPOT met", ".1%"),
    "offline_rps": ("offline req/s", ".2f"),
}


class Setting(NamedTuple):
    """One point: a model, the lengths of its online requests, and their rate."""

    model: str
    workload: str
    rate_per_s: float

    def __str__(self) -> str:
        return f"{self.model}, {self.workload}, {self.rate_per_s:g} requests/s"


@dataclass(frozen=True, kw_only=True)
class Bros(Study[Point]):
    """The testbed of BROS.

    Attributes:
        models: models to serve, separated by commas, of opt-13b, opt-30b and llama-3-70b.
        workloads: lengths of online requests, separated by commas, of sharegpt and lmsys.
        rates: online requests per second, separated by commas, or all for 1 to 15.
        duration: seconds of a trace, at least 1. The paper's are 600.
        online_lengths: CSV of prompt and output lengths instead of those drawn for sharegpt.
        policies: policies to run, separated by commas.
    """

    models: str = ",".join(MODELS)
    workloads: str = ",".join(WORKLOADS)
    rates: str = ",".join(f"{rate:g}" for rate in RATES_PER_S)
    duration: float = bounded(120.0, least=LEAST_DURATION_S, most=MOST)
    online_lengths: Path | None = None
    policies: str = ",".join(POLICIES)

    known_policies: ClassVar[Collection[str]] = VARIANTS

    def validate(self) -> None:
        """Raises: ConfigError."""
        super().validate()
        if self.online_lengths is not None and "sharegpt" not in self.names("workloads", WORKLOADS):
            raise ConfigError("`online_lengths` are those of the workload sharegpt, which is not asked for.")

    @property
    def all_policies(self) -> tuple[str, ...]:
        return self.names("policies", self.known_policies)

    @abstractmethod
    def simulate(self) -> Callable[[Simulation], Any]:
        """What gives the outcome of a simulation."""

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        sources = dict(WORKLOADS)
        if self.online_lengths is not None:
            sources["sharegpt"] = TraceLengths.read(self.online_lengths)
        workloads, rates_per_s = self.names("workloads", WORKLOADS), sorted(self._rates_per_s())
        settings = itertools.product(self.names("models", MODELS), workloads, rates_per_s)
        return [
            Run(
                setting,
                policy,
                seed,
                partial(self.simulate(), self.simulation(setting, policy, sources[setting.workload], seed)),
            )
            for setting in itertools.starmap(Setting, settings)
            for policy in self.all_policies
            for seed in seeds
        ]

    def simulation(self, setting: Setting, policy: str, lengths: LengthSource, seed: int) -> Simulation:
        """Poisson arrivals beside a flood of offline requests."""
        rng = np.random.default_rng(seed)
        hardware = load_hardware_profile(MODELS[setting.model])
        max_len = hardware.max_model_len
        count = num_requests(setting.rate_per_s, self.duration)
        online = lengths.sample(count, max_len, rng)
        workload = Workload(
            online=online_requests(setting.rate_per_s, 1.0, online, rng),
            duration_s=self.duration,
            offline=BROS_OFFLINE.sample(_NUM_OFFLINE, max_len, rng),
        )
        return Simulation(hardware, policy, workload, SLO_OF_ALL, _MAX_STEP_TOKENS, seed)

    def _rates_per_s(self) -> tuple[float, ...]:
        return ALL_RATES_PER_S if self.rates == "all" else self.numbers("rates")


@dataclass(frozen=True, slots=True)
class BrosPoint:
    """Figures of each policy by name (``FIGURES``), at one setting."""

    setting: Setting
    policies: Mapping[str, Mapping[str, float]]

    @property
    def is_feasible(self) -> bool | None:
        """Online requests alone meet their objectives; None if they were not run alone."""
        alone = self.policies.get("online-only")
        return None if alone is None else alone["attainment"] >= FEASIBLE_ATTAINMENT


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy against a baseline. None where the baseline has nothing to compare with.

    Attributes:
        latency_reduction: by how much normalized latency is lower, averaged over models and rates.
        offline_reduction: by how much the throughput of offline requests is lower, averaged likewise.
        ttft_attainment_ratio, tpot_attainment_ratio: mean attainment over the baseline's mean attainment.
    """

    latency_reduction: float
    offline_reduction: float | None
    ttft_attainment_ratio: float | None
    tpot_attainment_ratio: float | None


def compare(points: Sequence[BrosPoint], policy: str, baseline: str) -> Comparison:
    """Over points of one workload. Both policies must have run."""
    own = [point.policies[policy] for point in points]
    others = [point.policies[baseline] for point in points]

    def reductions(name: str) -> list[float]:
        return [1 - a[name] / b[name] for a, b in zip(own, others, strict=True) if b[name] > 0]

    def ratio(name: str) -> float | None:
        mean = fmean(each[name] for each in others)
        return fmean(each[name] for each in own) / mean if mean > 0 else None

    offline = reductions("offline_rps")
    return Comparison(
        latency_reduction=fmean(reductions("normalized_latency_s")),
        offline_reduction=fmean(offline) if offline else None,
        ttft_attainment_ratio=ratio("ttft_attainment"),
        tpot_attainment_ratio=ratio("tpot_attainment"),
    )


def summary(points: Sequence[BrosPoint]) -> dict[str, dict[str, Any]]:
    """Mean attainments of each policy, and its comparisons with the baselines that have run."""
    policies = tuple(points[0].policies)
    return {
        policy: {
            **{
                name: fmean(point.policies[policy][name] for point in points)
                for name in ("ttft_attainment", "tpot_attainment")
            },
            **{
                f"over {baseline}": asdict(compare(points, policy, baseline))
                for baseline in BASELINES
                if baseline in policies and policy not in (*BASELINES, "online-only")
            },
        }
        for policy in policies
    }


@dataclass(frozen=True, kw_only=True)
class Tradeoff(Bros[BrosPoint]):
    """Run BROS's figures 10 and 11: latencies, attainments and offline throughput beside the paper's.

    Lengths are drawn with the means and deviations that the paper prints.
    """

    scenario: ClassVar[str] = "bros-tradeoff"
    title: ClassVar[str] = "BROS, figures 10 and 11: online latency against offline throughput"

    def simulate(self) -> Callable[[Simulation], Any]:
        return figures_of

    def point(self, setting: Setting, outcomes: Outcomes) -> BrosPoint:
        return BrosPoint(setting, {policy: mean_figures(FIGURES, runs) for policy, runs in outcomes.items()})

    def report(self, console: Console, points: Sequence[BrosPoint]) -> None:
        for workload, of_workload in by_workload(points).items():
            for model in self.names("models", MODELS):
                of_model = [point for point in of_workload if point.setting.model == model]
                _print_points(console, f"{model}, {workload}", of_model)
            _print_comparisons(console, workload, of_workload)

    def as_json(self, points: Sequence[BrosPoint]) -> dict[str, Any]:
        return {
            "slo": asdict(SLO_OF_ALL),
            "duration_s": self.duration,
            "points": [
                {
                    **point.setting._asdict(),
                    "is_feasible": point.is_feasible,
                    "policies": {policy: dict(figures) for policy, figures in point.policies.items()},
                }
                for point in points
            ],
            "summary": {workload: summary(each) for workload, each in by_workload(points).items()},
            "paper": PAPER,
        }

    def draw(self, figure: Figure, points: Sequence[BrosPoint]) -> None:
        """A row for each model and workload."""
        rows: dict[tuple[str, str], list[BrosPoint]] = {}
        for point in points:
            rows.setdefault((point.setting.workload, point.setting.model), []).append(point)
        figure.set_size_inches(15, 1 + _ROW_INCHES * len(rows))
        figure.suptitle("BROS, figures 10 and 11: online latency and offline throughput")
        axes = figure.subplots(len(rows), 4, squeeze=False)
        names = {
            "normalized_latency_s": "latency/token (s)",
            "ttft_attainment": f"TTFT within {SLO_OF_ALL.ttft_s:g} s",
            "tpot_attainment": f"TPOT within {SLO_OF_ALL.tpot_s:g} s",
            "offline_rps": "offline requests/s",
        }
        for row, ((workload, model), of_row) in zip(axes, rows.items(), strict=True):
            rates = [point.setting.rate_per_s for point in of_row]
            for axis, (name, label) in zip(row, names.items(), strict=True):
                for policy in self.all_policies:
                    values = [point.policies[policy][name] for point in of_row]
                    axis.plot(rates, values, color=COLOURS[policy], label=policy, marker=".")
                axis.set(xlabel="online requests/s", ylabel=label)
                axis.set_ylim(bottom=0)
            row[0].set(ylabel=f"{model}, {workload}\nlatency/token (s)")
        axes[0][0].legend(fontsize=7)


app = command_of(Tradeoff, "EXPERIMENTS_")


def by_workload(points: Sequence[BrosPoint]) -> dict[str, list[BrosPoint]]:
    found: dict[str, list[BrosPoint]] = {}
    for point in points:
        found.setdefault(point.setting.workload, []).append(point)
    return found


def _print_points(console: Console, title: str, points: list[BrosPoint]) -> None:
    headings = (heading for heading, _ in _COLUMNS.values())
    table = table_of(title, "req/s", "feasible", "policy", *headings, left=("policy",))
    for point in points:
        feasible = {None: "", True: "yes", False: "no"}[point.is_feasible]
        for policy, figures in point.policies.items():
            cells = [format(figures[name], kind) for name, (_, kind) in _COLUMNS.items()]
            table.add_row(f"{point.setting.rate_per_s:g}", feasible, policy, *cells)
        table.add_section()
    console.print(table)


def _print_comparisons(console: Console, workload: str, points: Sequence[BrosPoint]) -> None:
    """A row for each policy and baseline, and the paper's below."""
    table = Table(title=f"{workload}: means over models and rates")
    for heading in ("policy", "over", "latency", "offline req/s", "TTFT met", "TPOT met"):
        table.add_column(heading, justify="left" if heading in ("policy", "over") else "right")
    for label, found in (("", summary(points)), (" (paper)", PAPER[workload])):
        for policy, figures in found.items():
            met = [cell(figures.get(f"{name}_attainment"), ".1%") for name in ("ttft", "tpot")]
            table.add_row(f"{policy}{label}", "", "", "", *met)
            for baseline in BASELINES:
                if ratios := figures.get(f"over {baseline}"):
                    table.add_row(
                        "",
                        baseline,
                        _change(ratios["latency_reduction"]),
                        _change(ratios["offline_reduction"]),
                        *(_times(ratios[f"{name}_attainment_ratio"]) for name in ("ttft", "tpot")),
                    )
    console.print(table)


def _change(reduction: float | None) -> str:
    return "" if reduction is None else f"{-reduction:+.1%}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"x {ratio:.2f}"
