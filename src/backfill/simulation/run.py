"""One policy on one workload on a device that is simulated."""

from __future__ import annotations

from backfill.core.clock import VirtualClock
from backfill.core.config import PolicyName, PreemptionMode, SchedulerConfig
from backfill.core.slo import SLO
from backfill.costs.hardware import HardwareProfile
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.execution.executor import ExecutorInfo
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.replay import Replay, ReplayResult
from backfill.simulation.workloads import Workload

BLOCK_SIZE = 16


def simulate(
    policy: PolicyName,
    workload: Workload,
    *,
    profile: CostProfile,
    kv_tokens: int,
    max_model_len: int,
    slo: SLO,
    max_num_batched_tokens: int,
    max_num_seqs: int = 256,
    preemption: PreemptionMode = "suspend",
) -> ReplayResult:
    """Replay a workload on the virtual clock.

    Args:
        kv_tokens: of the device's KV pool.
        slo: objectives of every online request.
    """
    clock = VirtualClock()
    cost = profile.cost
    info = ExecutorInfo(
        num_blocks=kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        vocab_size=32_000,
        end_token_ids=(),
        device=profile.key.device,
        dtype=profile.key.dtype,
        num_layers=profile.num_layers,
        can_stop=True,
    )
    executor = SimulatedExecutor(info, cost, clock)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk_tokens=max_num_batched_tokens,
        policy=policy,
        preemption=preemption,
        ttft_slo_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
    )
    engine = Engine(config, executor, clock, profile)
    replay = Replay(
        engine,
        clock,
        workload.online,
        None if policy == "online-only" else workload.offline_flood(),
        duration_s=workload.duration_s,
    )
    executor.events = replay
    return replay.run()


def simulate_on(
    hardware: HardwareProfile, policy: PolicyName, workload: Workload, slo: SLO, max_num_batched_tokens: int
) -> ReplayResult:
    return simulate(
        policy,
        workload,
        profile=hardware.costs,
        kv_tokens=hardware.kv_tokens,
        max_model_len=hardware.max_model_len,
        slo=slo,
        max_num_batched_tokens=max_num_batched_tokens,
    )
