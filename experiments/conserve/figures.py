"""ConServe's figures 5 to 8, and chats beside a batch on slower and slower devices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from backfill.cli.studies import command_of
from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.scheduling.objectives import server_slo
from backfill.simulation.device import exact_behaviour
from backfill.simulation.policy_study import PolicyStudy, Scenario, Setting
from backfill.simulation.replay import Lengths, Workload
from backfill.simulation.workloads import (
    arrivals_of,
    drawn_conversations,
    lengths_of,
    summarization_lengths,
    within_context,
)
from backfill.workloads.traces import read_trace
from experiments.phases import Phase, phased_arrivals, reshaped
from experiments.workloads import gamma_workload

_HARDWARE = "a100-40g-llama-2-7b"
_SLO = SLO(ttft_s=1.5, tpot_s=0.11)
_REQUEST = Lengths(1024, 128)
# The steps of vLLM 0.4.2 with chunked prefill, on which the paper builds, have about this size at 110 ms.
_MAX_NUM_BATCHED_TOKENS = 1024
# Where the traces of docs/simulation.md are published.
_TRACES = "https://github.com/microsoft/vidur/tree/main/data/processed_traces"
_CONVERSATIONS = "splitwise_conv.csv"
_SUMMARIES = "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"
# The highest rate at which online-only meets the objectives of every request (the paper's R, section 6.1),
# found by running it in steps of 0.2 requests/s for the trace, and of 0.5 for three seeds of figure 6.
_FIG5_RATE_PER_S = 1.0
_FIG6_RATE_PER_S = 4.0
_FIG7_DURATION_S = 600.0
# What the device completes of these chats a second, all at once, without offline requests.
_CHATS_PER_S = 29.0
_CHAT = Lengths(256, 64)
_NUM_CHATS = 150
_NUM_TEXTS = 4000
_DEVICE_LOADS = (0.125, 0.25, 0.4, 0.6, 0.8)


@dataclass(frozen=True, kw_only=True)
class Figure(PolicyStudy):
    """A figure of the paper.

    Attributes:
        policies: policies to run, separated by commas.
        offline_lengths: CSV of prompt and output lengths of the offline work. Default: they are drawn with
            the published file's means and variation.
        exact: a device without noise and host time, and an engine that predicts it perfectly.
    """

    policies: str = "online-only,priority,slo"
    offline_lengths: Path | None = None
    exact: bool = False

    figures: ClassVar[str] = (
        "ttft_p50_s ttft_p99_s itl_p50_s itl_p99_s ttft_attainment itl_attainment attainment goodput_rps "
        "total_tok_s online_tok_s offline_tok_s recomputed_token_share restored_token_share "
        "scheduling_time_share"
    )

    def validate(self) -> None:
        """Raises: ConfigError."""
        super().validate()
        check_trace("offline_lengths", self.offline_lengths, _SUMMARIES)

    @abstractmethod
    def workloads(self, max_len: int, seed: int) -> dict[Setting, Workload]:
        """Raises: ConfigError for a trace that cannot be used."""

    def scenario_of(self, seed: int) -> Scenario:
        hardware = load_hardware_profile(_HARDWARE)
        points = self.workloads(hardware.max_model_len, seed)
        scenario = Scenario(self.title, points, hardware, _SLO, _MAX_NUM_BATCHED_TOKENS, seed)
        return _exact(scenario) if self.exact else scenario

    def _offline(self, max_len: int, seed: int) -> tuple[Lengths, ...]:
        return summarization_lengths(self.offline_lengths, max_len, seed)


@dataclass(frozen=True, kw_only=True)
class Fig5(Figure):
    """Run ConServe's figure 5, and print its figures beside the paper's.

    A real trace with low load from 240 to 620 s, then a burst of three times the rate (section 6.2).

    Attributes:
        online_trace: CSV of a conversation trace with arrival times. Default: it is drawn with the published
            trace's means and variation.
    """

    online_trace: Path | None = None

    scenario: ClassVar[str] = "conserve-fig5"
    title: ClassVar[str] = (
        "ConServe, figure 5: a conversation trace with a threefold burst beside document summaries"
    )
    paper: ClassVar[Mapping[str, Any]] = {
        "online-only": {"total_tok_s": 1999},
        "priority": {"total_tok_s": 4308, "ttft_p99_s": 83.825, "itl_p99_s": 2.523},
        "slo": {"total_tok_s": 3702, "ttft_p99_s": 0.998, "itl_p99_s": 0.101},
    }

    def validate(self) -> None:
        """Raises: ConfigError."""
        super().validate()
        check_trace("online_trace", self.online_trace, _CONVERSATIONS)

    def workloads(self, max_len: int, seed: int) -> dict[Setting, Workload]:
        phases = [Phase(240, 1.0), Phase(380, 0.4), Phase(120, 3.0), Phase(160, 1.0)]
        offline = self._offline(max_len, seed)
        workload = conversation_workload(
            _FIG5_RATE_PER_S, phases, trace=self.online_trace, offline=offline, max_len=max_len, seed=seed
        )
        return {(("rate_per_s", _FIG5_RATE_PER_S),): workload}


@dataclass(frozen=True, kw_only=True)
class Fig6(Figure):
    """Run ConServe's figure 6, and print its figures beside the paper's.

    Full load, no load, and full load again (section 6.3.1).
    """

    scenario: ClassVar[str] = "conserve-fig6"
    title: ClassVar[str] = "ConServe, figure 6: online load ON, OFF and ON again beside document summaries"
    paper: ClassVar[Mapping[str, Any]] = {
        "slo": {"ttft_p99_s": 0.35, "itl_p99_s": 0.09, "off_phase_offline_tok_s": 5868}
    }

    def workloads(self, max_len: int, seed: int) -> dict[Setting, Workload]:
        phases = [Phase(180, _FIG6_RATE_PER_S), Phase(180, 0.0), Phase(180, _FIG6_RATE_PER_S)]
        count = round(sum(phase.duration_s * phase.rate_per_s for phase in phases))
        online = arrivals_of(
            phased_arrivals(count, phases, 1.0, np.random.default_rng(seed)), [_REQUEST] * count
        )
        duration_s = sum(phase.duration_s for phase in phases)
        return {
            (("rate_per_s", _FIG6_RATE_PER_S),): Workload(online, duration_s, self._offline(max_len, seed))
        }


@dataclass(frozen=True, kw_only=True)
class Fig7(Figure):
    """Run ConServe's figure 7, and print its figures beside the paper's.

    Rising burstiness at 2 requests/s, then rising rates at CV 1 (section 6.3.2).
    """

    scenario: ClassVar[str] = "conserve-fig7"
    title: ClassVar[str] = (
        "ConServe, figure 7: growing burstiness and growing rates beside document summaries"
    )
    paper: ClassVar[Mapping[str, Any]] = {
        "slo": {"ttft_p99_over_online_only_at_most": 1.25, "offline_tok_s_over_priority": [1.04, 1.12]},
        "priority": {"ttft_p99_s_at_least": 4.98},
    }
    settings: ClassVar[Sequence[tuple[float, float]]] = (
        *((2.0, cv) for cv in (1.0, 2.0, 4.0, 8.0)),
        *((rate, 1.0) for rate in (0.5, 1.0, 1.5, 2.5)),
    )

    def workloads(self, max_len: int, seed: int) -> dict[Setting, Workload]:
        offline = self._offline(max_len, seed)
        return {
            (("rate_per_s", rate), ("cv", cv)): gamma_workload(
                rate, cv, _FIG7_DURATION_S, _REQUEST, offline=offline, seed=seed
            )
            for rate, cv in self.settings
        }


@dataclass(frozen=True, kw_only=True)
class Fig8(Fig7):
    """Run ConServe's figure 8, and print its figures beside the paper's.

    Figure 7 at 2 requests/s and CV 1, one optimisation after another (section 6.4.1).
    """

    policies: str = "online-only,priority,slo-swap,slo-checkpoint,slo"

    scenario: ClassVar[str] = "conserve-fig8"
    title: ClassVar[str] = (
        "ConServe, figure 8: + preemptive SLO-aware scheduling, + checkpointing, + background prefetch"
    )
    paper: ClassVar[Mapping[str, Any]] = {
        "online-only": {"ttft_p99_s": 0.354},
        "priority": {"ttft_p99_s": 1.346, "offline_tok_s": 3674},
        "slo-swap": {"ttft_p99_s": 0.446, "offline_tok_s": 2951},
        "slo-checkpoint": {"offline_tok_s": 3364},
        "slo": {"ttft_p99_s": 0.316, "offline_tok_s": 3818},
    }
    settings: ClassVar[Sequence[tuple[float, float]]] = ((2.0, 1.0),)


@dataclass(frozen=True, kw_only=True)
class Slow1(Figure):
    """Run chats at five loads beside a batch of texts on an A100, with a server's own objectives (ours)."""

    policies: str = "online-only,slo-no-safepoints,slo"

    scenario: ClassVar[str] = "conserve-slow-1"
    slowness: ClassVar[int] = 1

    def scenario_of(self, seed: int) -> Scenario:
        hardware = load_hardware_profile(_HARDWARE).slowed(self.slowness)
        scenario = Scenario(
            f"Co-serving on an A100 that is {self.slowness} times as slow: chats beside a batch",
            self.workloads(hardware.max_model_len, seed),
            hardware,
            server_slo(SchedulerConfig(policy="slo"), hardware.costs.cost),
            SchedulerConfig().max_num_batched_tokens,
            seed,
        )
        return _exact(scenario) if self.exact else scenario

    def workloads(self, max_len: int, seed: int) -> dict[Setting, Workload]:
        rng = np.random.default_rng(seed)
        offline = lengths_of(rng.integers(256, 513, _NUM_TEXTS), rng.integers(32, 129, _NUM_TEXTS))
        rates = {load: load * _CHATS_PER_S / self.slowness for load in _DEVICE_LOADS}
        return {
            (("load", load),): gamma_workload(rate, 1.0, _NUM_CHATS / rate, _CHAT, offline=offline, seed=seed)
            for load, rate in rates.items()
        }


@dataclass(frozen=True, kw_only=True)
class Slow10(Slow1):
    """Run chats at five loads beside a batch of texts on a device ten times as slow (ours)."""

    scenario: ClassVar[str] = "conserve-slow-10"
    slowness: ClassVar[int] = 10


@dataclass(frozen=True, kw_only=True)
class Slow100(Slow1):
    """Run chats at five loads beside a batch of texts on a device a hundred times as slow (ours)."""

    scenario: ClassVar[str] = "conserve-slow-100"
    slowness: ClassVar[int] = 100


STUDIES: tuple[type[Figure], ...] = (Fig5, Fig6, Fig7, Fig8, Slow1, Slow10, Slow100)
fig5, fig6, fig7, fig8, slow_1, slow_10, slow_100 = (command_of(each, "EXPERIMENTS_") for each in STUDIES)


def _exact(scenario: Scenario) -> Scenario:
    """The same on a device without noise that the engine knows perfectly."""
    costs = scenario.hardware.costs
    return replace(scenario, behaviour=exact_behaviour(costs), profile=costs)


def conversation_workload(
    rate_per_s: float,
    phases: Sequence[Phase],
    *,
    trace: Path | None,
    offline: tuple[Lengths, ...],
    max_len: int,
    seed: int,
) -> Workload:
    """A conversation trace, sampled to a rate and reshaped to phases (section 6.1).

    Args:
        rate_per_s: mean over the duration of the phases; only the ratios of the phases' rates matter.
        max_len: context of the model; longer requests are left out.
    Raises: ConfigError for a trace without times or with too few requests.
    """
    rng = np.random.default_rng(seed)
    duration_s = sum(phase.duration_s for phase in phases)
    count = round(rate_per_s * duration_s)
    if trace is None:
        source = drawn_conversations(4 * count, max_len, rng)
    else:
        source = within_context(trace, read_trace(trace), max_len)
    if source.arrivals_at_s is None:
        raise ConfigError(f"{trace} has no arrival times; a conversation trace needs them.")
    if len(source) < count:
        raise ConfigError(f"{trace} has {len(source)} requests that fit the model; {count} are needed.")
    sample = source.select(np.sort(rng.choice(len(source), count, replace=False)).tolist())
    assert sample.arrivals_at_s is not None
    lengths = lengths_of(sample.input_lens, sample.output_lens)
    return Workload(arrivals_of(reshaped(sample.arrivals_at_s, phases), lengths), duration_s, offline)


def check_trace(field: str, path: Path | None, published_as: str) -> None:
    """Raises: ConfigError that says where such a file is published."""
    if path is not None and not path.exists():
        raise ConfigError(
            f"`{field}` {path} cannot be read: there is no such file. "
            f"The one of docs/simulation.md is {published_as} of {_TRACES}."
        )
