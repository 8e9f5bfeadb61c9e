"""Runs one policy on one workload on a simulated device."""

from __future__ import annotations

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.slo import SLO
from backfill.costs.hardware import HardwareProfile
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.execution.executor import ExecutorInfo
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.replay import Replay, ReplayResult
from backfill.simulation.variants import Variant
from backfill.simulation.workloads import Workload

BLOCK_SIZE = 16
_HOST_POOL_RATIO = 4


def simulate(
    config: SchedulerConfig,
    workload: Workload,
    *,
    profile: CostProfile,
    kv_tokens: int,
    max_model_len: int,
    host_kv_tokens: int = 0,
    kv_bytes_per_token: int = 1,
) -> ReplayResult:
    """Replay a workload on a virtual clock.

    Args:
        config: its objectives are those of every online request.
        kv_tokens, host_kv_tokens: sizes of the KV pools on the device and in host memory.
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
        num_host_blocks=host_kv_tokens // BLOCK_SIZE if profile.copies is not None else 0,
        block_bytes=kv_bytes_per_token * BLOCK_SIZE,
    )
    executor = SimulatedExecutor(info, cost, clock, profile.copies)
    engine = Engine(config, executor, clock, profile)
    replay = Replay(
        engine,
        clock,
        workload.online,
        None if config.policy == "online-only" else workload.offline_flood(),
        duration_s=workload.duration_s,
    )
    executor.events = replay
    return replay.run()


def simulate_on(
    hardware: HardwareProfile, variant: Variant, workload: Workload, slo: SLO, max_num_batched_tokens: int
) -> ReplayResult:
    """Replay a workload on a device whose profile comes with the package.

    The host's KV pool is four times the device's.
    """
    config = SchedulerConfig(
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk_tokens=max_num_batched_tokens,
        ttft_slo=slo.ttft_s,
        tpot_slo=slo.tpot_s,
        policy=variant.policy,
        checkpointing=variant.checkpointing,
        kv_restore=variant.restore,
        victims=variant.victims,
    )
    return simulate(
        config,
        workload,
        profile=hardware.costs,
        kv_tokens=hardware.kv_tokens,
        max_model_len=hardware.max_model_len,
        host_kv_tokens=_HOST_POOL_RATIO * hardware.kv_tokens,
        kv_bytes_per_token=hardware.kv_bytes_per_token,
    )
