"""Goodput against load: online workloads at 0.3 to 1.5 times what the device completes, under each policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.simulation.replay import Arrival, Workload
from backfill.simulation.request_lengths import CODE, DOCUMENT, SHAREGPT, DrawnLengths
from backfill.simulation.scenarios import VARIANTS
from backfill.simulation.sweep import (
    Processes,
    Simulation,
    check_names,
    check_positive,
    figures_of,
    mean_figures,
    online_requests,
    processes,
)
from backfill.simulation.workloads import summarization_lengths

HARDWARE = "a100-40g-llama-2-7b"
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
CVS = (1.0, 4.0)
REFERENCE = "online-only"
POLICIES = (REFERENCE, "fcfs", "round-robin", "priority", "conserve", "bros", "slo")
# Without offline requests these serve in order of arrival as ``online-only`` does.
_SAME_ALONE = ("fcfs", "round-robin")
FIGURES = (
    "goodput_rps",
    "attainment",
    "ttft_p99_s",
    "itl_p99_s",
    "itl_attainment",
    "offline_tok_s",
)
_MAX_STEP_TOKENS = 1024
_NUM_OFFLINE = 4000
# Seed 0 is for tuning and for the capacities; figures are of the seeds from 1.
_CAPACITY_SEED = 0
_NUM_FOR_CAPACITY = 2000
# Of the first tokens of a capacity's run: the batch is full after it.
_WARMUP_FRAC = 0.1
_LIGHT_LOAD = 0.8
_FULL_LOAD = 1.0


@dataclass(frozen=True, slots=True)
class OnlineWorkload:
    """Lengths and objectives of one kind of online requests."""

    lengths: DrawnLengths
    slo: SLO


WORKLOADS: Mapping[str, OnlineWorkload] = {
    "conversation": OnlineWorkload(SHAREGPT, SLO(ttft_s=1.5, tpot_s=0.11)),
    "code": OnlineWorkload(CODE, SLO(ttft_s=1.5, tpot_s=0.11)),
    "document": OnlineWorkload(DOCUMENT, SLO(ttft_s=4.0, tpot_s=0.11)),
}


class Panel(NamedTuple):
    """Points that differ in their load only.

    Attributes:
        has_offline: beside a flood of offline requests.
    """

    workload: str
    cv: float
    has_offline: bool


class Setting(NamedTuple):
    """One point. ``load`` is the rate of online requests over the workload's capacity."""

    panel: Panel
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputSweep:
    """What to run.

    Attributes:
        loads: multiples of each workload's capacity.
        cvs: coefficients of variation of the gaps between online requests; 1 is Poisson.
        num_requests: online requests of a point.
        num_seeds: figures are means over the seeds 1 to ``num_seeds``.
        slowness: the device is so many times as slow as ``hardware``, and the objectives are as many times as
            long.
    """

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    cvs: tuple[float, ...] = CVS
    loads: tuple[float, ...] = LOADS
    policies: tuple[str, ...] = POLICIES
    num_requests: int = 1000
    num_seeds: int = 1
    num_for_capacity: int = _NUM_FOR_CAPACITY
    hardware: str = HARDWARE
    slowness: float = 1.0

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_names("workloads", self.workloads, WORKLOADS)
        check_names("policies", self.policies, VARIANTS)
        check_positive(num_requests=self.num_requests, seeds=self.num_seeds, slowness=self.slowness)
        for field_name, values in (("loads", self.loads), ("cvs", self.cvs)):
            if not values:
                raise ConfigError(f"`{field_name}` needs a number.")
            for value in values:
                check_positive(**{field_name: value})

    def settings(self) -> list[Setting]:
        """Every point, panel by panel."""
        return [
            Setting(Panel(workload, cv, has_offline), load)
            for workload, cv, has_offline in itertools.product(self.workloads, self.cvs, (False, True))
            for load in sorted(self.loads)
        ]


@dataclass(frozen=True, slots=True)
class GoodputPoint:
    """Figures of each policy by name (``FIGURES``), at one setting."""

    setting: Setting
    rate_per_s: float
    policies: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """One policy over the points of a sweep, beside offline requests or without. None where nothing compares.

    Attributes:
        over_online_only: least ratio of its goodput to that of ``online-only`` at a point where the latter
            has any.
        over_best: least ratio of its goodput to the best of all policies but ``online-only``.
        offline_over_priority: mean ratio of offline tokens per second to those of ``priority``, at loads
            below 0.8.
        stability: goodput at loads of 1 and above over its own peak at any load: the least of all panels.
    """

    over_online_only: float | None
    over_best: float | None
    offline_over_priority: float | None
    stability: float | None


@dataclass(slots=True)
class GoodputResult:
    """Figures of a sweep.

    Attributes:
        capacities: requests per second, by workload.
    """

    sweep: GoodputSweep
    capacities: Mapping[str, float]
    points: list[GoodputPoint] = field(default_factory=list)

    def panels(self) -> dict[Panel, list[GoodputPoint]]:
        """Points by ascending load."""
        found: dict[Panel, list[GoodputPoint]] = {}
        for point in self.points:
            found.setdefault(point.setting.panel, []).append(point)
        return found

    def summaries(self, *, has_offline: bool) -> dict[str, PolicySummary]:
        """By policy, over the points with an offline flood or those without."""
        points = [point for point in self.points if point.setting.panel.has_offline == has_offline]
        return {policy: summarize(policy, points) for policy in self.sweep.policies}

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": "goodput",
            "hardware": self.sweep.hardware,
            "slowness": self.sweep.slowness,
            "num_requests": self.sweep.num_requests,
            "num_seeds": self.sweep.num_seeds,
            "workloads": {
                name: {
                    "capacity_rps": self.capacities[name],
                    "ttft_slo_s": _slo(self.sweep, name).ttft_s,
                    "tpot_slo_s": _slo(self.sweep, name).tpot_s,
                }
                for name in self.sweep.workloads
            },
            "points": [
                {
                    **point.setting.panel._asdict(),
                    "load": point.setting.load,
                    "rate_rps": point.rate_per_s,
                    "policies": {policy: dict(figures) for policy, figures in point.policies.items()},
                }
                for point in self.points
            ],
            "summary": {
                name: {
                    policy: {each: getattr(summary, each) for each in PolicySummary.__slots__}
                    for policy, summary in self.summaries(has_offline=has_offline).items()
                }
                for name, has_offline in (("with_offline", True), ("without_offline", False))
            },
        }


def run_goodput(
    sweep: GoodputSweep,
    num_processes: int = 1,
    on_done: Callable[[Setting, str, Mapping[str, float]], None] = lambda *_: None,
) -> GoodputResult:
    """Run every policy at every point. ``on_done`` is called after each, in order.

    Results do not depend on ``num_processes``. Raises: ConfigError.
    """
    sweep.validate()
    with processes(num_processes) as pool:
        loads = [capacity_simulation(sweep, name) for name in sweep.workloads]
        capacities = dict(zip(sweep.workloads, pool.map(capacity_per_s, loads), strict=True))
        result = GoodputResult(sweep, capacities)
        result.points += _run_points(sweep, capacities, pool, on_done)
    return result


def _run_points(
    sweep: GoodputSweep,
    capacities: Mapping[str, float],
    pool: Processes,
    on_done: Callable[[Setting, str, Mapping[str, float]], None],
) -> list[GoodputPoint]:
    settings = sweep.settings()
    runs = list(dict.fromkeys(_run_of(setting, policy) for setting in settings for policy in sweep.policies))
    work = [
        point_simulation(sweep, setting, policy, capacities[setting.panel.workload], seed)
        for setting, policy in runs
        for seed in range(1, sweep.num_seeds + 1)
    ]
    results = pool.map(figures_of, work)
    figures: dict[tuple[Setting, str], Mapping[str, float]] = {}
    for setting, policy in runs:
        means = mean_figures(FIGURES, list(itertools.islice(results, sweep.num_seeds)))
        figures[setting, policy] = means
        on_done(setting, policy, means)
    return [
        GoodputPoint(
            setting,
            setting.load * capacities[setting.panel.workload],
            {policy: figures[_run_of(setting, policy)] for policy in sweep.policies},
        )
        for setting in settings
    ]


def _run_of(setting: Setting, policy: str) -> tuple[Setting, str]:
    """The run that has a policy's figures at a setting, so that none is run twice."""
    panel = setting.panel
    if policy == REFERENCE or (policy in _SAME_ALONE and not panel.has_offline):
        return setting._replace(panel=panel._replace(has_offline=False)), REFERENCE
    return setting, policy


def point_simulation(
    sweep: GoodputSweep, setting: Setting, policy: str, capacity_rps: float, seed: int
) -> Simulation:
    """The requests of a seed are the same at every load: only their arrivals are nearer to one another."""
    rng = np.random.default_rng(seed)
    panel, online = setting.panel, WORKLOADS[setting.panel.workload]
    max_len = load_hardware_profile(sweep.hardware).max_model_len
    lengths = online.lengths.sample(sweep.num_requests, max_len, rng)
    rate_per_s = setting.load * capacity_rps
    offline = summarization_lengths(None, count=_NUM_OFFLINE, max_len=max_len, seed=seed)
    workload = Workload(
        online=online_requests(rate_per_s, panel.cv, lengths, rng),
        duration_s=sweep.num_requests / rate_per_s,
        offline=offline if panel.has_offline else (),
    )
    slo = _slo(sweep, panel.workload)
    return Simulation(sweep.hardware, policy, workload, slo, _MAX_STEP_TOKENS, seed, sweep.slowness)


def capacity_simulation(sweep: GoodputSweep, name: str) -> Simulation:
    """All requests at once, in order, without offline requests."""
    online = WORKLOADS[name]
    max_len = load_hardware_profile(sweep.hardware).max_model_len
    rng = np.random.default_rng(_CAPACITY_SEED)
    lengths = online.lengths.sample(sweep.num_for_capacity, max_len, rng)
    workload = Workload(tuple(Arrival(0.0, each) for each in lengths), duration_s=1.0, offline=())
    slo = _slo(sweep, name)
    return Simulation(sweep.hardware, "fcfs", workload, slo, _MAX_STEP_TOKENS, _CAPACITY_SEED, sweep.slowness)


def _slo(sweep: GoodputSweep, name: str) -> SLO:
    """Of a workload on the device of the sweep."""
    slo = WORKLOADS[name].slo
    return SLO(sweep.slowness * slo.ttft_s, sweep.slowness * slo.tpot_s)


def capacity_per_s(simulation: Simulation) -> float:
    """Requests per second that the device completes while others wait.

    These are output tokens per second over the mean output, from the time when a tenth of the requests have
    begun until the last begins. Requests over the whole duration would be fewer: at the end a few long
    outputs run alone.
    """
    records = simulation.replay().online
    began = np.sort([record.token_at_s[0] for record in records])
    first_s, last_s = began[int(_WARMUP_FRAC * len(began))], began[-1]
    tokens_at_s = np.concatenate([record.token_at_s for record in records])
    num_tokens = np.count_nonzero((tokens_at_s > first_s) & (tokens_at_s <= last_s))
    if not num_tokens:
        raise ConfigError(f"{len(records)} requests are too few to measure a capacity: all run at once.")
    mean_output = len(tokens_at_s) / len(records)
    return float(num_tokens / (last_s - first_s) / mean_output)


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
    offline = [
        point.policies[policy]["offline_tok_s"] / point.policies["priority"]["offline_tok_s"]
        for point in points
        if point.setting.load < _LIGHT_LOAD and point.policies.get("priority", {}).get("offline_tok_s")
    ]
    return PolicySummary(
        over_online_only=min(over_reference, default=None),
        over_best=min(over_best, default=None),
        offline_over_priority=sum(offline) / len(offline) if offline else None,
        stability=_stability(policy, points),
    )


def _stability(policy: str, points: Sequence[GoodputPoint]) -> float | None:
    """See ``PolicySummary``; None where the policy has no goodput, or no load of 1 or above was run."""
    goodputs: dict[Panel, dict[float, float]] = {}
    for point in points:
        by_load = goodputs.setdefault(point.setting.panel, {})
        by_load[point.setting.load] = point.policies[policy]["goodput_rps"]
    ratios = [
        value / max(by_load.values())
        for by_load in goodputs.values()
        for load, value in by_load.items()
        if load >= _FULL_LOAD and max(by_load.values())
    ]
    return min(ratios, default=None)
