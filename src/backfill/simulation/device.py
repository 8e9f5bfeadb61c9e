"""Simulated devices: what a hardware profile's device does, and what its user would measure of it."""

from __future__ import annotations

from functools import lru_cache

from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.costs.behaviour import DeviceBehaviour, StepNoise
from backfill.costs.hardware import HardwareProfile
from backfill.costs.profile import CostProfile
from backfill.costs.profiler import FULL, Capacity, profile_executor
from backfill.execution.executor import ExecutorInfo
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.execution.simulated_pipeline import SimulatedPipeline
from backfill.execution.sizing import choose_num_host_blocks

BLOCK_SIZE = 16
MOST_KV_TOKENS = 100_000_000  # of a pool, each of whose blocks is an object
# Planning, committing and delivering, between two steps of the real engine (docs/simulation.md). What a
# safepoint takes there could not be told from 0.
HOST_S = 0.8e-3


def exact_behaviour(costs: CostProfile) -> DeviceBehaviour:
    """Steps take exactly the profile's times, and nothing else takes time."""
    return DeviceBehaviour(costs.cost, costs.copies)


def typical_behaviour(costs: CostProfile) -> DeviceBehaviour:
    """Steps vary as much as the profile's held-out steps did, and the host takes time between them."""
    return DeviceBehaviour(
        costs.cost,
        costs.copies,
        noise=StepNoise.of_error(costs.error),
        host_s=HOST_S,
    )


@lru_cache(maxsize=32)
def measured_profile(hardware: HardwareProfile, behaviour: DeviceBehaviour, seed: int) -> CostProfile:
    """What ``backfill profile`` would save on the simulated device: its steps, its medians, its fit.

    It differs from the device as a user's profile does: steps were noisy, and the fitted function bends at
    the profiler's token counts, not at the device's.
    """
    scheduler = SchedulerConfig()
    info = executor_info(hardware, hardware.kv_tokens)
    clock = VirtualClock()
    return profile_executor(
        create_simulated_executor(info, behaviour, clock, seed),
        clock,
        Capacity(
            kv_tokens=info.num_blocks * info.block_size,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            num_host_blocks=info.num_host_blocks,
            block_bytes=info.block_bytes,
        ),
        FULL,
        key=hardware.costs.key,
        num_layers=info.num_layers,
    )


def executor_info(hardware: HardwareProfile, host_kv_tokens: int) -> ExecutorInfo:
    """Args: host_kv_tokens: size of the KV pool in host memory, which needs a known copy speed."""
    costs = hardware.costs
    return ExecutorInfo(
        num_blocks=hardware.kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=hardware.max_model_len,
        vocab_size=32_000,
        end_token_ids=(),
        device=costs.key.device,
        dtype=costs.key.dtype,
        num_layers=costs.num_layers,
        num_host_blocks=host_kv_tokens // BLOCK_SIZE if costs.copies is not None else 0,
        block_bytes=hardware.kv_bytes_per_token * BLOCK_SIZE,
        max_steps_in_flight=max(1, len(hardware.stage_layers)),
        stage_layers=hardware.stage_layers,
    )


def host_pool_tokens(hardware: HardwareProfile, config: EngineConfig) -> int:
    """Tokens of the KV pool in host memory that a server with this configuration has.

    Profiles do not say how much memory the host has: it is as much as the pool needs.
    """
    block_bytes = hardware.kv_bytes_per_token * BLOCK_SIZE
    if not block_bytes:  # unknown, so that nothing can be copied
        return 0
    kv_bytes = hardware.kv_tokens // BLOCK_SIZE * block_bytes
    return choose_num_host_blocks(config, block_bytes, kv_bytes, left_bytes=None) * BLOCK_SIZE


def create_simulated_executor(
    info: ExecutorInfo, behaviour: DeviceBehaviour, clock: VirtualClock, seed: int
) -> SimulatedExecutor:
    """A pipeline where the model has several stages."""
    if info.stage_layers:
        return SimulatedPipeline(info, behaviour, clock, seed=seed)
    return SimulatedExecutor(info, behaviour, clock, seed=seed)
