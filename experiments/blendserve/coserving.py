"""How long an offline pool takes in each order beside online traffic (ours, not the paper's)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from rich.console import Console

from backfill.blending.requests import OrderName
from backfill.cli.studies import command_of
from backfill.core.errors import ConfigError
from backfill.core.options import bounded
from backfill.simulation.study import LEAST, MOST, MOST_REQUESTS, Outcomes, Run, Study, mean_figures
from backfill.simulation.tables import print_rows
from experiments.blendserve.coserving_run import (
    SLO_OF_ALL,
    CoserveResult,
    CoserveRun,
    run_coserving,
)
from experiments.blendserve.mix import MixSpec
from experiments.blendserve.overlap import InterferenceName
from experiments.blendserve.pool import HARDWARE
from experiments.blendserve.sources import ComputeSource
from experiments.blendserve.traffic import TRAFFICS, OnlineTraffic, TrafficName

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


class CoservePoint(NamedTuple):
    """Figures of each variant beside one traffic, means over the seeds, and the first seed's results."""

    traffic: TrafficName
    figures: dict[str, dict[str, float]]
    first: dict[str, CoserveResult]


@dataclass(frozen=True, kw_only=True)
class Coserving(Study[CoservePoint]):
    """Run an offline pool to its end, in several orders, beside online traffic under policy `slo`.

    Prints how long it takes, and how many online requests meet their objectives.

    Attributes:
        traffics: online traffic, separated by commas: alternating (prompt-heavy and decode-heavy requests by
            turns), steady (both at any time).
        variants: orders of the offline pool, separated by commas: fcfs, dfs, blend, blend-online (the pool is
            told what online requests use).
        source: compute-bound requests of the pool: burstgpt, azure, sharegpt or wildchat. MMLU and long
            answers are mixed with them.
        density: compute density of the pool.
        requests: requests of the pool.
        load: share of the device's time that online requests take by themselves.
        phase: seconds of a phase of the alternating traffic.
        cv: variation of the gaps between online requests; 1 is Poisson.
        duration: seconds of online traffic, which the pool must not outlast.
        interference: how compute and memory traffic of a step disturb each other: blendserve, nanoflow,
            ideal (not at all) or sequential (they do not overlap).
    """

    traffics: str = ",".join(TRAFFICS)
    variants: str = ",".join(VARIANTS)
    source: ComputeSource = "burstgpt"
    density: float = bounded(1.0, above=0)
    requests: int = bounded(8_000, least=1, most=MOST_REQUESTS)
    load: float = bounded(0.4, least=LEAST, below=1)
    phase: float = bounded(120.0, least=1, most=86_400)
    cv: float = bounded(1.0, least=LEAST, most=MOST)
    duration: float = bounded(3_600.0, least=LEAST, most=MOST)
    interference: InterferenceName = "blendserve"

    scenario: ClassVar[str] = "blendserve-coserving"
    title: ClassVar[str] = "Orders of an offline pool beside online traffic"
    writes: ClassVar[str] = "json"
    tells_progress: ClassVar[bool] = True

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Variants on one pool after another, so that it is drawn once. Raises: ConfigError."""
        return [
            Run(traffic, name, seed, partial(run_to_the_end, name, self.run_of(traffic, name, seed)))
            for seed, traffic in itertools.product(seeds, self.names("traffics", TRAFFICS))
            for name in self.names("variants", VARIANTS)
        ]

    def run_of(self, traffic: TrafficName, variant: str, seed: int) -> CoserveRun:
        return CoserveRun(
            MixSpec(self.source, self.density, _SHARING, self.requests, seed, long=LONG_SOURCE),
            OnlineTraffic(
                name=traffic,
                load=self.load,
                phase_s=self.phase,
                cv=self.cv,
                duration_s=self.duration,
                seed=seed,
            ),
            *VARIANTS[variant],
            self.interference,
        )

    def point(self, setting: TrafficName, outcomes: Outcomes) -> CoservePoint:
        return CoservePoint(
            setting,
            {name: mean_figures(_MEANS, of_seeds) for name, of_seeds in outcomes.items()},
            {name: of_seeds[0] for name, of_seeds in outcomes.items()},
        )

    def describe(self, run: Run, outcome: CoserveResult) -> str:
        return f"{run.point}, seed {run.seed}: {run.system} done"

    def report(self, console: Console, points: Sequence[CoservePoint]) -> None:
        for traffic, figures, _ in points:
            print_rows(console, f"{traffic} traffic, load {self.load:g}", _FIGURES, figures)

    def as_json(self, points: Sequence[CoservePoint]) -> dict[str, Any]:
        return {
            "hardware": HARDWARE,
            "ttft_slo_s": SLO_OF_ALL.ttft_s,
            "tpot_slo_s": SLO_OF_ALL.tpot_s,
            "source": self.source,
            "density": self.density,
            "num_requests": self.requests,
            "load": self.load,
            "phase_s": self.phase,
            "cv": self.cv,
            "duration_s": self.duration,
            "interference": self.interference,
            "traffics": {
                traffic: {
                    name: {**each, "usage": first[name].usage.tolist()} for name, each in figures.items()
                }
                for traffic, figures, first in points
            },
        }


app = command_of(Coserving, "EXPERIMENTS_")


def run_to_the_end(variant: str, run: CoserveRun) -> CoserveResult:
    """Raises: ConfigError where the traffic ended first."""
    result = run_coserving(run)
    if result.end_s == math.inf:
        raise ConfigError(
            f"`duration`: the pool of {run.mix.num_requests} requests did not end within "
            f"{run.traffic.duration_s:g} s ({variant})."
        )
    return result


# Figures of ``CoserveResult``.
_FIGURES = {
    "end_s": ("pool ends, s", ".0f"),
    "of_optimum": ("/ optimum", ".3f"),
    "offline_tok_s": ("offline tok/s", ".0f"),
    "offline_compute": ("compute s/s", ".3f"),
    "offline_memory": ("memory s/s", ".3f"),
    "imbalance": ("imbalance", ".1%"),
    "ttft_attainment": ("TTFT met", ".2%"),
    "tpot_attainment": ("TPOT met", ".2%"),
    "num_preemptions": ("preempted", ".0f"),
    "recomputed_share": ("recomputed", ".1%"),
}
_MEANS = (*_FIGURES, "ttft_p99_s")
