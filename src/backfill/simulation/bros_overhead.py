"""BROS's evaluation of its scheduler's own time (figure 14): decisions of this machine, simulated steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backfill.core.errors import ConfigError
from backfill.core.request import ServiceClass
from backfill.costs.hardware import load_hardware_profile
from backfill.engine.engine import Engine
from backfill.simulation.bros import BrosExperiment, Setting, run_points
from backfill.simulation.replay import ReplayResult
from backfill.simulation.sweep import Simulation

OVERHEAD_MODELS = ("opt-13b", "opt-30b")  # section 7.4.2
OVERHEAD_RATES_PER_S = (5.0, 10.0)
OVERHEAD_DURATION_S = 60.0
OVERHEAD_POLICIES = ("bros", "bros-bidirectional")
# Least and most share of an iteration that scheduling takes.
PAPER_SHARES: Mapping[str, tuple[float, float]] = {"opt-13b": (0.0912, 0.0952), "opt-30b": (0.0756, 0.0842)}
# Steps are grouped by the requests that hold blocks: up to the first of these, up to the second, ...
GROUPS = (32, 64, 128, 256)

Floats = NDArray[np.float64]


@dataclass(slots=True)
class StepTimes:
    """Observes the steps of a replay that took time and began before ``duration_s``.

    Attributes:
        num_running: requests that held blocks after each step.
        decision_s: seconds of this machine in which each step was planned and committed.
        step_s: seconds of the simulated device.
    """

    duration_s: float
    num_running: list[int] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    _scheduling_s: float = 0.0

    def on_step(self, engine: Engine, began_s: float, ended_s: float) -> None:
        """See ``StepObserver``."""
        decision_s = engine.scheduling_s - self._scheduling_s
        self._scheduling_s = engine.scheduling_s
        if began_s < ended_s and began_s < self.duration_s:
            requests = engine.scheduler.requests
            self.num_running.append(len(requests.running) + len(requests.restoring))
            self.decision_s.append(decision_s)
            self.step_s.append(ended_s - began_s)


@dataclass(frozen=True, slots=True)
class OverheadRun:
    """Steps of one simulation, with the median time of each step's decision over the repetitions.

    Attributes:
        copy_s: simulated seconds in which the link between device and host was busy.
    """

    num_running: NDArray[np.int64]
    decision_s: Floats
    step_s: Floats
    copy_s: float


def run_repeatedly(simulation: Simulation, *, repeats: int) -> OverheadRun:
    """Run the same simulation several times. Its steps are the same each time; what decisions take is not.

    Raises: ConfigError if no step begins within the trace.
    """
    duration_s = simulation.workload.duration_s
    runs = []
    for _ in range(repeats):
        times = StepTimes(duration_s)
        result = simulation.replay(times)
        if not times.step_s:
            raise ConfigError(f"`duration`: no step begins within {duration_s:g} s.")
        runs.append(times)
    assert all(times.step_s == runs[0].step_s for times in runs), "a simulation is not deterministic"
    return OverheadRun(
        num_running=np.array(runs[0].num_running),
        decision_s=np.median([times.decision_s for times in runs], axis=0),
        step_s=np.array(runs[0].step_s),
        copy_s=_copy_s(simulation, result),
    )


def _copy_s(simulation: Simulation, result: ReplayResult) -> float:
    hardware = load_hardware_profile(simulation.hardware)
    copies = hardware.costs.copies
    if copies is None:
        return 0.0
    counters = [result.counters[each] for each in ServiceClass]
    num_out = sum(each.num_checkpointed_tokens for each in counters)
    num_back = sum(each.num_restored_tokens for each in counters)
    token_s = num_out / copies.to_host_bytes_per_s + num_back / copies.to_device_bytes_per_s
    return token_s * hardware.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Overhead:
    """What scheduling takes of the steps.

    Attributes:
        share: decisions over decisions and steps, of all iterations together.
        decision_ms, step_ms: medians.
        copy_share: the link's busy time over that of the steps; None for a part of the steps.
    """

    num_steps: int
    share: float
    decision_ms: float
    step_ms: float
    copy_share: float | None = None

    @classmethod
    def of(cls, decision_s: Floats, step_s: Floats, copy_s: float | None = None) -> Overhead:
        """At least one step."""
        total_s = float(step_s.sum())
        return cls(
            num_steps=len(step_s),
            share=float(decision_s.sum()) / (float(decision_s.sum()) + total_s),
            decision_ms=1000 * float(np.median(decision_s)),
            step_ms=1000 * float(np.median(step_s)),
            copy_share=None if copy_s is None else copy_s / total_s,
        )


@dataclass(frozen=True, slots=True)
class OverheadPoint:
    """Policies at one setting: all steps of each, and those of each group of ``GROUPS`` that has any."""

    setting: Setting
    policies: dict[str, Overhead] = field(default_factory=dict)
    groups: dict[str, dict[int, Overhead]] = field(default_factory=dict)


@dataclass(slots=True)
class OverheadResult:
    experiment: BrosExperiment
    repeats: int
    points: list[OverheadPoint]

    def of_model(self, model: str) -> list[OverheadPoint]:
        return [point for point in self.points if point.setting.model == model]

    def as_json(self) -> dict[str, Any]:
        def content(overhead: Overhead) -> dict[str, Any]:
            return {name: value for name, value in asdict(overhead).items() if value is not None}

        return {
            "scenario": "bros-overhead",
            "duration_s": self.experiment.duration_s,
            "num_seeds": self.experiment.num_seeds,
            "repeats": self.repeats,
            "points": [
                {
                    **point.setting._asdict(),
                    "policies": {
                        policy: {
                            **content(overhead),
                            "by_running": {
                                str(most): content(each) for most, each in point.groups[policy].items()
                            },
                        }
                        for policy, overhead in point.policies.items()
                    },
                }
                for point in self.points
            ],
            "paper": {model: {"share": list(shares)} for model, shares in PAPER_SHARES.items()},
        }


def run_bros_overhead(
    experiment: BrosExperiment,
    repeats: int,
    on_done: Callable[[Setting, str], None] = lambda *_: None,
) -> OverheadResult:
    """Run every policy at every point, ``repeats`` times, in this process. Raises: ConfigError."""
    if repeats < 1:
        raise ConfigError(f"`repeats` must be at least 1, got {repeats}.")
    points: dict[Setting, OverheadPoint] = {}

    def receive(setting: Setting, policy: str, runs: Sequence[OverheadRun]) -> None:
        point = points.setdefault(setting, OverheadPoint(setting))
        num_running = np.concatenate([run.num_running for run in runs])
        decision_s = np.concatenate([run.decision_s for run in runs])
        step_s = np.concatenate([run.step_s for run in runs])
        point.policies[policy] = Overhead.of(decision_s, step_s, sum(run.copy_s for run in runs))
        group = np.searchsorted(GROUPS, num_running)  # the first that is at least as many
        point.groups[policy] = {
            most: Overhead.of(decision_s[group == index], step_s[group == index])
            for index, most in enumerate(GROUPS)
            if (group == index).any()
        }
        on_done(setting, policy)

    run_points(experiment, partial(run_repeatedly, repeats=repeats), 1, receive)
    return OverheadResult(experiment, repeats, list(points.values()))
