"""Orders of an offline pool beside online traffic whose kind changes (ours, not the paper's)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from backfill.blending.requests import OrderName
from backfill.core.errors import ConfigError
from backfill.costs.overlap import INTERFERENCE
from backfill.simulation.blend_coserving_run import (
    SLO_OF_ALL,
    CoserveResult,
    CoserveRun,
    run_coserving,
)
from backfill.simulation.blend_mix import MixSpec
from backfill.simulation.blend_run import HARDWARE
from backfill.simulation.blend_sources import COMPUTE_SOURCES
from backfill.simulation.coserving_traffic import TRAFFICS, OnlineTraffic, TrafficName
from backfill.simulation.progress import SweepProgress
from backfill.simulation.sweep import check_names, check_positive, processes

LONG_SOURCE = "reasoning"
_SHARING = 0.35


class Variant(NamedTuple):
    """An order, and whether its pool is told what online requests use."""

    order: OrderName
    knows_online: bool


VARIANTS: Mapping[str, Variant] = {
    "fcfs": Variant("fcfs", knows_online=False),
    "dfs": Variant("dfs", knows_online=False),
    "blend": Variant("blend", knows_online=False),
    "blend-online": Variant("blend", knows_online=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoserveExperiment:
    """What to run.

    Attributes:
        variants: names of ``VARIANTS``.
        source: of the compute-bound offline requests.
        density: of the offline pool.
        num_requests: of the offline pool.
        load: see ``OnlineTraffic``.
        warmup_s: not counted in the offline figures.
        duration_s: of the traffic, the warm-up included.
        num_seeds: figures are means over the seeds 1 to this.
    """

    traffics: tuple[TrafficName, ...] = TRAFFICS
    variants: tuple[str, ...] = tuple(VARIANTS)
    source: str = "burstgpt"
    density: float = 1.0
    num_requests: int = 16_000
    load: float = 0.4
    phase_s: float = 120.0
    cv: float = 1.0
    warmup_s: float = 120.0
    duration_s: float = 600.0
    interference: str = "blendserve"
    num_seeds: int = 1

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_names("traffics", self.traffics, TRAFFICS)
        check_names("variants", self.variants, VARIANTS)
        check_names("source", (self.source,), COMPUTE_SOURCES)
        check_names("interference", (self.interference,), INTERFERENCE)
        check_positive(
            density=self.density,
            requests=self.num_requests,
            load=self.load,
            phase=self.phase_s,
            cv=self.cv,
            seeds=self.num_seeds,
        )
        if not 0.0 <= self.warmup_s < self.duration_s < float("inf"):
            raise ConfigError(
                f"`duration` must be above the {self.warmup_s:g} s that are not counted, "
                f"got {self.duration_s:g}."
            )
        if not self.load < 1.0:
            raise ConfigError(f"`load` must be below 1, the whole device, got {self.load:g}.")

    def runs(self) -> list[tuple[str, CoserveRun]]:
        """With the variant's name; variants on one pool after another, so that it is drawn once."""
        return [
            (
                name,
                CoserveRun(
                    MixSpec(self.source, self.density, _SHARING, self.num_requests, seed, long=LONG_SOURCE),
                    OnlineTraffic(
                        name=traffic,
                        load=self.load,
                        phase_s=self.phase_s,
                        cv=self.cv,
                        duration_s=self.duration_s,
                        seed=seed,
                    ),
                    *VARIANTS[name],
                    self.interference,
                    self.warmup_s,
                ),
            )
            for seed, traffic in itertools.product(range(1, self.num_seeds + 1), self.traffics)
            for name in self.variants
        ]


@dataclass(frozen=True, slots=True)
class CoserveFigures:
    """One variant beside one traffic, means over the seeds; see ``CoserveResult``."""

    offline_tok_s: float
    offline_rps: float
    optimal_s_per_s: float
    of_optimum: float
    offline_compute: float
    offline_memory: float
    imbalance: float
    ttft_attainment: float
    tpot_attainment: float
    ttft_p99_s: float
    num_preemptions: float
    recomputed_share: float

    @classmethod
    def mean(cls, results: Sequence[CoserveResult]) -> CoserveFigures:
        return cls(
            fmean(each.offline_tok_s for each in results),
            fmean(each.offline_rps for each in results),
            fmean(each.optimal_s_per_s for each in results),
            fmean(each.of_optimum for each in results),
            fmean(each.offline.compute_s for each in results),
            fmean(each.offline.memory_s for each in results),
            fmean(each.imbalance for each in results),
            fmean(each.ttft_attainment for each in results),
            fmean(each.tpot_attainment for each in results),
            fmean(each.ttft_p99_s for each in results),
            fmean(each.num_preemptions for each in results),
            fmean(each.recomputed_share for each in results),
        )


@dataclass(slots=True)
class CoserveComparison:
    """Figures by traffic and variant, and the first seed's results, for its usage over time."""

    experiment: CoserveExperiment
    figures: dict[TrafficName, dict[str, CoserveFigures]] = field(default_factory=dict)
    first: dict[TrafficName, dict[str, CoserveResult]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        experiment = asdict(self.experiment)
        return {
            "scenario": "blendserve-coserving",
            "hardware": HARDWARE,
            "ttft_slo_s": SLO_OF_ALL.ttft_s,
            "tpot_slo_s": SLO_OF_ALL.tpot_s,
            **{name: value for name, value in experiment.items() if name not in ("traffics", "variants")},
            "traffics": {
                traffic: {
                    name: {**asdict(figures), "usage": self.first[traffic][name].usage.tolist()}
                    for name, figures in variants.items()
                }
                for traffic, variants in self.figures.items()
            },
        }


def compare_coserving(
    experiment: CoserveExperiment,
    num_processes: int = 1,
    on_done: Callable[[str, CoserveRun, CoserveResult], None] = lambda *_: None,
    progress: SweepProgress | None = None,
) -> CoserveComparison:
    """Run every variant beside every traffic. ``on_done`` is called after each, in order.

    Results do not depend on ``num_processes``. Raises: ConfigError, also where the pool ran dry.
    """
    experiment.validate()
    runs = experiment.runs()
    found: dict[TrafficName, dict[str, list[CoserveResult]]] = {}
    with processes(num_processes, progress) as pool:
        results = pool.map(run_coserving, [run for _, run in runs])
        for (name, run), result in zip(runs, results, strict=True):
            if result.num_left == 0:
                raise ConfigError(
                    f"`requests`: {experiment.num_requests} offline requests are too few; all had begun "
                    f"before the end of {experiment.duration_s:g} s ({name})."
                )
            found.setdefault(run.traffic.name, {}).setdefault(name, []).append(result)
            on_done(name, run, result)
    comparison = CoserveComparison(experiment)
    for traffic, variants in found.items():
        comparison.figures[traffic] = {
            name: CoserveFigures.mean(of_seeds) for name, of_seeds in variants.items()
        }
        comparison.first[traffic] = {name: of_seeds[0] for name, of_seeds in variants.items()}
    return comparison
