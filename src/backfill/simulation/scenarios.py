"""Policies compared at the points of a scenario, on a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from backfill.core.config import SchedulerConfig
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.hardware import HardwareProfile
from backfill.costs.profile import CostProfile
from backfill.scheduling.policies.bros import BrosPolicy
from backfill.scheduling.policies.create import PolicyFactory
from backfill.scheduling.policy import Policy
from backfill.scheduling.prediction import StepPredictor
from backfill.simulation.device import exact_behaviour, measured_profile, typical_behaviour
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.replay import ReplayResult, Workload, simulate

_HOST_POOL_RATIO = 4

# Blocks are shared by the variants that say so.
_slo = partial(SchedulerConfig, policy="slo", kv_layout="unidirectional")

# Policies that scenarios compare, some with parts switched off.
VARIANTS: Mapping[str, SchedulerConfig] = {
    "online-only": SchedulerConfig(policy="online-only", checkpointing="none"),
    "fcfs": SchedulerConfig(policy="fcfs", checkpointing="none"),
    "round-robin": SchedulerConfig(policy="round-robin", checkpointing="none"),
    # The paper's vLLM++; then what vLLM does today.
    "priority": SchedulerConfig(policy="priority", checkpointing="swap", kv_restore="blocking"),
    "priority-recompute": SchedulerConfig(policy="priority", checkpointing="none"),
    "slo-recompute-latest": _slo(checkpointing="none", victims="latest"),
    "slo-recompute": _slo(checkpointing="none"),
    "slo-swap": _slo(checkpointing="swap", kv_restore="blocking"),
    "slo-checkpoint": _slo(checkpointing="adaptive", kv_restore="blocking"),
    "slo": _slo(checkpointing="adaptive"),
    "slo-no-safepoints": _slo(checkpointing="adaptive", safepoints=False),
    "slo-eager": _slo(checkpointing="eager"),
    # The two papers' own policies.
    "conserve": SchedulerConfig(policy="conserve", checkpointing="adaptive", preemption="discard"),
    "bros": SchedulerConfig(policy="bros", checkpointing="adaptive"),
    "bros-swap": SchedulerConfig(policy="bros", checkpointing="swap", kv_restore="blocking"),
    "bros-recompute": SchedulerConfig(policy="bros", checkpointing="none"),
    # BROS without its KV cache, as its section 7.4.1 may be read: a waiting online request preempts nobody.
    "bros-recompute-late": SchedulerConfig(policy="bros", checkpointing="none"),
    # Two requests in one block.
    "bros-bidirectional": SchedulerConfig(policy="bros", checkpointing="adaptive", kv_layout="bidirectional"),
    "slo-bidirectional": SchedulerConfig(policy="slo", checkpointing="adaptive", kv_layout="bidirectional"),
}


COLOURS = {
    "online-only": "#2166ac",
    "fcfs": "#b2182b",
    "round-robin": "#762a83",
    "priority": "#e08214",
    "priority-recompute": "#fdb863",
    "slo-recompute-latest": "#d9f0d3",
    "slo-recompute": "#a6dba0",
    "slo-swap": "#c7eae5",
    "slo-checkpoint": "#5aae61",
    "slo": "#1b7837",
    "slo-eager": "#01665e",
    "slo-no-safepoints": "#35978f",
    "conserve": "#8c510a",
    "bros": "#de77ae",
    "bros-swap": "#f1b6da",
    "bros-recompute": "#c51b7d",
    "bros-recompute-late": "#7a0177",
    "bros-bidirectional": "#8e0152",
    "slo-bidirectional": "#00441b",
}


def _late_bros(config: SchedulerConfig, predictor: StepPredictor | None) -> Policy:
    assert predictor is not None, "simulations have a cost profile"
    return BrosPolicy(
        predictor,
        max_num_seqs=config.max_num_seqs,
        max_chunk_tokens=min(config.max_num_batched_tokens, config.max_prefill_chunk_tokens),
        preempts_for_waiting=False,
    )


OWN_POLICIES: Mapping[str, PolicyFactory] = {"bros-recompute-late": _late_bros}
"""Policies of variants that no configuration has."""


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a scenario: the values that vary, and the workload they give."""

    setting: Mapping[str, float]
    workload: Workload


@dataclass(frozen=True, slots=True)
class Scenario:
    """One experiment.

    Attributes:
        policies: names of the ``VARIANTS`` to compare.
        paper: the paper's figures by policy, with names of ``PolicyMetrics`` where these exist.
        behaviour: what the device does; None for ``typical_behaviour``.
        profile: what the engine predicts with; None for what ``backfill profile`` finds on that device.
        seed: of the device's noise, while it is profiled and while it serves.
    """

    name: str
    title: str
    points: tuple[Point, ...]
    paper: Mapping[str, Any]
    hardware: HardwareProfile
    policies: tuple[str, ...]
    slo: SLO
    max_num_batched_tokens: int
    behaviour: DeviceBehaviour | None = None
    profile: CostProfile | None = None
    seed: int = 0

    def exact(self) -> Scenario:
        """The same on a device without noise that the engine knows perfectly."""
        costs = self.hardware.costs
        return replace(self, behaviour=exact_behaviour(costs), profile=costs)


@dataclass(slots=True)
class PointResult:
    setting: Mapping[str, float]
    metrics: dict[str, PolicyMetrics] = field(default_factory=dict)
    replays: dict[str, ReplayResult] = field(default_factory=dict)


@dataclass(slots=True)
class ScenarioResult:
    scenario: Scenario
    points: list[PointResult]

    def as_json(self) -> dict[str, Any]:
        """One object. ``policies`` is the first setting; a scenario of several also has ``points``."""
        content: dict[str, Any] = {
            "scenario": self.scenario.name,
            "hardware": self.scenario.hardware.name,
            "slo": asdict(self.scenario.slo),
            "policies": _policies(self.points[0]),
        }
        if len(self.points) > 1:
            content["points"] = [{**point.setting, "policies": _policies(point)} for point in self.points]
        return {**content, "paper": self.scenario.paper}


def run_scenario(
    scenario: Scenario,
    policies: Sequence[str],
    on_done: Callable[[Mapping[str, float], str, PolicyMetrics], None],
) -> ScenarioResult:
    """Run every setting under every policy. ``on_done`` is called after each.

    The host's KV pool is four times the device's.
    """
    hardware, slo = scenario.hardware, scenario.slo
    behaviour = scenario.behaviour or typical_behaviour(hardware.costs)
    profile = scenario.profile or measured_profile(hardware, behaviour, scenario.seed)
    results = []
    for point in scenario.points:
        result = PointResult(point.setting)
        for policy in policies:
            config = replace(
                VARIANTS[policy],
                max_num_batched_tokens=scenario.max_num_batched_tokens,
                max_prefill_chunk_tokens=scenario.max_num_batched_tokens,
                ttft_slo=slo.ttft_s,
                tpot_slo=slo.tpot_s,
            )
            replay = simulate(
                config,
                point.workload,
                hardware,
                _HOST_POOL_RATIO * hardware.kv_tokens,
                behaviour=behaviour,
                profile=profile,
                policy=OWN_POLICIES.get(policy),
                seed=scenario.seed,
            )
            num_hits = replay.num_prefix_hit_tokens
            assert num_hits == 0, f"{policy}: {num_hits} tokens of prompts that differ are prefix hits"
            result.replays[policy] = replay
            result.metrics[policy] = metrics_of(replay, slo)
            on_done(point.setting, policy, result.metrics[policy])
        results.append(result)
    return ScenarioResult(scenario, results)


def _policies(point: PointResult) -> dict[str, Any]:
    return {policy: asdict(metrics) for policy, metrics in point.metrics.items()}
