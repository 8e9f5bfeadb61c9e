"""``backfill simulate fleet``: replicas behind a router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.startup import check_plot
from backfill.cli.sweeps import SweepOptions, live_sweep, names_of
from backfill.cli.tables import print_rows
from backfill.core.config import at_least
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.core.slo import SLO
from backfill.simulation.device import BLOCK_SIZE
from backfill.simulation.fleet_run import (
    DEFAULT_ROUTERS,
    FleetExperiment,
    FleetFigures,
    FleetRun,
    compare_routers,
)
from backfill.simulation.fleet_traffic import FleetTraffic

_ROWS = {
    "ttft_p50_s": ("TTFT P50 s", ".3f"),
    "ttft_p99_s": ("TTFT P99 s", ".3f"),
    "ttft_p99_s_over_round-robin": ("/ round-robin", ".2f"),
    "tpot_p99_s": ("TPOT P99 s", ".3f"),
    "attainment": ("both met", ".2%"),
    "goodput_rps": ("goodput req/s", ".2f"),
    "hit_rate": ("prefix hits", ".1%"),
    "hit_rate_over_one-engine": ("/ one engine", ".3f"),
    "offline_tok_s": ("offline tok/s", ".0f"),
    "offline_rps": ("offline req/s", ".2f"),
    "most_requests": ("busiest / mean", ".2f"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """A fleet and its workload.

    Attributes:
        replicas: number of replicas.
        routers: routing policies to compare, separated by commas: slo, least-loaded, round-robin, prefix, and
            one-engine, which is one engine with the memory and speed of all. Default: slo, least-loaded and
            round-robin.
        hardware: hardware profile of a replica, by name or as a JSON file; with tensor parallelism a device
            and model such as a100-80g-llama-3-70b.
        tensor_parallel_size: devices of a replica.
        kv_tokens: memory of a replica in tokens of KV. Default: all that its devices leave.
        max_num_seqs: requests of a replica in one step.
        max_num_batched_tokens: tokens of a replica in one step.
        online: CSV of a trace with arrival times. Default: lengths as of Azure's conversations.
        offline: CSV of the lengths of offline requests, which repeat. Default: those of document summaries.
        online_only: no offline requests.
        rate: mean online requests per second of the whole fleet, to which the trace's requests are repeated
            or thinned out. Default: each of them once.
        duration: seconds to run.
        speed: seconds of the trace that pass in a second.
        applications: system prompts among the online requests.
        zipf: exponent of the applications' shares of the requests; 0 for equal shares.
        turns: share of the requests that go on with a conversation where one fits.
        ttft_slo: seconds to the first token.
        tpot_slo: seconds between two tokens.
    """

    replicas: int = 4
    routers: str | None = None
    hardware: str = "a100-80g-llama-3-70b"
    tensor_parallel_size: int = 4
    kv_tokens: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 1024
    online: Path | None = None
    offline: Path | None = None
    online_only: bool = False
    rate: float | None = None
    duration: float = 300.0
    speed: float = 1.0
    applications: int = 64
    zipf: float = 1.1
    turns: float = 0.6
    ttft_slo: float = 3.0
    tpot_slo: float = 0.2

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        if self.kv_tokens is not None:
            at_least("kv_tokens", self.kv_tokens, 64 * BLOCK_SIZE)
        if self.online_only and self.offline is not None:
            raise ConfigError("is of no use with `online_only`.", field="offline")

    def experiment(self, seeds: range) -> FleetExperiment:
        """Raises: ConfigError."""
        experiment = FleetExperiment(
            hardware=self.hardware,
            tensor_parallel_size=self.tensor_parallel_size,
            kv_tokens=self.kv_tokens,
            num_replicas=self.replicas,
            routers=names_of(self.routers, DEFAULT_ROUTERS),
            traffic=FleetTraffic(
                trace=self.online,
                rate_per_s=self.rate,
                duration_s=self.duration,
                speed=self.speed,
                num_applications=self.applications,
                zipf=self.zipf,
                turn_share=self.turns,
                seed=0,
            ),
            offline=self.offline,
            has_offline=not self.online_only,
            slo=SLO(self.ttft_slo, self.tpot_slo),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            seeds=tuple(seeds),
        )
        experiment.validate()
        return experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRuns(SweepOptions):
    """How the runs are made and what they write.

    Attributes:
        seeds: figures are means over the seeds 1 to this; seed 0 is for tuning.
        jobs: processes to run in. Figures do not depend on it.
        plot: PNG to write, of latency and load over time and of each policy's figures.
        json: end with one JSON object on a line.
    """


def fleet(options: FleetOptions, runs: FleetRuns) -> None:
    """Run replicas of an engine behind a router, on one clock, under each routing policy.

    Online requests share system prompts and turns of conversations; offline ones come from one pool. Every
    replica has the scheduler `slo` and keeps no KV in host memory.
    """
    console = Console()
    experiment = options.experiment(range(1, runs.seeds + 1))
    check_plot(runs.plot)
    console.print("[bold]A fleet behind a router[/bold]")
    hardware = experiment.replica_hardware()
    size_gb = hardware.kv_tokens * hardware.kv_bytes_per_token / 1e9
    console.print(
        f"{experiment.num_replicas} x {hardware.name}, each with {hardware.kv_tokens:,} tokens of KV "
        f"({size_gb:.0f} GB); objectives {options.ttft_slo:g} s and {options.tpot_slo * 1000:g} ms",
        highlight=False,
    )

    def on_done(run: FleetRun, figures: FleetFigures) -> None:
        what = f"seed {run.seed}: {run.router} done, {figures.num_online} online requests, "
        console.print(f"{what}{figures.num_steps} steps", style="dim")

    num_runs = len(experiment.routers) * len(experiment.seeds)
    with interruptible(), live_sweep(console, num_runs) as progress:
        comparison = compare_routers(experiment, runs.jobs, on_done, progress)
    columns = {
        router: {**comparison.figures(router), **comparison.ratios(router)} for router in comparison.outcomes
    }
    title = f"{options.duration:g} s, means of {runs.seeds} seed(s)"
    print_rows(console, title, _ROWS, columns)
    if runs.plot is not None:
        from backfill.simulation.fleet_plot import save_fleet_plot

        save_fleet_plot(runs.plot, comparison)
    runs.end(console, runs.plot, comparison.as_json())


app = command(
    fleet,
    {
        "Fleet": "replicas routers hardware tensor_parallel_size kv_tokens max_num_seqs "
        "max_num_batched_tokens ttft_slo tpot_slo",
        "Workload": "online offline online_only rate duration speed applications zipf turns",
        "Runs": "seeds jobs",
        "Output": "plot json",
    },
    prefix="BACKFILL_SIMULATE_FLEET_",
)
