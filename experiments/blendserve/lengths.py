"""What estimates of output lengths are worth to the order ``blend``: a pool in which only means are known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import numpy as np
from rich.console import Console

from backfill.blending.estimates import Lengths, Moments, OutputEstimator, OutputHistory, output_moments
from backfill.blending.resources import Floats
from backfill.blending.tree import PrefixTree
from backfill.cli.studies import command_of
from backfill.core.errors import ConfigError
from backfill.core.options import bounded
from backfill.core.request import RequestId, ServiceClass
from backfill.costs.hardware import HardwareProfile
from backfill.simulation.study import MOST_REQUESTS, Outcomes, Run, Study, mean_figures
from backfill.simulation.tables import print_rows
from experiments.blendserve.groups import LENGTHS, GroupedPool, GroupSpec, draw_groups
from experiments.blendserve.optimum import PoolWork, WorkModel
from experiments.blendserve.overlap import InterferenceName, OverlappedCostModel
from experiments.blendserve.pool import HARDWARE, PoolLoop, device, resource_model, step_tokens

EstimateName = Literal["exact", "moments", "point", "pool-mean"]
ESTIMATES: tuple[EstimateName, ...] = get_args(EstimateName)
REFERENCE: EstimateName = "moments"
CHECKPOINTS = (0.0, 0.02, 0.1, 0.3, 0.6)
"""Shares of the pool's requests that have ended when predictions are compared with the truth."""


def point_estimate(tree: PrefixTree, lengths: Lengths, history: OutputHistory) -> Moments:
    """The paper's estimate (section 3.2): the mean of what has ended in the subtree, for all others."""
    ended = lengths._replace(so_far=np.zeros_like(lengths.so_far))
    mean = output_moments(tree, ended, history).mean
    return Moments(mean, mean * mean)


def pool_mean(tree: PrefixTree, lengths: Lengths, history: OutputHistory) -> Moments:
    """The mean of all outputs that have ended, whatever the prompt, as if every output had that length."""
    return point_estimate(tree, lengths._replace(finished=np.zeros_like(lengths.finished)), history)


_ESTIMATORS: Mapping[EstimateName, OutputEstimator] = {
    "exact": output_moments,
    "moments": output_moments,
    "point": point_estimate,
    "pool-mean": pool_mean,
}


class LengthsResult(NamedTuple):
    """What a run measured.

    Attributes:
        of_optimum: throughput over the achievable optimum (section 5.2).
        tokens_per_s: prompt and output tokens.
        density: of the pool, by true lengths and the device's rates.
        errors: at each of ``CHECKPOINTS``, predicted over true density of what has not ended, less 1.
    """

    seconds: float
    of_optimum: float
    tokens_per_s: float
    density: float
    errors: tuple[float, ...]
    num_steps: int
    num_preemptions: int
    recomputed_share: float


class _ComparedLoop(PoolLoop):
    """See ``PoolLoop``; compares the pool's density with the true one at each of ``CHECKPOINTS``."""

    def __init__(
        self,
        pool: GroupedPool,
        estimate: EstimateName,
        hardware: HardwareProfile,
        cost: OverlappedCostModel,
        *,
        density: float,
        seed: int,
    ) -> None:
        requests = pool.requests
        if estimate == "exact":
            requests = [
                replace(each, known_output_tokens=output)
                for each, output in zip(pool.requests, pool.outputs, strict=True)
            ]
        super().__init__(
            requests,
            pool.outputs,
            "blend",
            hardware,
            cost,
            max_step_tokens=step_tokens(cost, density, hardware.kv_tokens),
            seed=seed,
            estimate=_ESTIMATORS[estimate],
        )
        self._costs = pool
        self._left = np.array([pool.compute_s.sum(), pool.memory_s.sum()])
        self._num_ended = 0
        self.errors: list[float] = []
        self._compare()

    def _finish(self, request_id: RequestId) -> None:
        super()._finish(request_id)
        number = int(request_id)
        self._left -= (self._costs.compute_s[number], self._costs.memory_s[number])
        self._num_ended += 1
        self._compare()

    def _compare(self) -> None:
        share = self._num_ended / len(self._costs.outputs)
        if len(self.errors) < len(CHECKPOINTS) and share >= CHECKPOINTS[len(self.errors)]:
            self._feed.note_progress()
            compute_s, memory_s = self._left - self._done_in_flight()
            self.errors.append(float(self._pool.density * memory_s / compute_s - 1.0))

    def _done_in_flight(self) -> Floats:
        """Seconds of compute and of memory that requests in flight have done."""
        resources, done = self._pool.resources, np.zeros(2)
        for request in self._feed.in_flight.values():
            number, num_output_tokens = int(request.request_id), len(request.output_token_ids)
            if num_output_tokens:
                left_s = resources.token_s * (self._costs.outputs[number] - num_output_tokens)
                memory_s = resources.memory_s(request.num_prompt_tokens, num_output_tokens)
                done += (self._costs.compute_s[number] - left_s, memory_s)
        return done


def run_lengths(spec: GroupSpec, estimate: EstimateName, interference: InterferenceName) -> LengthsResult:
    """Draw the pool, and run it in the order ``blend``. The same for the same spec. Raises: ConfigError."""
    hardware, cost = device(interference)
    pool = _drawn(spec, cost)
    density = float(pool.compute_s.sum() / pool.memory_s.sum())
    loop = _ComparedLoop(pool, estimate, hardware, cost, density=density, seed=spec.seed)
    loop.run()
    model = WorkModel.of(cost)
    num_tokens = sum(pool.outputs) + sum(len(each.prompt_token_ids) for each in pool.requests)
    counters = loop.engine.scheduler.counters[ServiceClass.OFFLINE]
    seconds = loop.clock.now_s()
    return LengthsResult(
        seconds=seconds,
        of_optimum=model.least_s(PoolWork(pool.parts, model).total) / seconds,
        tokens_per_s=num_tokens / seconds,
        density=density,
        errors=tuple(loop.errors),
        num_steps=len(loop.compute_s),
        num_preemptions=counters.num_preemptions,
        recomputed_share=counters.num_recomputed_tokens / counters.num_computed_tokens,
    )


@lru_cache(maxsize=1)
def _drawn(spec: GroupSpec, cost: OverlappedCostModel) -> GroupedPool:
    """Kept for the next estimate on the same pool."""
    return draw_groups(spec, resource_model(cost))


@dataclass(frozen=True, slots=True)
class LengthsFigures:
    """One estimate, means over the seeds; see ``LengthsResult``.

    Attributes:
        errors: means of the absolute errors.
    """

    seconds: float
    of_optimum: float
    tokens_per_s: float
    errors: tuple[float, ...]
    num_preemptions: float
    recomputed_share: float

    @classmethod
    def mean(cls, results: Sequence[LengthsResult]) -> LengthsFigures:
        errors = zip(*(each.errors for each in results), strict=True)
        return cls(
            **mean_figures(set(cls.__slots__) - {"errors"}, results),
            errors=tuple(fmean(map(abs, of_seeds)) for of_seeds in errors),
        )


class LengthsPoint(NamedTuple):
    """Figures of each estimate on pools of some lengths."""

    lengths: str
    estimates: dict[EstimateName, LengthsFigures]


@dataclass(frozen=True, kw_only=True)
class LengthsStudy(Study[LengthsPoint]):
    """Run pools in the order `blend` while output lengths are known, estimated, or taken for one mean.

    Prints throughput over the achievable optimum, and by how much the predicted density of what is left is
    off as the pool empties.

    Attributes:
        lengths: lengths of the requests, separated by commas: sharegpt, lmsys. Each has a pool.
        source_lengths: CSV of prompt and output lengths, instead of those drawn for sharegpt.
        estimates: estimates of output lengths, separated by commas: exact, moments, point, pool-mean.
        density: compute density of each pool.
        requests: requests of a pool.
        interference: how compute and memory traffic of a step disturb each other: blendserve, nanoflow,
            ideal (not at all) or sequential (they do not overlap).
    """

    lengths: str = ",".join(LENGTHS)
    source_lengths: Path | None = None
    estimates: str = ",".join(ESTIMATES)
    density: float = bounded(1.0, above=0)
    requests: int = bounded(10_000, least=1, most=MOST_REQUESTS)
    interference: InterferenceName = "blendserve"

    scenario: ClassVar[str] = "blendserve-lengths"
    title: ClassVar[str] = "Output lengths and the order blend"
    writes: ClassVar[str] = "json"
    tells_progress: ClassVar[bool] = True

    def validate(self) -> None:
        """Raises: ConfigError."""
        super().validate()
        if self.source_lengths is not None and "sharegpt" not in self.names("lengths", LENGTHS):
            raise ConfigError("`source_lengths` are those of sharegpt, which `lengths` does not name.")

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Estimates of one pool after another, so that a process draws few pools twice."""
        found = []
        for name, seed in itertools.product(self.names("lengths", LENGTHS), seeds):
            path = self.source_lengths if name == "sharegpt" else None
            pool = GroupSpec(name, self.density, self.requests, seed, path)
            found += [
                Run(name, each, seed, partial(run_lengths, pool, each, self.interference))
                for each in self.names("estimates", ESTIMATES)
            ]
        return found

    def point(self, setting: str, outcomes: Outcomes) -> LengthsPoint:
        of_names = cast("Mapping[EstimateName, Sequence[LengthsResult]]", outcomes)
        return LengthsPoint(setting, {name: LengthsFigures.mean(each) for name, each in of_names.items()})

    def describe(self, run: Run, outcome: LengthsResult) -> str:
        return (
            f"{run.point}, seed {run.seed}: {run.system} done, {outcome.num_steps} steps, "
            f"{outcome.seconds:.0f} s"
        )

    def report(self, console: Console, points: Sequence[LengthsPoint]) -> None:
        for name, estimates in points:
            _print_pool(console, f"{name}, density {self.density:g}", estimates)

    def as_json(self, points: Sequence[LengthsPoint]) -> dict[str, Any]:
        return {
            "hardware": HARDWARE,
            "density": self.density,
            "num_requests": self.requests,
            "interference": self.interference,
            "checkpoints": CHECKPOINTS,
            "pools": {
                name: {estimate: asdict(figures) for estimate, figures in estimates.items()}
                for name, estimates in points
            },
        }


app = command_of(LengthsStudy, "EXPERIMENTS_")

_FIGURES = {
    "tokens_per_s": ("tokens/s", ".0f"),
    "of_optimum": ("/ achievable optimum", ".3f"),
    "speedup": (f"/ {REFERENCE}", ".3f"),
    "num_preemptions": ("preempted", ".0f"),
} | {f"error {share:g}": (f"density error at {share:.0%}", ".2f") for share in CHECKPOINTS}


def _print_pool(console: Console, title: str, estimates: dict[EstimateName, LengthsFigures]) -> None:
    reference = estimates.get(REFERENCE)
    columns: dict[str, dict[str, object]] = {
        estimate: {
            **asdict(figures),
            "speedup": None if reference is None else figures.tokens_per_s / reference.tokens_per_s,
            **{f"error {share:g}": error for share, error in zip(CHECKPOINTS, figures.errors, strict=True)},
        }
        for estimate, figures in estimates.items()
    }
    print_rows(console, title, _FIGURES, columns)
    console.print(
        "Density errors: of the density predicted for what has not ended, relative, when so many requests "
        "have ended."
    )
