"""One order of an offline pool beside online traffic, on a simulated device with the policy ``slo``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from backfill.blending.pool import OfflinePool
from backfill.blending.requests import OrderName, PoolRequest
from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.device import executor_info
from backfill.simulation.metrics import percentile
from backfill.simulation.replay import ReplayResult, Workload
from experiments.blendserve.coserving_replay import BIN_S, PoolReplay
from experiments.blendserve.mix import Mix, MixSpec, draw_mix
from experiments.blendserve.optimum import PoolWork, Work, WorkModel
from experiments.blendserve.pool import device, resource_model
from experiments.blendserve.traffic import OnlineTraffic

SLO_OF_ALL = SLO(ttft_s=1.5, tpot_s=0.11)
_MAX_STEP_TOKENS = 1024
_MAX_SEQS = 512
_HOST_POOL_RATIO = 4

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CoserveRun:
    """One order beside one traffic. Small enough to be sent to another process.

    Attributes:
        knows_online: the pool is told every second what online requests use.
        warmup_s: from the start, of which no offline work is counted.
    """

    mix: MixSpec
    traffic: OnlineTraffic
    order: OrderName
    knows_online: bool
    interference: str
    warmup_s: float


@dataclass(frozen=True, slots=True)
class CoserveResult:
    """What a run measured. Offline figures are of the time from the warm-up to the end of the traffic.

    Attributes:
        offline_tok_s: prompt and output tokens of offline requests, cached prefixes included.
        offline_rps: offline requests that ended.
        optimal_s_per_s: seconds of the pool's achievable optimum that were done in a second: each request's
            part of it, as far as it has got. It makes requests of different kinds comparable.
        of_optimum: by how much the least time of what is left of the pool, beside the mean online use, became
            shorter in a second. At most 1.
        imbalance: share of the steps' time that would have been saved if each step had had its part of all
            compute and of all memory traffic.
        offline, online: seconds of either resource in a second, at the best rates.
        num_left: offline requests that had not been taken in the end.
        usage: seconds a second of compute, memory, online compute and online memory in each ``BIN_S``.
    """

    offline_tok_s: float
    offline_rps: float
    optimal_s_per_s: float
    of_optimum: float
    offline: Work
    online: Work
    imbalance: float
    ttft_attainment: float
    tpot_attainment: float
    ttft_p99_s: float
    num_online: int
    num_left: int
    num_preemptions: int
    recomputed_share: float
    usage: Floats

    @property
    def offline_compute(self) -> float:
        return self.offline.compute_s

    @property
    def offline_memory(self) -> float:
        return self.offline.memory_s


def run_coserving(run: CoserveRun) -> CoserveResult:
    """Draw the pool and the traffic, and run them. The same for the same run. Raises: ConfigError."""
    mix, requests, outputs = _drawn(run.mix)
    hardware, cost = device(run.interference)
    model = WorkModel.of(cost)
    work = PoolWork(list(mix.parts.values()), model)
    arrivals = run.traffic.arrivals(model)
    pool = OfflinePool(run.order, resource_model(cost), kv_tokens=hardware.kv_tokens, seed=run.mix.seed)
    pool.add(requests)
    clock = VirtualClock()
    executor = SimulatedExecutor(
        executor_info(hardware, _HOST_POOL_RATIO * hardware.kv_tokens),
        DeviceBehaviour(cost, hardware.costs.copies),
        clock,
    )
    replay = PoolReplay(
        Engine(_config(), executor, clock, replace(hardware.costs, cost=cost)),
        executor,
        clock,
        Workload(arrivals, run.traffic.duration_s, ()),
        pool,
        requests,
        outputs,
        cost=cost,
        work=work,
        warmup_s=run.warmup_s,
        is_blend=run.order == "blend",
        knows_online=run.knows_online,
    )
    executor.events = replay
    counted_s = run.traffic.duration_s - run.warmup_s
    online = model.of_requests(each.lengths for each in arrivals if each.at_s >= run.warmup_s)
    return _result(replay, replay.run(), model, work.total, online.over(counted_s), pool.num_waiting)


def _result(
    replay: PoolReplay, result: ReplayResult, model: WorkModel, total: Work, online: Work, num_waiting: int
) -> CoserveResult:
    """Args: total: of the pool; online: seconds of either resource in a second."""
    began, ended = replay.done
    seconds = ended.at_s - began.at_s
    offline = ended.work.minus(began.work).over(seconds)
    left_s = [model.least_s(total.minus(each.work), online) for each in (began, ended)]
    steps = replay.usage.between(began.at_s, ended.at_s)
    counters = result.counters[ServiceClass.OFFLINE]
    ttfts = np.array([each.ttft_s for each in result.online])
    tpots = np.array([each.tpot_s for each in result.online])
    return CoserveResult(
        offline_tok_s=(ended.num_tokens - began.num_tokens) / seconds,
        offline_rps=(ended.num_finished - began.num_finished) / seconds,
        optimal_s_per_s=model.optimal_s(offline, total),
        of_optimum=(left_s[0] - left_s[1]) / seconds,
        offline=offline,
        online=online,
        imbalance=1.0 - model.cost.overlap.seconds(*steps[:, 2:4].sum(axis=0)) / float(steps[:, 1].sum()),
        ttft_attainment=float((ttfts <= SLO_OF_ALL.ttft_s).mean()),
        tpot_attainment=float((tpots <= SLO_OF_ALL.tpot_s).mean()),
        ttft_p99_s=percentile(ttfts, 99),
        num_online=len(ttfts),
        num_left=num_waiting,
        num_preemptions=counters.num_preemptions,
        recomputed_share=counters.num_recomputed_tokens / max(counters.num_computed_tokens, 1),
        usage=replay.usage.binned(BIN_S),
    )


def _config() -> SchedulerConfig:
    return SchedulerConfig(
        policy="slo",
        max_num_seqs=_MAX_SEQS,
        max_num_batched_tokens=_MAX_STEP_TOKENS,
        max_prefill_chunk_tokens=_MAX_STEP_TOKENS,
        ttft_slo=SLO_OF_ALL.ttft_s,
        tpot_slo=SLO_OF_ALL.tpot_s,
    )


@lru_cache(maxsize=1)
def _drawn(spec: MixSpec) -> tuple[Mix, list[PoolRequest], list[int]]:
    """In random order, as if many batches had arrived at once. Kept for the next order on the same pool."""
    mix = draw_mix(spec)
    requests, outputs = mix.requests()
    order = np.random.default_rng([spec.seed, 3]).permutation(len(requests))
    return mix, [requests[index] for index in order], outputs
