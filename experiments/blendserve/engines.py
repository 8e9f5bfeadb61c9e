"""Several engines that claim parts of one batch, whose parts have one kind of lines or all kinds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import numpy as np
from rich.console import Console

from backfill.blending.split import split_requests
from backfill.cli.studies import command_of
from backfill.core.errors import ConfigError
from backfill.core.options import bounded
from backfill.core.request import RequestId
from backfill.costs.hardware import HardwareProfile
from backfill.jobs.results import MAX_OBSERVED
from backfill.preparation.division import num_parts_of, spread
from backfill.simulation.study import MOST_REQUESTS, Outcomes, Run, Study, mean_figures
from backfill.simulation.tables import print_rows
from experiments.blendserve.groups import LENGTHS, GroupedPool, GroupSpec, draw_groups
from experiments.blendserve.overlap import InterferenceName, OverlappedCostModel
from experiments.blendserve.pool import HARDWARE, PoolLoop, device, resource_model, step_tokens

SplitName = Literal["file", "ends", "pairs", "lengths"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
REFERENCE: SplitName = "ends"


class EnginesResult(NamedTuple):
    """What a run measured.

    Attributes:
        seconds: until the last engine has no more lines.
        mean_s: until an engine has none, in the mean.
        least_density, most_density: of a part, by true lengths.
    """

    seconds: float
    mean_s: float
    least_density: float
    most_density: float


class _Claimed(NamedTuple):
    """Lines that an engine claimed at once."""

    numbers: Sequence[int]
    unfinished: set[int]


class _Engine(PoolLoop):
    """See ``PoolLoop``; its pool has the lines that it claimed."""

    def __init__(
        self,
        pool: GroupedPool,
        hardware: HardwareProfile,
        cost: OverlappedCostModel,
        seed: int,
        density: float,
    ) -> None:
        max_step_tokens = step_tokens(cost, density, hardware.kv_tokens)
        super().__init__(
            pool.requests,
            pool.outputs,
            "blend",
            hardware,
            cost,
            max_step_tokens=max_step_tokens,
            seed=seed,
            waiting=(),
        )
        self._requests = pool.requests
        self.claims: list[_Claimed] = []
        self.ended: list[int] = []  # lines of claims that have ended

    @property
    def num_unfinished(self) -> int:
        return sum(len(each.unfinished) for each in self.claims)

    @property
    def num_held(self) -> int:
        return sum(len(each.numbers) for each in self.claims)

    def claim(self, numbers: Sequence[int], observed: Sequence[int] = ()) -> None:
        """Args: observed: lines of others, whose lengths are known."""
        self.claims.append(_Claimed(numbers, set(numbers)))
        claimed = [self._requests[number] for number in sorted(numbers)]
        ended = [
            replace(
                self._requests[number],
                request_id=len(self._outputs) + number,
                observed_output_tokens=self._outputs[number],
            )
            for number in observed
        ]
        self._pool.add(claimed + ended, merges_all=True)
        self._feed.top_up()

    def _note_share(self) -> None:
        """How far an engine is says nothing of the others."""

    def _finish(self, request_id: RequestId) -> None:
        super()._finish(request_id)
        for each in self.claims:
            each.unfinished.discard(int(request_id))
            if not each.unfinished:
                self.ended += each.numbers
        self.claims = [each for each in self.claims if each.unfinished]


def run_engines(
    spec: GroupSpec,
    split: SplitName,
    num_engines: int,
    interference: InterferenceName,
    lines_ahead: int,
    ended_share: float = 0.0,
) -> EnginesResult:
    """Draw a pool, divide it, and run it on all engines. The same for the same spec. Raises: ConfigError."""
    hardware, cost = device(interference)
    pool = _drawn(spec, cost)
    rng = np.random.default_rng([spec.seed, 2])
    ended = rng.permutation(spec.num_requests)[: round(ended_share * spec.num_requests)].tolist()
    left = set(range(spec.num_requests)).difference(ended)
    parts = [[number for number in part if number in left] for part in _parts(pool, split, cost)]
    parts = [part for part in parts if part]
    engines = [
        _Engine(pool, hardware, cost, num_engines * spec.seed + number, spec.density)
        for number in range(num_engines)
    ]
    engines[0].ended += ended
    _run(engines, deque(parts), lines_ahead, shares_lengths=split == "lengths")
    ends_s = [each.clock.now_s() for each in engines]
    densities = [pool.compute_s[part].sum() / pool.memory_s[part].sum() for part in map(np.array, parts)]
    return EnginesResult(
        seconds=max(ends_s),
        mean_s=sum(ends_s) / num_engines,
        least_density=float(min(densities)),
        most_density=float(max(densities)),
    )


def _run(
    engines: Sequence[_Engine], free: deque[list[int]], lines_ahead: int, *, shares_lengths: bool
) -> None:
    """Step whichever engine is behind, once it has claimed what it may (``Leases.claim``)."""
    heap = [(0.0, number) for number in range(len(engines))]
    while heap:
        engine = engines[heap[0][1]]
        while free and engine.num_unfinished < lines_ahead:
            num_left = sum(map(len, free)) + sum(each.num_held for each in engines)
            most = min(lines_ahead, math.ceil(num_left / len(engines)) - engine.num_held)
            numbers: list[int] = []
            while free and len(numbers) < most:
                numbers += free.popleft()
            if not numbers:
                break
            ended = [number for each in engines for number in each.ended] if shares_lengths else []
            engine.claim(numbers, ended[:: -(-len(ended) // MAX_OBSERVED) or 1])
        if engine.engine.has_work:
            engine.step()
            heapq.heapreplace(heap, (engine.clock.now_s(), heap[0][1]))
        else:
            heapq.heappop(heap)
    assert not free, "all engines are idle and parts are free"


def _parts(pool: GroupedPool, split: SplitName, cost: OverlappedCostModel) -> list[list[int]]:
    """The lines of each part. The file is sorted: those with short answers for their prompts come first."""
    num_parts = num_parts_of(len(pool.requests))
    if split == "file":
        by_kind = np.argsort(pool.memory_s / pool.compute_s, kind="stable")
        return [part.tolist() for part in np.array_split(by_kind, num_parts)]
    if split == "ends":
        return split_requests(pool.requests, num_parts, resource_model(cost), most_pairs=1)
    return spread(split_requests(pool.requests, num_parts, resource_model(cost)))


@lru_cache(maxsize=1)
def _drawn(spec: GroupSpec, cost: OverlappedCostModel) -> GroupedPool:
    """Kept for the next split of the same pool."""
    return draw_groups(spec, resource_model(cost))


class EnginesPoint(NamedTuple):
    """Means of each split over the seeds, and its seconds by seed."""

    lengths: str
    splits: dict[SplitName, EnginesResult]
    seconds: dict[SplitName, list[float]]


@dataclass(frozen=True, kw_only=True)
class EnginesStudy(Study[EnginesPoint]):
    """Run one batch on several engines that claim parts of it, as servers on one database do.

    Output lengths are not known, and differ between groups of prompts that begin alike. Prints the time until
    the last engine has ended, and the densities of the parts.

    Attributes:
        lengths: lengths of the requests, separated by commas: sharegpt, lmsys.
        splits: how parts are made, separated by commas: file (in the order of a file sorted by kind), ends (a
            block from each end of the order), pairs (blocks from all over it), lengths (as built: the same
            parts, and an engine that claims is told lengths of lines of ended claims).
        density: compute density of the batch.
        requests: lines of the batch.
        engines: number of engines.
        lines_ahead: an engine claims while it has fewer lines than this. Of a server they are four times its
            `max_num_seqs`.
        ended: share of the lines, drawn at random, that others have answered before these engines start.
        interference: how compute and memory traffic of a step disturb each other: blendserve, nanoflow,
            ideal (not at all) or sequential (they do not overlap).
    """

    lengths: str = "sharegpt"
    splits: str = ",".join(SPLITS)
    density: float = bounded(1.0, above=0)
    requests: int = bounded(4_000, least=1, most=MOST_REQUESTS)
    engines: int = bounded(2, least=1, most=256)
    lines_ahead: int = bounded(512, above=0)
    ended: float = bounded(0.0, least=0, below=1)
    interference: InterferenceName = "blendserve"

    scenario: ClassVar[str] = "blendserve-engines"
    title: ClassVar[str] = "Parts of a batch on several engines"
    writes: ClassVar[str] = "json"

    def validate(self) -> None:
        """Raises: ConfigError."""
        super().validate()
        if self.requests < self.engines:
            raise ConfigError(f"`requests` ({self.requests}) must be at least `engines` ({self.engines}).")

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Splits of one pool after another, so that a process draws few pools twice."""
        found = []
        for name, seed in itertools.product(self.names("lengths", LENGTHS), seeds):
            pool = GroupSpec(name, self.density, self.requests, seed)
            found += [
                Run(
                    name,
                    split,
                    seed,
                    partial(
                        run_engines,
                        pool,
                        split,
                        self.engines,
                        self.interference,
                        self.lines_ahead,
                        self.ended,
                    ),
                )
                for split in self.names("splits", SPLITS)
            ]
        return found

    def point(self, setting: str, outcomes: Outcomes) -> EnginesPoint:
        of_names = cast("Mapping[SplitName, Sequence[EnginesResult]]", outcomes)
        figures = {
            name: EnginesResult(**mean_figures(EnginesResult._fields, results))
            for name, results in of_names.items()
        }
        return EnginesPoint(
            setting, figures, {name: [each.seconds for each in results] for name, results in of_names.items()}
        )

    def describe(self, run: Run, outcome: EnginesResult) -> str:
        return f"{run.point}, seed {run.seed}: {run.system} done, {outcome.seconds:.1f} s"

    def report(self, console: Console, points: Sequence[EnginesPoint]) -> None:
        for name, splits, _ in points:
            reference = splits.get(REFERENCE)
            columns: dict[str, dict[str, object]] = {
                split: {
                    **figures._asdict(),
                    "speedup": None if reference is None else reference.seconds / figures.seconds,
                }
                for split, figures in splits.items()
            }
            print_rows(
                console, f"{name}, density {self.density:g}, {self.engines} engines", _FIGURES, columns
            )

    def as_json(self, points: Sequence[EnginesPoint]) -> dict[str, Any]:
        return {
            "hardware": HARDWARE,
            "density": self.density,
            "num_requests": self.requests,
            "num_engines": self.engines,
            "lines_ahead": self.lines_ahead,
            "ended": self.ended,
            "interference": self.interference,
            "batches": {
                name: {
                    split: {**figures._asdict(), "seconds_by_seed": seconds[split]}
                    for split, figures in splits.items()
                }
                for name, splits, seconds in points
            },
        }


app = command_of(EnginesStudy, "EXPERIMENTS_")

_FIGURES = {
    "seconds": ("s, until the last ended", ".1f"),
    "mean_s": ("s, mean of the engines", ".1f"),
    "speedup": (f"speed / {REFERENCE}", ".3f"),
    "least_density": ("least density of a part", ".2f"),
    "most_density": ("greatest density", ".2f"),
}
