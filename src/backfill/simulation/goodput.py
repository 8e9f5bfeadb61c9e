"""``backfill simulate goodput``: online workloads at 0.3 to 1.5 times what the device completes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from rich.console import Console

from backfill.core.errors import ConfigError
from backfill.core.options import bounded, internal
from backfill.core.slo import SLO
from backfill.costs.hardware import HardwareProfile, load_hardware_profile
from backfill.simulation.goodput_figures import (
    FIGURES,
    REFERENCE,
    SUMMARY,
    GoodputPoint,
    Pair,
    Panel,
    PolicySummary,
    draw_panels,
    panels_of,
    summarize,
)
from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.replay import Arrival, Workload
from backfill.simulation.study import (
    LEAST,
    MOST_REQUESTS,
    TUNING_SEED,
    Outcomes,
    Run,
    Study,
    mean_figures,
)
from backfill.simulation.tables import cell, table_of
from backfill.simulation.variants import VARIANTS, Simulation, figures_of
from backfill.simulation.workloads import (
    CODE,
    DOCUMENT,
    SHAREGPT,
    DrawnLengths,
    online_requests,
    summarization_lengths,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HARDWARE = "a100-40g-llama-2-7b"
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
CVS = (1.0, 4.0)
POLICIES = (REFERENCE, "fcfs", "round-robin", "priority", "conserve", "bros", "slo")
# Without offline requests these serve in order of arrival as ``online-only`` does.
_SAME_ALONE = (REFERENCE, "fcfs", "round-robin")
_MAX_STEP_TOKENS = 1024
# Of the first tokens of a capacity's run: the batch is full after it.
_WARMUP_FRAC = 0.1


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


class Setting(NamedTuple):
    """A workload's arrivals. ``load`` is the rate of online requests over the workload's capacity."""

    workload: str
    cv: float
    load: float


@dataclass(frozen=True, kw_only=True)
class Goodput(Study[Pair]):
    """Sweep the online load from 0.3 to 1.5 times what the device completes, under each policy.

    Prints goodput, latencies and offline tokens per second at each point, with a flood of document summaries
    and without offline requests, and a summary of each policy. Figures are means over the seeds.

    Attributes:
        workloads: kinds of online requests, separated by commas: conversation, code, document.
        loads: multiples of each workload's capacity, separated by commas.
        cvs: variation of the gaps between online requests, separated by commas; 1 is Poisson.
        num_requests: online requests of a point.
        slowness: the simulated device is so many times as slow, and objectives are as many times as long.
        policies: policies to compare, separated by commas.
        num_for_capacity: requests with which a capacity is measured.
    """

    workloads: str = ",".join(WORKLOADS)
    loads: str = ",".join(f"{load:g}" for load in LOADS)
    cvs: str = ",".join(f"{cv:g}" for cv in CVS)
    num_requests: int = bounded(1000, least=1, most=MOST_REQUESTS)
    slowness: float = bounded(1.0, least=LEAST, most=1000)
    policies: str = ",".join(POLICIES)
    num_for_capacity: int = internal(2000)

    scenario: ClassVar[str] = "goodput"
    title: ClassVar[str] = "Goodput against load, with and without offline requests"

    @property
    def all_policies(self) -> tuple[str, ...]:
        return self.names("policies", VARIANTS)

    @property
    def hardware(self) -> HardwareProfile:
        return load_hardware_profile(HARDWARE).slowed(self.slowness)

    def slo(self, workload: str) -> SLO:
        """On the device of the sweep."""
        slo = WORKLOADS[workload].slo
        return SLO(self.slowness * slo.ttft_s, self.slowness * slo.tpot_s)

    def settings(self) -> list[Setting]:
        kinds = itertools.product(self.names("workloads", WORKLOADS), self.numbers("cvs"))
        loads = sorted(self.numbers("loads"))
        return [Setting(workload, cv, load) for workload, cv in kinds for load in loads]

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Without those that would be the same as others: see ``point``."""
        alone = dict.fromkeys((_same_alone(policy), False) for policy in self.all_policies)
        beside = dict.fromkeys((policy, True) for policy in self.all_policies if policy != REFERENCE)
        return [
            Run(setting, _system(*each), seed, partial(self.run, setting, *each, seed))
            for setting in self.settings()
            for each in (*alone, *beside)
            for seed in seeds
        ]

    def run(self, setting: Setting, policy: str, has_offline: bool, seed: int) -> tuple[PolicyMetrics, float]:
        """Figures, and the workload's capacity in requests per second."""
        capacity = capacity_rps(self, setting.workload)
        return figures_of(self.simulation(setting, policy, has_offline, capacity, seed)), capacity

    def simulation(
        self, setting: Setting, policy: str, has_offline: bool, capacity_rps: float, seed: int
    ) -> Simulation:
        """A seed has the same requests at every load: only their arrivals are nearer to one another."""
        rng = np.random.default_rng(seed)
        max_len = self.hardware.max_model_len
        lengths = WORKLOADS[setting.workload].lengths.sample(self.num_requests, max_len, rng)
        rate_per_s = setting.load * capacity_rps
        workload = Workload(
            online=online_requests(rate_per_s, setting.cv, lengths, rng),
            duration_s=self.num_requests / rate_per_s,
            offline=summarization_lengths(None, max_len, seed) if has_offline else (),
        )
        return Simulation(self.hardware, policy, workload, self.slo(setting.workload), _MAX_STEP_TOKENS, seed)

    def point(self, setting: Setting, outcomes: Outcomes) -> Pair:
        """Alone some policies are ``online-only``, and that is the same beside offline requests as alone."""

        def of(system: str) -> Mapping[str, float]:
            return mean_figures(tuple(FIGURES), [metrics for metrics, _ in outcomes[system]])

        ((_, capacity), *_) = next(iter(outcomes.values()))
        alone = {policy: of(_system(_same_alone(policy), False)) for policy in self.all_policies}
        beside = {
            policy: alone[policy] if policy == REFERENCE else of(_system(policy, True))
            for policy in self.all_policies
        }
        workload, cv, load = setting
        return (
            GoodputPoint(Panel(workload, cv, False), load, capacity, alone),
            GoodputPoint(Panel(workload, cv, True), load, capacity, beside),
        )

    def describe(self, run: Run, outcome: object) -> str:
        workload, cv, load = cast("Setting", run.point)
        return f"{workload}, CV {cv:g}, load {load:g}: {run.system} done"

    def report(self, console: Console, points: Sequence[Pair]) -> None:
        for panel, of_panel in panels_of(points).items():
            headings = (heading for heading, _ in FIGURES.values())
            table = table_of(str(panel), "load", "policy", *headings, left=("policy",))
            for point in of_panel:
                for policy, figures in point.policies.items():
                    cells = [format(figures[name], kind) for name, (_, kind) in FIGURES.items()]
                    table.add_row(f"{point.load:g}", policy, *cells)
                table.add_section()
            console.print(table)
        for name, has_offline in (("with an offline flood", True), ("without offline requests", False)):
            table = table_of(f"Summary, {name}", "policy", *SUMMARY.values(), left=("policy",))
            for policy, summary in self._summaries(points, has_offline=has_offline).items():
                table.add_row(policy, *(cell(getattr(summary, each), ".3f") for each in SUMMARY))
            console.print(table)
        for workload, capacity in _capacities(points).items():
            console.print(f"capacity of {workload}: {capacity:.2f} requests/s")

    def _summaries(self, points: Sequence[Pair], *, has_offline: bool) -> dict[str, PolicySummary]:
        chosen = [pair[has_offline] for pair in points]
        return {policy: summarize(policy, chosen) for policy in self.all_policies}

    def as_json(self, points: Sequence[Pair]) -> dict[str, Any]:
        return {
            "hardware": HARDWARE,
            "slowness": self.slowness,
            "num_requests": self.num_requests,
            "workloads": {
                name: {
                    "capacity_rps": capacity,
                    "ttft_slo_s": self.slo(name).ttft_s,
                    "tpot_slo_s": self.slo(name).tpot_s,
                }
                for name, capacity in _capacities(points).items()
            },
            "points": [
                {
                    **panel._asdict(),
                    "load": point.load,
                    "rate_rps": point.rate_per_s,
                    "policies": {policy: dict(figures) for policy, figures in point.policies.items()},
                }
                for panel, of_panel in panels_of(points).items()
                for point in of_panel
            ],
            "summary": {
                name: {
                    policy: asdict(summary)
                    for policy, summary in self._summaries(points, has_offline=has_offline).items()
                }
                for name, has_offline in (("with_offline", True), ("without_offline", False))
            },
        }

    def draw(self, figure: Figure, points: Sequence[Pair]) -> None:
        draw_panels(figure, panels_of(points))


def _capacities(points: Sequence[Pair]) -> dict[str, float]:
    return {alone.panel.workload: alone.capacity_rps for alone, _ in points}


def _same_alone(policy: str) -> str:
    """The policy that has the same figures without offline requests."""
    return REFERENCE if policy in _SAME_ALONE else policy


def _system(policy: str, has_offline: bool) -> str:
    return f"{policy} beside offline requests" if has_offline else f"{policy} alone"


@lru_cache(maxsize=16)
def capacity_rps(sweep: Goodput, workload: str) -> float:
    """Requests of a workload that the device completes in a second. Raises: ConfigError."""
    return completed_per_s(capacity_simulation(sweep, workload))


def capacity_simulation(sweep: Goodput, workload: str) -> Simulation:
    """All requests at once, in order, without offline requests."""
    rng = np.random.default_rng(TUNING_SEED)
    max_len = sweep.hardware.max_model_len
    lengths = WORKLOADS[workload].lengths.sample(sweep.num_for_capacity, max_len, rng)
    online = tuple(Arrival(0.0, each) for each in lengths)
    slo = sweep.slo(workload)
    return Simulation(sweep.hardware, "fcfs", Workload(online, 1.0, ()), slo, _MAX_STEP_TOKENS, TUNING_SEED)


def completed_per_s(simulation: Simulation) -> float:
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
