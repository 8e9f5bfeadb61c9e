"""One order of an offline pool beside online traffic, on a simulated device with the policy ``slo``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from backfill.blending.pool import OfflinePool
from backfill.blending.requests import OrderName, PoolRequest
from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.device import executor_info, host_pool_tokens
from backfill.simulation.metrics import percentile
from backfill.simulation.replay import ReplayResult, Workload
from experiments.blendserve.coserving_replay import BIN_S, PoolReplay
from experiments.blendserve.mix import Mix, MixSpec, draw_mix
from experiments.blendserve.optimum import PoolWork, Work, WorkModel
from experiments.blendserve.overlap import InterferenceName
from experiments.blendserve.pool import device, resource_model
from experiments.blendserve.traffic import OnlineTraffic

SLO_OF_ALL = SLO(ttft_s=1.5, tpot_s=0.11)
_MAX_STEP_TOKENS = 1024
_MAX_SEQS = 512

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CoserveRun:
    """One order beside one traffic. Small enough to be sent to another process.

    Attributes:
        knows_online: the pool is told every second what online requests use.
    """

    mix: MixSpec
    traffic: OnlineTraffic
    order: OrderName
    knows_online: bool
    interference: InterferenceName


@dataclass(frozen=True, slots=True)
class CoserveResult:
    """What a run measured, from its start to the end of the pool, or of the traffic if that came first.

    Attributes:
        end_s: when the pool's last request ended; inf if it did not.
        of_optimum: the least time of the pool's work beside the mean online use, over ``end_s``. At most 1.
        offline_tok_s: prompt and output tokens of offline requests, cached prefixes included.
        imbalance: share of the steps' time that would have been saved if each step had had its part of all
            compute and of all memory traffic.
        offline, online: seconds of either resource in a second, at the best rates, of the whole pool and of
            the online requests.
        usage: seconds a second of compute, memory, online compute and online memory in each ``BIN_S``.
    """

    end_s: float
    of_optimum: float
    offline_tok_s: float
    offline: Work
    online: Work
    imbalance: float
    ttft_attainment: float
    tpot_attainment: float
    ttft_p99_s: float
    num_online: int
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
    clock, config = VirtualClock(), EngineConfig(scheduler=_scheduler()).with_checkpointing()
    executor = SimulatedExecutor(
        executor_info(hardware, host_pool_tokens(hardware, config)),
        DeviceBehaviour(cost, hardware.costs.copies),
        clock,
    )
    replay = PoolReplay(
        Engine(config.scheduler, executor, clock, replace(hardware.costs, cost=cost)),
        executor,
        clock,
        Workload(arrivals, run.traffic.duration_s, ()),
        pool,
        requests,
        outputs,
        cost=cost,
        knows_online=run.knows_online,
    )
    executor.events = replay
    result = replay.run()
    online = model.of_requests(each.lengths for each in arrivals if each.at_s < replay.ended_at_s)
    num_tokens = sum(len(each.prompt_token_ids) for each in requests) + sum(outputs)
    return _result(replay, result, model, work.total, online, num_tokens)


def _result(
    replay: PoolReplay, result: ReplayResult, model: WorkModel, total: Work, online: Work, num_tokens: int
) -> CoserveResult:
    """Args: total, num_tokens: of the pool."""
    seconds = result.duration_s
    online = online.over(seconds)
    steps = replay.usage.between(0.0, seconds)
    counters = result.counters[ServiceClass.OFFLINE]
    ttfts = np.array([each.ttft_s for each in result.online])
    tpots = np.array([each.tpot_s for each in result.online])
    return CoserveResult(
        end_s=replay.ended_at_s,
        of_optimum=model.least_s(total, online) / replay.ended_at_s,
        offline_tok_s=num_tokens / replay.ended_at_s,
        offline=total.over(replay.ended_at_s),
        online=online,
        imbalance=1.0 - model.cost.overlap.seconds(*steps[:, 2:4].sum(axis=0)) / float(steps[:, 1].sum()),
        ttft_attainment=float((ttfts <= SLO_OF_ALL.ttft_s).mean()),
        tpot_attainment=float((tpots <= SLO_OF_ALL.tpot_s).mean()),
        ttft_p99_s=percentile(ttfts, 99),
        num_online=len(ttfts),
        num_preemptions=counters.num_preemptions,
        recomputed_share=counters.num_recomputed_tokens / max(counters.num_computed_tokens, 1),
        usage=replay.usage.binned(BIN_S),
    )


def _scheduler() -> SchedulerConfig:
    """Of a server with its default policy."""
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
