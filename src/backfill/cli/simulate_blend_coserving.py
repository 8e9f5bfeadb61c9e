"""``backfill simulate blendserve-coserving``: orders of an offline pool beside changing online traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from rich.console import Console

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.sweeps import SweepOptions, live_sweep, names_of
from backfill.cli.tables import print_rows
from backfill.core.options import check_types
from backfill.simulation.blend_coserving import (
    VARIANTS,
    CoserveExperiment,
    CoserveFigures,
    compare_coserving,
)
from backfill.simulation.blend_coserving_run import CoserveResult, CoserveRun
from backfill.simulation.coserving_traffic import TRAFFICS, TrafficName


@dataclass(frozen=True, slots=True, kw_only=True)
class CoserveBlendOptions:
    """The traffic and the offline pool.

    Attributes:
        traffics: online traffic, separated by commas: alternating (prompt-heavy and decode-heavy requests by
            turns), steady (both at any time). Default: both.
        variants: orders of the offline pool, separated by commas: fcfs, dfs, blend, blend-online (the pool is
            told what online requests use). Default: all.
        source: compute-bound requests of the pool: burstgpt, azure, sharegpt or wildchat. MMLU and long
            answers are mixed with them.
        density: compute density of the pool.
        requests: requests of the pool. They must outlast the run.
        load: share of the device's time that online requests take by themselves.
        phase: seconds of a phase of the alternating traffic.
        cv: variation of the gaps between online requests; 1 is Poisson.
        duration: seconds of online traffic; the first 120 s are not counted in offline figures.
        interference: how compute and memory traffic of a step disturb each other: blendserve, nanoflow,
            ideal (not at all) or sequential (they do not overlap).
    """

    traffics: str | None = None
    variants: str | None = None
    source: str = "burstgpt"
    density: float = 1.0
    requests: int = 16_000
    load: float = 0.4
    phase: float = 120.0
    cv: float = 1.0
    duration: float = 600.0
    interference: str = "blendserve"

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)

    def experiment(self, options: SweepOptions) -> CoserveExperiment:
        """Raises: ConfigError."""
        experiment = CoserveExperiment(
            traffics=cast("tuple[TrafficName, ...]", names_of(self.traffics, TRAFFICS)),
            variants=names_of(self.variants, tuple(VARIANTS)),
            source=self.source,
            density=self.density,
            num_requests=self.requests,
            load=self.load,
            phase_s=self.phase,
            cv=self.cv,
            duration_s=self.duration,
            interference=self.interference,
            num_seeds=options.seeds,
        )
        experiment.validate()
        return experiment


def blendserve_coserving(points: CoserveBlendOptions, options: SweepOptions) -> None:
    """Run an offline pool in several orders beside online traffic whose kind changes, under policy `slo`.

    Prints offline throughput, and how many online requests meet their objectives.
    """
    console = Console()
    experiment = points.experiment(options)

    def on_done(name: str, run: CoserveRun, _: CoserveResult) -> None:
        console.print(f"{run.traffic.name}, seed {run.traffic.seed}: {name} done", style="dim")

    console.print("[bold]Orders of an offline pool beside online traffic[/bold]")
    with interruptible(), live_sweep(console, len(experiment.runs())) as progress:
        comparison = compare_coserving(experiment, options.jobs, on_done, progress)
    for traffic, variants in comparison.figures.items():
        _print_traffic(console, f"{traffic} traffic, load {experiment.load:g}", variants)
    options.end(console, None, comparison.as_json())


app = command(
    blendserve_coserving,
    {
        "Points": "traffics load phase cv duration source density requests interference",
        "Runs": "variants seeds jobs",
        "Output": "json",
    },
    prefix="BACKFILL_SIMULATE_BLENDSERVE_COSERVING_",
)

_FIGURES = {
    "offline_tok_s": ("offline tok/s", ".0f"),
    "offline_rps": ("offline req/s", ".2f"),
    "optimal_s_per_s": ("optimal s/s", ".3f"),
    "of_optimum": ("/ optimum", ".3f"),
    "offline_compute": ("compute s/s", ".3f"),
    "offline_memory": ("memory s/s", ".3f"),
    "imbalance": ("imbalance", ".1%"),
    "ttft_attainment": ("TTFT met", ".2%"),
    "tpot_attainment": ("TPOT met", ".2%"),
    "num_preemptions": ("preempted", ".0f"),
    "recomputed_share": ("recomputed", ".1%"),
}


def _print_traffic(console: Console, title: str, variants: Mapping[str, CoserveFigures]) -> None:
    print_rows(console, title, _FIGURES, {name: asdict(figures) for name, figures in variants.items()})
