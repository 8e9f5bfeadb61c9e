"""Policies that simulations compare, and a run of one of them on a simulated device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.hardware import HardwareProfile
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.simulation.device import host_pool_tokens, measured_profile, typical_behaviour
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.replay import EngineFactory, ReplayResult, Workload, simulate

_slo = partial(SchedulerConfig, policy="slo")
_bros = partial(SchedulerConfig, policy="bros", kv_layout="unidirectional")

# Policies that scenarios compare: options of ``backfill serve``, which chooses what they leave open.
VARIANTS: Mapping[str, SchedulerConfig] = {
    "online-only": SchedulerConfig(policy="online-only"),
    "fcfs": SchedulerConfig(policy="fcfs"),
    "round-robin": SchedulerConfig(policy="round-robin"),
    # The paper's vLLM++; then what vLLM does today.
    "priority": SchedulerConfig(policy="priority", checkpointing="swap", kv_restore="blocking"),
    "priority-recompute": SchedulerConfig(policy="priority"),
    # The default, and parts of it switched off.
    "slo": _slo(),
    "slo-recompute": _slo(checkpointing="none"),
    "slo-swap": _slo(checkpointing="swap", kv_restore="blocking"),
    "slo-checkpoint": _slo(kv_restore="blocking"),
    "slo-no-safepoints": _slo(safepoints=False),
    "slo-unidirectional": _slo(kv_layout="unidirectional"),
    # The two papers' systems; then BROS without its KV cache.
    "conserve": SchedulerConfig(policy="conserve"),
    "bros": SchedulerConfig(policy="bros"),
    "bros-checkpoint": _bros(checkpointing="adaptive"),
    "bros-swap": _bros(checkpointing="swap", kv_restore="blocking"),
    "bros-recompute": _bros(checkpointing="none"),
}


COLOURS = {
    "online-only": "#2166ac",
    "fcfs": "#b2182b",
    "round-robin": "#762a83",
    "priority": "#e08214",
    "priority-recompute": "#fdb863",
    "slo-recompute": "#a6dba0",
    "slo-swap": "#c7eae5",
    "slo-checkpoint": "#5aae61",
    "slo": "#1b7837",
    "slo-no-safepoints": "#35978f",
    "conserve": "#8c510a",
    "bros": "#de77ae",
    "bros-swap": "#f1b6da",
    "bros-recompute": "#c51b7d",
    "bros-checkpoint": "#8e0152",
    "slo-unidirectional": "#00441b",
}


@dataclass(frozen=True, slots=True)
class Simulation:
    """One policy on one workload. Small enough to be sent to another process.

    Attributes:
        policy: one of the ``VARIANTS``.
        slo: objectives of every online request.
        max_step_tokens: most tokens of a step, and of a chunk of a prompt.
        seed: of the device's noise, while it is profiled and while it serves.
        behaviour: what the device does; None for ``typical_behaviour``.
        profile: what the engine predicts with; None for what ``backfill profile`` finds on that device.
    """

    hardware: HardwareProfile
    policy: str
    workload: Workload
    slo: SLO
    max_step_tokens: int
    seed: int
    behaviour: DeviceBehaviour | None = None
    profile: CostProfile | None = None

    def replay(self, create_engine: EngineFactory = Engine) -> ReplayResult:
        """What the policy's options leave open is as ``backfill serve`` chooses it."""
        options = replace(
            VARIANTS[self.policy],
            max_num_batched_tokens=self.max_step_tokens,
            max_prefill_chunk_tokens=self.max_step_tokens,
            ttft_slo=self.slo.ttft_s,
            tpot_slo=self.slo.tpot_s,
        )
        config = EngineConfig(scheduler=options).with_checkpointing()
        behaviour = self.behaviour or typical_behaviour(self.hardware.costs)
        replay = simulate(
            config.scheduler,
            self.workload,
            self.hardware,
            host_pool_tokens(self.hardware, config),
            behaviour=behaviour,
            profile=self.profile or measured_profile(self.hardware, behaviour, self.seed),
            seed=self.seed,
            create_engine=create_engine,
        )
        num_hits = replay.num_prefix_hit_tokens
        assert num_hits == 0, f"{self.policy}: {num_hits} tokens of prompts that differ are prefix hits"
        return replay


def figures_of(simulation: Simulation) -> PolicyMetrics:
    return metrics_of(simulation.replay(), simulation.slo)
