"""``backfill simulate fleet``: routing policies on one fleet and one workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from rich.console import Console

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.options import bounded
from backfill.core.slo import SLO
from backfill.costs.hardware import HardwareProfile, load_device
from backfill.costs.parallel import parallel_hardware
from backfill.router.policy import PolicyName
from backfill.simulation.device import BLOCK_SIZE, HOST_S, MOST_KV_TOKENS, measured_profile, typical_behaviour
from backfill.simulation.fleet import Fleet
from backfill.simulation.fleet_figures import (
    ONE_ENGINE,
    Comparison,
    FleetOutcome,
    draw_comparison,
    figures_of,
    outcome_of,
)
from backfill.simulation.fleet_replica import ReplicaSpec
from backfill.simulation.fleet_traffic import FleetTraffic
from backfill.simulation.study import LEAST, MOST, Outcomes, Run, Study
from backfill.simulation.tables import print_rows
from backfill.simulation.workloads import summarization_lengths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUTERS = (*get_args(PolicyName), ONE_ENGINE)
_MOST_REPLICAS = 256
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


@dataclass(frozen=True, kw_only=True)
class FleetStudy(Study[Comparison]):
    """Run replicas of an engine behind a router, on one clock, under each routing policy.

    Online requests share system prompts and turns of conversations; offline ones come from one pool. Every
    replica has the scheduler `slo` and keeps no KV in host memory. Figures are means over the seeds.

    Attributes:
        replicas: number of replicas.
        routers: routing policies to compare, separated by commas: slo, least-loaded, round-robin, prefix, and
            one-engine, which is one engine with the memory and speed of all.
        hardware: hardware profile of a replica, by name or as a JSON file; with tensor parallelism a device
            and model such as a100-80g-llama-3-70b.
        tensor_parallel_size: devices of a replica.
        kv_tokens: memory of a replica in tokens of KV. Default: all that its devices leave.
        max_num_seqs: requests of a replica in one step.
        max_num_batched_tokens: tokens of a replica in one step.
        online: CSV of a trace with arrival times, with the columns that `backfill simulate run --help` names.
            Default: lengths as of Azure's conversations.
        offline: CSV of the lengths of offline requests, which repeat, with the same columns. Default: those
            of document summaries.
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

    replicas: int = bounded(4, least=1, most=_MOST_REPLICAS)
    routers: str = "slo,least-loaded,round-robin"
    hardware: str = "a100-80g-llama-3-70b"
    tensor_parallel_size: int = 4
    kv_tokens: int | None = bounded(None, least=64 * BLOCK_SIZE, most=MOST_KV_TOKENS)
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 1024
    online: Path | None = None
    offline: Path | None = None
    online_only: bool = False
    rate: float | None = bounded(None, least=LEAST, most=MOST)
    duration: float = bounded(300.0, least=LEAST, most=MOST)
    speed: float = bounded(1.0, least=LEAST, most=MOST)
    applications: int = bounded(64, least=1, most=100_000)
    zipf: float = bounded(1.1, least=0)
    turns: float = bounded(0.6, least=0, most=1)
    ttft_slo: float = 3.0
    tpot_slo: float = 0.2

    scenario: ClassVar[str] = "fleet"
    title: ClassVar[str] = "A fleet behind a router"
    groups: ClassVar[Mapping[str, str]] = {
        "Fleet": "replicas routers hardware tensor_parallel_size kv_tokens max_num_seqs "
        "max_num_batched_tokens ttft_slo tpot_slo",
        "Workload": "online offline online_only rate duration speed applications zipf turns",
    }
    tells_progress: ClassVar[bool] = True

    def validate(self) -> None:
        """Raises: ConfigError."""
        super().validate()
        self.names("routers", ROUTERS)
        if self.online_only and self.offline is not None:
            raise ConfigError("is of no use with `online_only`.", field="offline")
        self.scheduler().validate()
        self.replica_hardware()

    @property
    def slo(self) -> SLO:
        return SLO(self.ttft_slo, self.tpot_slo)

    def replica_hardware(self) -> HardwareProfile:
        """Raises: ConfigError."""
        if self.tensor_parallel_size > 1:
            return parallel_hardware(self.hardware, self.tensor_parallel_size).resized(self.kv_tokens)
        return load_device(self.hardware, self.kv_tokens, None, None)[0]

    def scheduler(self) -> SchedulerConfig:
        """Of one replica. No KV is copied to host memory."""
        return SchedulerConfig(
            policy="slo",
            kv_layout="unidirectional",
            checkpointing="none",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk_tokens=self.max_num_batched_tokens,
            ttft_slo=self.ttft_slo,
            tpot_slo=self.tpot_slo,
        )

    def traffic(self, seed: int) -> FleetTraffic:
        return FleetTraffic(
            trace=self.online,
            rate_per_s=self.rate,
            duration_s=self.duration,
            speed=self.speed,
            num_applications=self.applications,
            zipf=self.zipf,
            turn_share=self.turns,
            seed=seed,
        )

    def heading(self, seed: int) -> list[str]:
        hardware = self.replica_hardware()
        size_gb = hardware.kv_tokens * hardware.kv_bytes_per_token / 1e9
        return [
            self.title,
            f"{self.replicas} x {hardware.name}, each with {hardware.kv_tokens:,} tokens of KV "
            f"({size_gb:.0f} GB); objectives {self.ttft_slo:g} s and {self.tpot_slo * 1000:g} ms",
        ]

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        return [
            Run("fleet", router, seed, partial(self.run, router, seed))
            for seed in seeds
            for router in self.names("routers", ROUTERS)
        ]

    def run(self, router: str, seed: int) -> FleetOutcome:
        """The same for the same router and seed. Raises: ConfigError."""
        return outcome_of(self.fleet(router, seed).run(), self.slo, seed)

    def fleet(self, router: str, seed: int) -> Fleet:
        """Raises: ConfigError."""
        hardware, config = self.replica_hardware(), self.scheduler()
        num_replicas, host_s = self.replicas, HOST_S
        if router == ONE_ENGINE:
            hardware = replace(
                hardware,
                costs=replace(hardware.costs, cost=hardware.costs.cost.slowed(1 / num_replicas)),
                kv_tokens=num_replicas * hardware.kv_tokens,
            )
            config = replace(config, max_num_seqs=num_replicas * config.max_num_seqs)
            num_replicas, router, host_s = 1, "round-robin", HOST_S / num_replicas
        behaviour = replace(typical_behaviour(hardware.costs), host_s=host_s)
        profile = measured_profile(hardware, behaviour, seed)
        # Of a request: the context, and what the pool holds.
        max_len = min(hardware.max_model_len, hardware.kv_tokens // BLOCK_SIZE * BLOCK_SIZE)
        return Fleet(
            router,
            num_replicas,
            ReplicaSpec(config, hardware, behaviour, profile, self.slo),
            self.traffic(seed).arrivals(max_len),
            () if self.online_only else summarization_lengths(self.offline, max_len, seed),
            self.duration,
            seed,
        )

    def point(self, setting: str, outcomes: Outcomes) -> Comparison:
        return outcomes

    def describe(self, run: Run, outcome: FleetOutcome) -> str:
        figures = outcome.figures
        return (
            f"seed {run.seed}: {run.system} done, {figures.num_online} online requests, "
            f"{figures.num_steps} steps"
        )

    def report(self, console: Console, points: Sequence[Comparison]) -> None:
        (outcomes,) = points
        num_seeds = len(next(iter(outcomes.values())))
        print_rows(console, f"{self.duration:g} s, means of {num_seeds} seed(s)", _ROWS, figures_of(outcomes))

    def as_json(self, points: Sequence[Comparison]) -> dict[str, Any]:
        (outcomes,) = points
        hardware = self.replica_hardware()
        traffic = asdict(self.traffic(seed=0))
        return {
            "hardware": hardware.name,
            "num_replicas": self.replicas,
            "kv_tokens_per_replica": hardware.kv_tokens,
            "kv_bytes_per_replica": hardware.kv_tokens * hardware.kv_bytes_per_token,
            "slo": asdict(self.slo),
            "traffic": {
                name: str(value) if isinstance(value, Path) else value
                for name, value in traffic.items()
                if name != "seed"
            },
            "seeds": [each.seed for each in next(iter(outcomes.values()))],
            "routers": {
                router: {**figures, "runs": [asdict(each.figures) for each in outcomes[router]]}
                for router, figures in figures_of(outcomes).items()
            },
        }

    def draw(self, figure: Figure, points: Sequence[Comparison]) -> None:
        (outcomes,) = points
        hardware = self.replica_hardware()
        first = next(iter(outcomes.values()))[0]
        figure.suptitle(
            f"{self.replicas} replicas of {hardware.name}, {hardware.kv_tokens:,} tokens of KV each, "
            f"{len(first.ttft_s):,} online requests"
        )
        draw_comparison(figure, outcomes, self.ttft_slo, self.duration)
