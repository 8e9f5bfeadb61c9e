"""BROS's evaluation: online latency against the throughput of offline requests (figures 10 and 11)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np

from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.replay import Workload
from backfill.simulation.request_lengths import (
    BROS_OFFLINE,
    LMSYS,
    SHAREGPT,
    LengthSource,
    TraceLengths,
)
from backfill.simulation.scenarios import VARIANTS
from backfill.simulation.sweep import (
    Simulation,
    check_names,
    check_positive,
    figures_of,
    mean_figures,
    online_requests,
    processes,
)

# The testbed of section 7.1, by model.
MODELS: Mapping[str, str] = {
    "opt-13b": "a100-40g-opt-13b-tp2",
    "opt-30b": "a100-40g-opt-30b-tp4",
    "llama-3-70b": "a100-80g-llama-3-70b-tp8",
}
WORKLOADS: Mapping[str, LengthSource] = {"sharegpt": SHAREGPT, "lmsys": LMSYS}
SLO_OF_ALL = SLO(ttft_s=0.4, tpot_s=0.2)
RATES_PER_S = (1.0, 3.0, 5.0, 8.0, 11.0, 15.0)
ALL_RATES_PER_S = tuple(float(rate) for rate in range(1, 16))
POLICIES = ("online-only", "fcfs", "round-robin", "bros", "slo")
DURATION_S = 120.0
LEAST_DURATION_S = 1.0  # a trace that is shorter says nothing
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

Run = TypeVar("Run")


class Setting(NamedTuple):
    """One point: a model, the lengths of its online requests, and their rate."""

    model: str
    workload: str
    rate_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BrosExperiment:
    """What to run.

    Attributes:
        models: names of ``MODELS``.
        workloads: names of ``WORKLOADS``.
        online_lengths: replaces the lengths of ``sharegpt``.
        duration_s: of a trace; the paper's are 600 s.
        num_seeds: figures are means over the seeds 1 to ``num_seeds``.
    """

    models: tuple[str, ...] = tuple(MODELS)
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    rates_per_s: tuple[float, ...] = RATES_PER_S
    policies: tuple[str, ...] = POLICIES
    online_lengths: Path | None = None
    duration_s: float = DURATION_S
    num_seeds: int = 1

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_names("models", self.models, MODELS)
        check_names("workloads", self.workloads, WORKLOADS)
        check_names("policies", self.policies, VARIANTS)
        check_positive(duration=self.duration_s, seeds=self.num_seeds)
        if self.duration_s < LEAST_DURATION_S:
            raise ConfigError(f"`duration` must be at least {LEAST_DURATION_S:g}, got {self.duration_s:g}.")
        if not self.rates_per_s:
            raise ConfigError("`rates` needs a number.")
        if self.online_lengths is not None and "sharegpt" not in self.workloads:
            raise ConfigError("`online_lengths` are those of the workload sharegpt, which is not asked for.")
        for rate_per_s in self.rates_per_s:
            check_positive(rates=rate_per_s)

    def settings(self) -> list[Setting]:
        rates_per_s = sorted(self.rates_per_s)
        return [Setting(*each) for each in itertools.product(self.models, self.workloads, rates_per_s)]


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


@dataclass(slots=True)
class BrosResult:
    experiment: BrosExperiment
    points: list[BrosPoint] = field(default_factory=list)

    def of_workload(self, workload: str) -> list[BrosPoint]:
        return [point for point in self.points if point.setting.workload == workload]

    def compare(self, workload: str, policy: str, baseline: str) -> Comparison:
        """Over all models and rates with online requests of this workload. Both policies must have run."""
        points = self.of_workload(workload)
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

    def summary(self, workload: str) -> dict[str, dict[str, Any]]:
        """Mean attainments of each policy, and its comparisons with the baselines that have run."""
        points = self.of_workload(workload)
        policies = self.experiment.policies
        return {
            policy: {
                **{
                    name: fmean(point.policies[policy][name] for point in points)
                    for name in ("ttft_attainment", "tpot_attainment")
                },
                **{
                    f"over {baseline}": asdict(self.compare(workload, policy, baseline))
                    for baseline in BASELINES
                    if baseline in policies and policy not in (*BASELINES, "online-only")
                },
            }
            for policy in policies
        }

    def as_json(self) -> dict[str, Any]:
        experiment = self.experiment
        return {
            "scenario": "bros-tradeoff",
            "slo": asdict(SLO_OF_ALL),
            "duration_s": experiment.duration_s,
            "num_seeds": experiment.num_seeds,
            "points": [
                {
                    **point.setting._asdict(),
                    "is_feasible": point.is_feasible,
                    "policies": {policy: dict(figures) for policy, figures in point.policies.items()},
                }
                for point in self.points
            ],
            "summary": {workload: self.summary(workload) for workload in experiment.workloads},
            "paper": PAPER,
        }


def run_bros(
    experiment: BrosExperiment,
    num_processes: int = 1,
    on_done: Callable[[Setting, str, Mapping[str, float]], None] = lambda *_: None,
) -> BrosResult:
    """Run every policy at every point. ``on_done`` is called after each, in order.

    Results do not depend on ``num_processes``. Raises: ConfigError.
    """
    points: dict[Setting, dict[str, Mapping[str, float]]] = {}

    def receive(setting: Setting, policy: str, runs: Sequence[PolicyMetrics]) -> None:
        figures = mean_figures(FIGURES, runs)
        points.setdefault(setting, {})[policy] = figures
        on_done(setting, policy, figures)

    run_points(experiment, figures_of, num_processes, receive)
    return BrosResult(experiment, [BrosPoint(*point) for point in points.items()])


def run_points(
    experiment: BrosExperiment,
    function: Callable[[Simulation], Run],
    num_processes: int,
    receive: Callable[[Setting, str, Sequence[Run]], None],
) -> None:
    """Call ``function`` for every seed of every policy at every point.

    ``receive`` gets what it returned for the seeds of each policy, in order. Raises: ConfigError.
    """
    experiment.validate()
    sources = dict(WORKLOADS)
    if experiment.online_lengths is not None:
        sources["sharegpt"] = TraceLengths.read(experiment.online_lengths)
    runs = [(setting, policy) for setting in experiment.settings() for policy in experiment.policies]
    work = [
        point_simulation(experiment, setting, policy, sources[setting.workload], seed)
        for setting, policy in runs
        for seed in range(1, experiment.num_seeds + 1)
    ]
    with processes(num_processes) as pool:
        results = pool.map(function, work)
        for setting, policy in runs:
            receive(setting, policy, list(itertools.islice(results, experiment.num_seeds)))


def point_simulation(
    experiment: BrosExperiment, setting: Setting, policy: str, lengths: LengthSource, seed: int
) -> Simulation:
    """Poisson arrivals beside a flood of offline requests."""
    rng = np.random.default_rng(seed)
    hardware = MODELS[setting.model]
    max_len = load_hardware_profile(hardware).max_model_len
    count = max(1, round(setting.rate_per_s * experiment.duration_s))
    online = lengths.sample(count, max_len, rng)
    workload = Workload(
        online=online_requests(setting.rate_per_s, 1.0, online, rng),
        duration_s=experiment.duration_s,
        offline=BROS_OFFLINE.sample(_NUM_OFFLINE, max_len, rng),
    )
    return Simulation(hardware, policy, workload, SLO_OF_ALL, _MAX_STEP_TOKENS, seed)
