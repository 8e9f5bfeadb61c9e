"""The experiments of ConServe's evaluation, on simulated devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.hardware import HardwareProfile, load_hardware_profile
from backfill.costs.profile import CostProfile
from backfill.scheduling.objectives import server_slo
from backfill.scheduling.policies.bros import BrosPolicy
from backfill.scheduling.policies.create import PolicyFactory
from backfill.scheduling.policy import Policy
from backfill.scheduling.prediction import StepPredictor
from backfill.simulation.device import exact_behaviour, measured_profile, typical_behaviour
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.replay import Lengths, ReplayResult, Workload, simulate
from backfill.simulation.workloads import (
    conversation_workload,
    gamma_workload,
    phased_workload,
    summarization_lengths,
)
from backfill.workloads.arrivals import Phase

_HARDWARE = "a100-40g-llama-2-7b"
_SLO = SLO(ttft_s=1.5, tpot_s=0.11)
_REQUEST = Lengths(1024, 128)
_NUM_OFFLINE = 4000
# The steps of vLLM 0.4.2 with chunked prefill, on which the paper builds, have about this size at 110 ms.
_MAX_NUM_BATCHED_TOKENS = 1024
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
    """One experiment of the paper.

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
    policies: tuple[str, ...] = ("online-only", "priority", "slo")
    slo: SLO = _SLO
    max_num_batched_tokens: int = _MAX_NUM_BATCHED_TOKENS
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


@dataclass(frozen=True, slots=True)
class Inputs:
    """Traces to use; without one, a workload is drawn with the published trace's means and variation.

    Attributes:
        seed: of the workload, and of the device's noise.
    """

    conversations: Path | None = None
    summaries: Path | None = None
    seed: int = 0


def scenario_names() -> list[str]:
    return sorted(_SCENARIOS)


def build_scenario(name: str, inputs: Inputs) -> Scenario:
    """Raises: ConfigError for a name that does not exist or a trace that cannot be used."""
    if name not in _SCENARIOS:
        raise ConfigError(f"There is no scenario {name!r}; there are {', '.join(scenario_names())}.")
    hardware = load_hardware_profile(_HARDWARE)
    offline = summarization_lengths(
        inputs.summaries, count=_NUM_OFFLINE, max_len=hardware.max_model_len, seed=inputs.seed
    )
    return replace(_SCENARIOS[name](inputs, hardware, offline), seed=inputs.seed)


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


def _fig5(inputs: Inputs, hardware: HardwareProfile, offline: tuple[Lengths, ...]) -> Scenario:
    """Section 6.2: a real trace with low load from 240 to 620 s, then a burst of three times the rate."""
    phases = [Phase(240, 1.0), Phase(380, 0.4), Phase(120, 3.0), Phase(160, 1.0)]
    workload = conversation_workload(
        _FIG5_RATE_PER_S,
        phases,
        trace=inputs.conversations,
        offline=offline,
        max_len=hardware.max_model_len,
        seed=inputs.seed,
    )
    return Scenario(
        name="conserve-fig5",
        title="ConServe, figure 5: a conversation trace with a threefold burst beside document summaries",
        points=(Point({"rate_per_s": _FIG5_RATE_PER_S}, workload),),
        paper={
            "online-only": {"total_tok_s": 1999},
            "priority": {"total_tok_s": 4308, "ttft_p99_s": 83.825, "itl_p99_s": 2.523},
            "slo": {"total_tok_s": 3702, "ttft_p99_s": 0.998, "itl_p99_s": 0.101},
        },
        hardware=hardware,
    )


def _fig6(inputs: Inputs, hardware: HardwareProfile, offline: tuple[Lengths, ...]) -> Scenario:
    """Section 6.3.1: full load, no load, and full load again."""
    phases = [Phase(180, _FIG6_RATE_PER_S), Phase(180, 0.0), Phase(180, _FIG6_RATE_PER_S)]
    workload = phased_workload(phases, _REQUEST, offline=offline, seed=inputs.seed)
    return Scenario(
        name="conserve-fig6",
        title="ConServe, figure 6: online load ON, OFF and ON again beside document summaries",
        points=(Point({"rate_per_s": _FIG6_RATE_PER_S}, workload),),
        paper={"slo": {"ttft_p99_s": 0.35, "itl_p99_s": 0.09, "off_phase_offline_tok_s": 5868}},
        hardware=hardware,
    )


def _fig7(inputs: Inputs, hardware: HardwareProfile, offline: tuple[Lengths, ...]) -> Scenario:
    """Section 6.3.2: rising burstiness at 2 requests/s, then rising rates at CV 1."""
    settings = [(2.0, cv) for cv in (1.0, 2.0, 4.0, 8.0)] + [(rate, 1.0) for rate in (0.5, 1.0, 1.5, 2.5)]
    points = tuple(
        Point(
            {"rate_per_s": rate, "cv": cv},
            gamma_workload(rate, cv, _FIG7_DURATION_S, _REQUEST, offline=offline, seed=inputs.seed),
        )
        for rate, cv in settings
    )
    return Scenario(
        name="conserve-fig7",
        title="ConServe, figure 7: growing burstiness and growing rates beside document summaries",
        points=points,
        paper={
            "slo": {"ttft_p99_over_online_only_at_most": 1.25, "offline_tok_s_over_priority": [1.04, 1.12]},
            "priority": {"ttft_p99_s_at_least": 4.98},
        },
        hardware=hardware,
    )


def _fig8(inputs: Inputs, hardware: HardwareProfile, offline: tuple[Lengths, ...]) -> Scenario:
    """Section 6.4.1: figure 7 at 2 requests/s and CV 1, one optimisation after another."""
    workload = gamma_workload(2.0, 1.0, _FIG7_DURATION_S, _REQUEST, offline=offline, seed=inputs.seed)
    return Scenario(
        name="conserve-fig8",
        title="ConServe, figure 8: + preemptive SLO-aware scheduling, + checkpointing, + background prefetch",
        points=(Point({"rate_per_s": 2.0, "cv": 1.0}, workload),),
        policies=("online-only", "priority", "slo-swap", "slo-checkpoint", "slo"),
        paper={
            "online-only": {"ttft_p99_s": 0.354},
            "priority": {"ttft_p99_s": 1.346, "offline_tok_s": 3674},
            "slo-swap": {"ttft_p99_s": 0.446, "offline_tok_s": 2951},
            "slo-checkpoint": {"offline_tok_s": 3364},
            "slo": {"ttft_p99_s": 0.316, "offline_tok_s": 3818},
        },
        hardware=hardware,
    )


def _device(inputs: Inputs, hardware: HardwareProfile, _: tuple[Lengths, ...], slowness: int) -> Scenario:
    """Chats at five loads beside a batch of texts, with the objectives that a server chooses there."""
    hardware = hardware.slowed(slowness)
    rng = np.random.default_rng(inputs.seed)
    offline = tuple(
        Lengths(int(num_in), int(num_out))
        for num_in, num_out in zip(
            rng.integers(256, 513, _NUM_OFFLINE), rng.integers(32, 129, _NUM_OFFLINE), strict=True
        )
    )
    points = []
    for load in _DEVICE_LOADS:
        rate = load * _CHATS_PER_S / slowness
        workload = gamma_workload(rate, 1.0, _NUM_CHATS / rate, _CHAT, offline=offline, seed=inputs.seed)
        points.append(Point({"load": load}, workload))
    return Scenario(
        name=_device_name(slowness),
        title=f"Co-serving on an A100 that is {slowness} times as slow: chats beside a batch",
        points=tuple(points),
        paper={},
        hardware=hardware,
        policies=("online-only", "slo-no-safepoints", "slo"),
        slo=server_slo(SchedulerConfig(policy="slo"), hardware.costs.cost),
        max_num_batched_tokens=SchedulerConfig().max_num_batched_tokens,
    )


def _device_name(slowness: int) -> str:
    return f"slow-{slowness}"


# What the device completes of these chats a second, all at once, without offline requests.
_CHATS_PER_S = 29.0
_CHAT = Lengths(256, 64)
_NUM_CHATS = 150
_DEVICE_LOADS = (0.125, 0.25, 0.4, 0.6, 0.8)

# The highest rate at which online-only meets the objectives of every request (the paper's R, section 6.1),
# found by running it in steps of 0.2 requests/s for the trace, and of 0.5 for three seeds of figure 6.
_FIG5_RATE_PER_S = 1.0
_FIG6_RATE_PER_S = 4.0
_FIG7_DURATION_S = 600.0

_SCENARIOS: dict[str, Callable[[Inputs, HardwareProfile, tuple[Lengths, ...]], Scenario]] = {
    "conserve-fig5": _fig5,
    "conserve-fig6": _fig6,
    "conserve-fig7": _fig7,
    "conserve-fig8": _fig8,
    **{_device_name(slowness): partial(_device, slowness=slowness) for slowness in (1, 10, 100)},
}
