"""ConServe's figures 5 to 8, and chats beside a batch on slower and slower devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cyclopts import App
from rich.console import Console

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.simulate import (
    SeedOptions,
    plot_path,
    policy_names,
    print_done,
    print_result,
    print_scenario,
)
from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.core.slo import SLO
from backfill.costs.hardware import HardwareProfile, load_hardware_profile
from backfill.scheduling.objectives import server_slo
from backfill.simulation.replay import Lengths
from backfill.simulation.scenarios import Point, Scenario
from backfill.simulation.seeds import run_seeds
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
_FIGURES = (
    "ttft_p50_s ttft_p99_s itl_p50_s itl_p99_s ttft_attainment itl_attainment attainment goodput_rps "
    "total_tok_s online_tok_s offline_tok_s recomputed_token_share restored_token_share scheduling_time_share"
)
# Where the traces of docs/simulation.md are published.
_TRACES = "https://github.com/microsoft/vidur/tree/main/data/processed_traces"
_CONVERSATIONS = "splitwise_conv.csv"
_SUMMARIES = "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureOptions:
    """One experiment.

    Attributes:
        policies: policies to run, separated by commas; the paper's by default.
        online_trace: CSV of a conversation trace with arrival times.
        offline_lengths: CSV of prompt and output lengths of the offline work.
        exact: a device without noise and host time, and an engine that predicts it perfectly.
        plot: PNG to write; named as the scenario by default, if matplotlib is installed.
        json: end with one JSON object on a line.
    """

    policies: str | None = None
    online_trace: Path | None = None
    offline_lengths: Path | None = None
    exact: bool = False
    plot: Path | None = None
    json: bool = False

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        _check_trace("online_trace", self.online_trace, _CONVERSATIONS)
        _check_trace("offline_lengths", self.offline_lengths, _SUMMARIES)


def run_figure(scenario: str, options: FigureOptions, seeds: SeedOptions) -> None:
    """Run every policy, and print its figures beside the paper's."""

    def build(seed: int) -> Scenario:
        built = build_scenario(scenario, Inputs(options.online_trace, options.offline_lengths, seed))
        return built.exact() if options.exact else built

    console = Console()
    path = plot_path(options.plot, f"{scenario}.png")
    first = build(seeds.first_seed)
    policies = policy_names(options.policies) or first.policies
    print_scenario(console, first, path)
    with interruptible():
        result = run_seeds(
            build,
            seeds.all(),
            policies,
            lambda seed, setting, policy, metrics: print_done(console, seed, setting, policy, metrics),
        )
    print_result(console, result, _FIGURES, path)
    if options.json:
        print(json.dumps(result.as_json()))


def _check_trace(field: str, path: Path | None, published_as: str) -> None:
    """Raises: ConfigError that says where such a file is published."""
    if path is not None and not path.exists():
        raise ConfigError(
            f"`{field}` {path} cannot be read: there is no such file. "
            f"The one of docs/simulation.md is {published_as} of {_TRACES}."
        )


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


def _of_paper(
    name: str,
    title: str,
    points: tuple[Point, ...],
    paper: Mapping[str, Any],
    hardware: HardwareProfile,
    policies: tuple[str, ...] = ("online-only", "priority", "slo"),
) -> Scenario:
    """With the paper's objectives."""
    return Scenario(name, title, points, paper, hardware, policies, _SLO, _MAX_NUM_BATCHED_TOKENS)


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
    return _of_paper(
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
    return _of_paper(
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
    return _of_paper(
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
    return _of_paper(
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


def _app(name: str) -> App:
    """The command of a scenario, without the paper's name. Only figure 5 has a trace of online requests."""
    scenario = name if name in _SCENARIOS else f"conserve-{name}"

    def run(options: FigureOptions, seeds: SeedOptions) -> None:
        run_figure(scenario, options, seeds)

    run.__doc__ = (
        f"Run {scenario}, and print its figures beside the paper's.\n\n"
        "Without traces the workloads are drawn with the published traces' means and variation."
    )
    run.__annotations__ = {"options": FigureOptions, "seeds": SeedOptions}
    run.__name__ = name
    trace = "online_trace " if name == "fig5" else ""
    return command(
        run,
        {
            "Points": f"policies {trace}offline_lengths exact",
            "Runs": "seeds first_seed",
            "Output": "plot json",
        },
        prefix=f"EXPERIMENTS_CONSERVE_{name.upper().replace('-', '_')}_",
    )


fig5_app, fig6_app, fig7_app, fig8_app = map(_app, ("fig5", "fig6", "fig7", "fig8"))
slow_1_app, slow_10_app, slow_100_app = map(_app, ("slow-1", "slow-10", "slow-100"))
