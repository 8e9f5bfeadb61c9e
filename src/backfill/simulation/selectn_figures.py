"""The points of Select-N's figures 9 to 12 and 14."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backfill.core.errors import ConfigError
from backfill.offloading.record import Phase
from backfill.simulation.offloaded_model import SHAPES, PhaseLoad
from backfill.simulation.selectn import BatchUnit, IntervalUnit, LoadUnit, MaxLengthUnit, Unit, run_units
from backfill.simulation.selectn_baselines import FLEXGEN
from backfill.simulation.selectn_contention import ContentionUnit
from backfill.simulation.selectn_result import DEEPSPEED, RESIDENT, SelectnResult
from backfill.simulation.sweep import check_names

PHASES: tuple[Phase, ...] = ("prefill", "decode")
LENGTH = 64  # sections 5.4 and 5.5; 5.2 does not say
MEMORY_LENGTH = 256  # of figure 2; section 5.3 does not say
SLO_BATCHES = {"prefill": 32, "decode": 128}  # section 5.2
INTERVAL_BATCHES = {"prefill": 16, "decode": 128}  # section 5.4
# Objectives of a decode step with which OPT-13B fits the device at some interval.
BATCH_SLOS_S = (0.35, 0.45, 0.55, 0.7)
# The paper's pair and objective; the same with one that an interval meets; and a pair that fits.
PAIRS = (
    (("opt-13b", "llama-13b"), 0.1),
    (("opt-13b", "llama-13b"), 1.2),
    (("opt-6.7b", "qwen2-beta-7b"), 0.1),
)
LEAST_STEPS = 100  # for a P99
_MOST_STEPS = 100_000
_MOST_BATCH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectnExperiment:
    """One figure.

    Attributes:
        models: names of ``SHAPES``.
        batches: requests of a step.
        slacks: of objectives over the P99 without offloading.
        num_steps: simulated for each interval.
    """

    scenario: str
    models: tuple[str, ...]
    batches: tuple[int, ...]
    slacks: tuple[float, ...]
    num_steps: int = 1000

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_names("models", self.models, SHAPES)
        for batch in self.batches:
            if not 1 <= batch <= _MOST_BATCH:
                raise ConfigError(f"`batches` must be 1 to {_MOST_BATCH} requests, got {batch}.")
        for slack in self.slacks:
            if not 0.0 <= slack < float("inf"):
                raise ConfigError(f"`slacks` must be finite and at least 0, got {slack:g}.")
        if not LEAST_STEPS <= self.num_steps <= _MOST_STEPS:
            raise ConfigError(f"`steps` must be {LEAST_STEPS} to {_MOST_STEPS}, got {self.num_steps}.")

    def units(self) -> Sequence[Unit]:
        """Parts that run independently."""
        match self.scenario:
            case "selectn-slo":
                return [
                    LoadUnit(
                        model,
                        PhaseLoad(phase, SLO_BATCHES[phase], LENGTH),
                        self.slacks,
                        (DEEPSPEED, RESIDENT),
                        self.num_steps,
                    )
                    for model in self.models
                    for phase in PHASES
                ]
            case "selectn-memory":
                loads: list[Unit] = [
                    LoadUnit(
                        model,
                        PhaseLoad(phase, batch, MEMORY_LENGTH),
                        self.slacks,
                        tuple(FLEXGEN),
                        self.num_steps,
                        x_is_batch=True,
                    )
                    for model in self.models
                    for phase in PHASES
                    for batch in self.batches
                ]
                return loads + [
                    BatchUnit(model, MEMORY_LENGTH, slo_s, tuple(FLEXGEN), self.num_steps)
                    for model in self.models
                    for slo_s in BATCH_SLOS_S
                ]
            case "selectn-interval":
                return [
                    IntervalUnit(
                        model, PhaseLoad(phase, INTERVAL_BATCHES[phase], LENGTH), slack, self.num_steps
                    )
                    for model in self.models
                    for slack in self.slacks
                    for phase in PHASES
                ]
            case "selectn-contention":
                return [
                    ContentionUnit(pair, PhaseLoad("decode", batch, LENGTH), slo_s, self.num_steps)
                    for pair, slo_s in PAIRS
                    for batch in self.batches
                ]
            case "selectn-maxlen":
                return [MaxLengthUnit(model) for model in self.models]
        raise ValueError(f"there is no figure {self.scenario!r}")


# As in the paper. Section 5.3 states no objective; that of figure 5, with the same systems, is the time
# without offloading.
FIGURES = {
    experiment.scenario: experiment
    for experiment in (
        SelectnExperiment(
            scenario="selectn-slo",
            models=("opt-6.7b", "qwen2-beta-7b"),
            batches=(),
            slacks=(0.1, 0.2, 0.3, 0.4, 0.5),
        ),
        SelectnExperiment(
            scenario="selectn-memory", models=("opt-13b",), batches=(4, 8, 16, 32), slacks=(0.0,)
        ),
        SelectnExperiment(scenario="selectn-interval", models=("opt-6.7b",), batches=(), slacks=(0.5,)),
        SelectnExperiment(scenario="selectn-contention", models=(), batches=(8, 16, 32), slacks=()),
        SelectnExperiment(scenario="selectn-maxlen", models=("qwen2-beta-7b",), batches=(), slacks=()),
    )
}


def run_selectn(experiment: SelectnExperiment, num_processes: int = 1) -> SelectnResult:
    """Figures do not depend on the number of processes."""
    return run_units(experiment.scenario, experiment.units(), num_processes)
