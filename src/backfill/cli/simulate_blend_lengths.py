"""``backfill simulate blendserve-lengths``: the order ``blend`` under estimates of output lengths."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from rich.console import Console

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.sweeps import SweepOptions, live_sweep, names_of
from backfill.cli.tables import print_rows
from backfill.core.options import check_types
from backfill.simulation.blend_lengths import (
    CHECKPOINTS,
    ESTIMATES,
    REFERENCE,
    EstimateName,
    LengthsExperiment,
    LengthsFigures,
    LengthsResult,
    LengthsRun,
    compare_lengths,
)
from backfill.simulation.length_groups import LENGTHS


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsOptions:
    """The pools and the estimates.

    Attributes:
        lengths: lengths of the requests, separated by commas: sharegpt, lmsys. Default: both, a pool of each.
        source_lengths: CSV of prompt and output lengths, instead of those drawn for sharegpt.
        estimates: estimates of output lengths, separated by commas: exact, moments, point, pool-mean.
            Default: all.
        density: compute density of each pool.
        requests: requests of a pool.
        interference: how compute and memory traffic of a step disturb each other: blendserve, nanoflow,
            ideal (not at all) or sequential (they do not overlap).
    """

    lengths: str | None = None
    source_lengths: Path | None = None
    estimates: str | None = None
    density: float = 1.0
    requests: int = 10_000
    interference: str = "blendserve"

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)

    def experiment(self, options: SweepOptions) -> LengthsExperiment:
        """Raises: ConfigError."""
        experiment = LengthsExperiment(
            lengths=names_of(self.lengths, tuple(LENGTHS)),
            source_lengths=self.source_lengths,
            estimates=cast("tuple[EstimateName, ...]", names_of(self.estimates, ESTIMATES)),
            density=self.density,
            num_requests=self.requests,
            interference=self.interference,
            num_seeds=options.seeds,
        )
        experiment.validate()
        return experiment


def blendserve_lengths(pools: LengthsOptions, options: SweepOptions) -> None:
    """Run pools in the order `blend` while output lengths are known, estimated, or taken for one mean.

    Prints throughput over the achievable optimum, and by how much the predicted density of what is left is
    off as the pool empties.
    """
    console = Console()
    experiment = pools.experiment(options)

    def on_done(run: LengthsRun, result: LengthsResult) -> None:
        console.print(
            f"{run.pool.lengths}, seed {run.pool.seed}: {run.estimate} done, {result.num_steps} steps, "
            f"{result.seconds:.0f} s",
            style="dim",
            soft_wrap=True,
        )

    console.print("[bold]Output lengths and the order blend[/bold]")
    with interruptible(), live_sweep(console, len(experiment.runs())) as progress:
        comparison = compare_lengths(experiment, options.jobs, on_done, progress)
    for name, estimates in comparison.pools.items():
        _print_pool(console, f"{name}, density {experiment.density:g}", estimates)
    options.end(console, None, comparison.as_json())


app = command(
    blendserve_lengths,
    {
        "Pools": "lengths source_lengths density requests interference",
        "Runs": "estimates seeds jobs",
        "Output": "json",
    },
    prefix="BACKFILL_SIMULATE_BLENDSERVE_LENGTHS_",
)


_FIGURES = {
    "tokens_per_s": ("tokens/s", ".0f"),
    "of_optimum": ("/ achievable optimum", ".3f"),
    "speedup": (f"/ {REFERENCE}", ".3f"),
    "num_preemptions": ("preempted", ".0f"),
} | {f"error {share:g}": (f"density error at {share:.0%}", ".2f") for share in CHECKPOINTS}


def _print_pool(console: Console, title: str, estimates: dict[EstimateName, LengthsFigures]) -> None:
    reference = estimates.get(REFERENCE)
    columns: dict[str, dict[str, object]] = {
        estimate: {
            **asdict(figures),
            "speedup": None if reference is None else figures.tokens_per_s / reference.tokens_per_s,
            **{f"error {share:g}": error for share, error in zip(CHECKPOINTS, figures.errors, strict=True)},
        }
        for estimate, figures in estimates.items()
    }
    print_rows(console, title, _FIGURES, columns)
    console.print(
        "Density errors: of the density predicted for what has not ended, relative, when so many requests "
        "have ended."
    )
