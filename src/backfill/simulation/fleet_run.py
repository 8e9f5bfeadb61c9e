"""Routing policies on one fleet and one workload, compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.costs.hardware import HardwareProfile, load_device
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.parallel import parallel_hardware
from backfill.router.policy import PolicyName
from backfill.simulation.device import BLOCK_SIZE, HOST_S, measured_profile, typical_behaviour
from backfill.simulation.fleet import Fleet, FleetResult
from backfill.simulation.fleet_replica import ReplicaSpec
from backfill.simulation.fleet_traffic import FleetTraffic
from backfill.simulation.metrics import percentile
from backfill.simulation.progress import SweepProgress
from backfill.simulation.sweep import check_names, check_positive, processes
from backfill.simulation.workloads import summarization_lengths

ONE_ENGINE = "one-engine"
"""One engine with the memory and the speed of the fleet, which finds every prefix that fits."""

ROUTERS = (*get_args(PolicyName), ONE_ENGINE)
DEFAULT_ROUTERS = ("slo", "least-loaded", "round-robin")
_MOST_REPLICAS = 256
_NUM_OFFLINE = 4000

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetExperiment:
    """What to run.

    Attributes:
        hardware: name or file of a hardware profile; with more than one device a name such as
            a100-80g-llama-3-70b.
        kv_tokens: memory of a replica, in tokens of KV; None for all that its devices leave.
        num_replicas: of every policy but ``ONE_ENGINE``.
        traffic: of seed 0; each seed draws its own.
        offline: CSV of lengths; None draws those of document summaries.
        has_offline: offline requests fill what the online ones leave.
        max_num_seqs: requests of a replica in one step.
    """

    hardware: str
    traffic: FleetTraffic
    slo: SLO
    tensor_parallel_size: int = 1
    kv_tokens: int | None = None
    num_replicas: int = 4
    routers: tuple[str, ...] = DEFAULT_ROUTERS
    offline: Path | None = None
    has_offline: bool = True
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 128
    seeds: tuple[int, ...] = (1,)

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_names("routers", self.routers, ROUTERS)
        traffic = self.traffic
        check_positive(
            duration=traffic.duration_s, speed=traffic.speed, applications=traffic.num_applications
        )
        if traffic.rate_per_s is not None:
            check_positive(rate=traffic.rate_per_s)
        if not 1 <= self.num_replicas <= _MOST_REPLICAS:
            raise ConfigError(f"must be 1 to {_MOST_REPLICAS}, got {self.num_replicas}.", field="replicas")
        if not (0.0 <= traffic.zipf < math.inf):
            raise ConfigError(f"must be a number of at least 0, got {traffic.zipf:g}.", field="zipf")
        if not 0.0 <= traffic.turn_share <= 1.0:
            raise ConfigError(f"must be 0 to 1, got {traffic.turn_share:g}.", field="turns")
        self.scheduler().validate()
        self.replica_hardware()

    def replica_hardware(self) -> HardwareProfile:
        """Of one replica. Raises: ConfigError."""
        if self.tensor_parallel_size > 1:
            hardware = parallel_hardware(self.hardware, self.tensor_parallel_size)
            return replace(hardware, kv_tokens=self.kv_tokens or hardware.kv_tokens)
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
            ttft_slo=self.slo.ttft_s,
            tpot_slo=self.slo.tpot_s,
        )


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """One policy's figures. Times are in seconds; rates are a second, of the whole fleet.

    Attributes:
        attainment: share of online requests whose first token is within TTFT and whose mean gap is within
            TPOT.
        hit_rate: share of the online requests' prompt tokens that were found in the prefix cache.
        offline_tok_s: prompt and output tokens of offline requests, each counted once.
        most_requests: online requests of the replica with most of them, over the mean.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    attainment: float
    goodput_rps: float
    hit_rate: float
    offline_tok_s: float
    offline_rps: float
    most_requests: float
    num_online: int
    num_steps: int
    num_stopped_steps: int
    scheduling_s: float


@dataclass(frozen=True, slots=True)
class FleetRun:
    """One policy under one seed. Small enough to be sent to another process."""

    experiment: FleetExperiment
    router: str
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class FleetOutcome:
    """Figures of a run, and what is drawn of it.

    Attributes:
        arrived_at_s, ttft_s: of each online request.
        num_online: online requests in each replica, ``[time, replica]``, every ``fleet.REPORT_S``.
    """

    figures: FleetFigures
    arrived_at_s: Floats
    ttft_s: Floats
    num_online: Counts


@dataclass(slots=True)
class FleetComparison:
    """Outcomes by policy, in the order of the seeds."""

    experiment: FleetExperiment
    outcomes: dict[str, list[FleetOutcome]] = field(default_factory=dict)

    def figures(self, router: str) -> dict[str, float]:
        """Means over the seeds."""
        runs = [asdict(outcome.figures) for outcome in self.outcomes[router]]
        return {name: fmean(run[name] for run in runs) for name in runs[0]}

    def ratios(self, router: str) -> dict[str, float]:
        """P99 TTFT over round-robin's, and hit rate over that of one engine, where these ran."""
        own = self.figures(router)
        found = {}
        for name, other in (("ttft_p99_s", "round-robin"), ("hit_rate", ONE_ENGINE)):
            if other in self.outcomes and self.figures(other)[name] > 0:
                found[f"{name}_over_{other}"] = own[name] / self.figures(other)[name]
        return found

    def as_json(self) -> dict[str, Any]:
        experiment = self.experiment
        hardware = experiment.replica_hardware()
        traffic = asdict(experiment.traffic)
        return {
            "scenario": "fleet",
            "hardware": hardware.name,
            "num_replicas": experiment.num_replicas,
            "kv_tokens_per_replica": hardware.kv_tokens,
            "kv_bytes_per_replica": hardware.kv_tokens * hardware.kv_bytes_per_token,
            "slo": asdict(experiment.slo),
            "traffic": {
                name: str(value) if isinstance(value, Path) else value
                for name, value in traffic.items()
                if name != "seed"
            },
            "seeds": list(experiment.seeds),
            "routers": {
                router: {
                    **self.figures(router),
                    **self.ratios(router),
                    "runs": [asdict(outcome.figures) for outcome in outcomes],
                }
                for router, outcomes in self.outcomes.items()
            },
        }


def compare_routers(
    experiment: FleetExperiment,
    num_processes: int = 1,
    on_done: Callable[[FleetRun, FleetFigures], None] = lambda *_: None,
    progress: SweepProgress | None = None,
) -> FleetComparison:
    """Run every policy under every seed. ``on_done`` is called after each, in order.

    Results do not depend on ``num_processes``. Raises: ConfigError.
    """
    experiment.validate()
    runs = [FleetRun(experiment, router, seed) for seed in experiment.seeds for router in experiment.routers]
    comparison = FleetComparison(experiment)
    with processes(num_processes, progress) as pool:
        for run, outcome in zip(runs, pool.map(run_fleet, runs), strict=True):
            comparison.outcomes.setdefault(run.router, []).append(outcome)
            on_done(run, outcome.figures)
    return comparison


def run_fleet(run: FleetRun) -> FleetOutcome:
    """The same for the same run. Raises: ConfigError."""
    experiment = run.experiment
    hardware, config = experiment.replica_hardware(), experiment.scheduler()
    num_replicas, router, host_s = experiment.num_replicas, run.router, HOST_S
    if router == ONE_ENGINE:
        hardware = _as_one(hardware, num_replicas)
        config = replace(config, max_num_seqs=num_replicas * config.max_num_seqs)
        num_replicas, router = 1, "round-robin"
        host_s = HOST_S / experiment.num_replicas
    behaviour = replace(typical_behaviour(hardware.costs), host_s=host_s)
    spec = ReplicaSpec(
        config, hardware, behaviour, measured_profile(hardware, behaviour, run.seed), experiment.slo
    )
    traffic = replace(experiment.traffic, seed=run.seed)
    offline = summarization_lengths(
        experiment.offline, count=_NUM_OFFLINE, max_len=_most_tokens(hardware), seed=run.seed
    )
    fleet = Fleet(
        router,
        num_replicas,
        spec,
        traffic.arrivals(_most_tokens(hardware)),
        offline if experiment.has_offline else (),
        traffic.duration_s,
        run.seed,
    )
    return _outcome(fleet.run(), experiment.slo)


def _most_tokens(hardware: HardwareProfile) -> int:
    """Of a request: the context, and what the pool holds."""
    return min(hardware.max_model_len, hardware.kv_tokens // BLOCK_SIZE * BLOCK_SIZE)


def _as_one(hardware: HardwareProfile, num_replicas: int) -> HardwareProfile:
    """A device with the memory of so many, and as fast as they are together."""

    def faster(curve: PiecewiseLinear) -> PiecewiseLinear:
        return replace(curve, y=tuple(y / num_replicas for y in curve.y))

    cost = hardware.costs.cost
    fast = CostModel(
        faster(cost.rows_s),
        faster(cost.sampled_s),
        request_s=cost.request_s / num_replicas,
        prefill_pair_s=cost.prefill_pair_s / num_replicas,
        prefill_context_s=cost.prefill_context_s / num_replicas,
        decode_context_s=cost.decode_context_s / num_replicas,
    )
    return replace(
        hardware, costs=replace(hardware.costs, cost=fast), kv_tokens=num_replicas * hardware.kv_tokens
    )


def _outcome(result: FleetResult, slo: SLO) -> FleetOutcome:
    ttft_s = np.array([each.ttft_s for each in result.online])
    tpot_s = np.array([each.tpot_s for each in result.online])
    met = (ttft_s <= slo.ttft_s) & (tpot_s <= slo.tpot_s)
    online = [each[ServiceClass.ONLINE] for each in result.counters]
    offline = [each[ServiceClass.OFFLINE] for each in result.counters]
    num_of_replica = np.bincount(
        np.array([each.replica for each in result.online], dtype=np.int64), minlength=len(result.counters)
    )
    num_queried = sum(each.num_prefix_queried_tokens for each in online)
    figures = FleetFigures(
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p99_s=percentile(ttft_s, 99),
        tpot_p99_s=percentile(tpot_s, 99),
        attainment=float(met.mean()),
        goodput_rps=float(met.sum()) / result.duration_s,
        hit_rate=sum(each.num_all_prefix_hit_tokens for each in online) / max(num_queried, 1),
        offline_tok_s=sum(each.num_computed_tokens - each.num_recomputed_tokens for each in offline)
        / result.duration_s,
        offline_rps=sum(result.offline_done) / result.duration_s,
        most_requests=float(num_of_replica.max() / num_of_replica.mean()),
        num_online=len(ttft_s),
        num_steps=result.num_steps,
        num_stopped_steps=result.num_stopped_steps,
        scheduling_s=result.scheduling_s,
    )
    return FleetOutcome(
        figures,
        np.array([each.arrived_at_s for each in result.online]),
        ttft_s,
        np.array([list(row) for row in result.num_online], dtype=np.int64),
    )
