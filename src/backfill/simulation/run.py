"""Runs one policy on one workload on a simulated device."""

from __future__ import annotations

from dataclasses import replace

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.costs.hardware import HardwareProfile
from backfill.engine.engine import Engine
from backfill.execution.executor import ExecutorInfo
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.replay import Replay, ReplayResult, Workload

_BLOCK_SIZE = 16


def simulate(
    config: SchedulerConfig, workload: Workload, hardware: HardwareProfile, host_kv_tokens: int
) -> ReplayResult:
    """Replay a workload on a virtual clock.

    Args:
        config: its objectives are those of every online request.
        host_kv_tokens: size of the KV pool in host memory.
    """
    clock = VirtualClock()
    profile = hardware.costs
    info = ExecutorInfo(
        num_blocks=hardware.kv_tokens // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        max_model_len=hardware.max_model_len,
        vocab_size=32_000,
        end_token_ids=(),
        device=profile.key.device,
        dtype=profile.key.dtype,
        num_layers=profile.num_layers,
        can_stop=True,
        num_host_blocks=host_kv_tokens // _BLOCK_SIZE if profile.copies is not None else 0,
        block_bytes=hardware.kv_bytes_per_token * _BLOCK_SIZE,
    )
    executor = SimulatedExecutor(info, profile.cost, clock, profile.copies)
    engine = Engine(config, executor, clock, profile)
    if config.policy == "online-only":
        workload = replace(workload, offline=())
    replay = Replay(engine, clock, workload)
    executor.events = replay
    return replay.run()
