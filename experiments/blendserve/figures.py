"""BlendServe's evaluation (sections 5.2 to 5.4, appendix A.2) on a simulated A100."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

import numpy as np
from rich.console import Console

from backfill.blending.requests import OrderName
from backfill.cli.startup import check_folder
from backfill.cli.studies import command_of
from backfill.core.errors import ConfigError
from backfill.core.options import Bounds, bounded
from backfill.simulation.processes import RunShare
from backfill.simulation.study import MOST_REQUESTS, Outcomes, Run, Study
from experiments.blendserve.mix import MixSpec
from experiments.blendserve.overlap import InterferenceName
from experiments.blendserve.points import add_point, read_points, settings_of
from experiments.blendserve.pool import HARDWARE, PoolResult, StepSizes, run_pool
from experiments.blendserve.result import (
    BLEND,
    GRID_DENSITIES,
    GRID_FIGURES,
    GRID_SHARINGS,
    ORDERS,
    REFERENCE,
    TRACES,
    BlendPoint,
    OrderFigures,
    Target,
    speedups_of,
)
from experiments.blendserve.sources import ComputeSource
from experiments.blendserve.tables import print_grid, print_point, print_sources, print_summary, print_usage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW_INCHES = 2.2
# A grid of few points still has room for its title, and one whose points gain the same for a scale.
_LEAST_INCHES = (6.4, 2.8)
_LEAST_SPAN = 0.1


@dataclass(frozen=True, kw_only=True)
class Pools(Study[BlendPoint]):
    """Orders of pools that are drawn one by one.

    Attributes:
        source: compute-bound requests of the pools: burstgpt, azure, sharegpt or wildchat. MMLU and videos
            are mixed with them.
        source_lengths: CSV of their prompt and output lengths, instead of those drawn.
        requests: requests of a pool.
        orders: orders to run, separated by commas: fcfs, random, dfs, batchllm, blend.
        interference: how compute and memory traffic of a step disturb each other: blendserve, nanoflow,
            ideal (not at all) or sequential (they do not overlap).
        steps: tokens of a step, in every order: density, those that the memory traffic of the step before
            needs beside it; fixed, those that a full KV cache does.
    """

    source: ComputeSource = "burstgpt"
    source_lengths: Path | None = None
    requests: int = bounded(100_000, least=1, most=MOST_REQUESTS)
    orders: str = ",".join(ORDERS)
    interference: InterferenceName = "blendserve"
    steps: StepSizes = "density"

    tells_progress: ClassVar[bool] = True

    @abstractmethod
    def targets(self) -> list[Target]:
        """Raises: ConfigError."""

    @property
    def all_orders(self) -> tuple[OrderName, ...]:
        return self.names("orders", get_args(OrderName))

    def mix(self, target: Target, seed: int) -> MixSpec:
        return MixSpec(self.source, target.density, target.sharing, self.requests, seed, self.source_lengths)

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Orders of one pool after another, so that a process draws few pools twice."""
        return [
            Run(
                target,
                order,
                seed,
                partial(run_pool, self.mix(target, seed), order, self.interference, self.steps),
            )
            for target, seed in itertools.product(self.targets(), seeds)
            for order in self.all_orders
        ]

    def point(self, setting: Target, outcomes: Outcomes) -> BlendPoint:
        first = next(iter(outcomes.values()))
        results = cast("Mapping[OrderName, Sequence[PoolResult]]", outcomes)
        return BlendPoint(
            setting,
            first[0].drawn,
            first[0].num_requests,
            {order: OrderFigures.mean(of_order) for order, of_order in results.items()},
            {order: of_order[0] for order, of_order in results.items()},
            len(first),
        )

    def describe(self, run: Run, outcome: PoolResult) -> str:
        target = cast("Target", run.point)
        return (
            f"density {target.density:g}, sharing {target.sharing:g}, seed {run.seed}: {run.system} done, "
            f"{outcome.num_steps} steps, {outcome.seconds:.0f} s on the simulated device"
        )

    def as_json(self, points: Sequence[BlendPoint]) -> dict[str, Any]:
        speedups = speedups_of(points)
        return {
            "hardware": HARDWARE,
            "source": self.source,
            "num_requests": self.requests,
            "interference": self.interference,
            "steps": self.steps,
            "points": [point.as_json() for point in points],
            "speedup_mean": fmean(speedups) if speedups else None,
        }


@dataclass(frozen=True, kw_only=True)
class Table2(Pools):
    """Run the four pools of BlendServe's table 2 in each order: throughput, prefix sharing, optimum."""

    scenario: ClassVar[str] = "blendserve-table2"
    title: ClassVar[str] = "BlendServe, table 2 and figures 6 and 7"
    writes: ClassVar[str] = "json"

    def targets(self) -> list[Target]:
        return list(TRACES.values())

    def report(self, console: Console, points: Sequence[BlendPoint]) -> None:
        print_sources(console, self.source, self.source_lengths)
        for name, point in zip(TRACES, points, strict=True):
            print_point(console, name, point)
        print_summary(console, points)


@dataclass(frozen=True, kw_only=True)
class Grid(Pools):
    """Run BlendServe's figures 9 to 12: throughput of `blend` over `dfs`, against density and sharing.

    Figure 9 is of burstgpt, 10 of azure, 11 of sharegpt, 12 of wildchat.

    Attributes:
        densities: compute densities of the pools, separated by commas.
        sharings: shares of tokens that a perfect prefix cache saves, separated by commas.
        output: file of JSON lines to which each point is appended once it has run. Points that it has
            are not run again, so an interrupted grid goes on. Points of other settings are refused.
    """

    orders: str = f"{REFERENCE},{BLEND}"
    densities: str = ",".join(map(str, GRID_DENSITIES))
    sharings: str = ",".join(map(str, GRID_SHARINGS))
    output: Path | None = None

    scenario: ClassVar[str] = "blendserve-grid"
    title: ClassVar[str] = "BlendServe, figures 9 to 12"

    def heading(self, seed: int) -> list[str]:
        figure = GRID_FIGURES[self.source]
        lines = [f"BlendServe, figure {figure}: {self.source}, mmlu and openvid"]
        if self.output is not None:
            targets, finished = self.targets(), read_points(self.output, {})
            num_finished = sum(target in finished for target in targets)
            lines.append(f"{num_finished} of {len(targets)} points are in {self.output}")
        return lines

    def validate(self) -> None:
        """Raises: ConfigError."""
        super().validate()
        check_folder("output", self.output)

    def targets(self) -> list[Target]:
        densities = self.numbers("densities")
        sharings = self.numbers("sharings", Bounds(least=0, below=1))
        return [Target(density, sharing) for sharing in sharings for density in densities]

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Those of points in ``output`` give the point."""
        runs = super().runs(seeds)
        if self.output is None:
            return runs
        finished = read_points(self.output, self._settings(len(seeds)))
        return [
            replace(run, simulate=partial(_finished, finished[target]))
            if (target := cast("Target", run.point)) in finished
            else run
            for run in runs
        ]

    def point(self, setting: Target, outcomes: Outcomes) -> BlendPoint:
        first = next(iter(outcomes.values()))
        if isinstance(first[0], BlendPoint):
            return first[0]
        point = super().point(setting, outcomes)
        if self.output is not None:
            add_point(self.output, self._settings(len(first)), point)
        return point

    def describe(self, run: Run, outcome: PoolResult | BlendPoint) -> str:
        return "" if isinstance(outcome, BlendPoint) else super().describe(run, outcome)

    def _settings(self, num_seeds: int) -> dict[str, Any]:
        mix = self.mix(self.targets()[0], 1)
        return settings_of(mix, self.all_orders, self.interference, self.steps, num_seeds)

    def report(self, console: Console, points: Sequence[BlendPoint]) -> None:
        print_grid(console, self.source, points)

    def draw(self, figure: Figure, points: Sequence[BlendPoint]) -> None:
        """Colours begin at 1, or at the least value below it, so that they say how much is gained."""
        if not speedups_of(points):
            figure.text(0.5, 0.5, f"This compares {BLEND} with {REFERENCE}.", ha="center")
            return
        densities = sorted({point.target.density for point in points})
        sharings = sorted({point.target.sharing for point in points}, reverse=True)
        values = np.full((len(sharings), len(densities)), np.nan)
        for point in points:
            row, column = sharings.index(point.target.sharing), densities.index(point.target.density)
            values[row, column] = np.nan if (speedup := point.speedup()) is None else speedup
        least_width, least_height = _LEAST_INCHES
        size = max(1.5 + 0.7 * len(densities), least_width), max(1.5 + 0.6 * len(sharings), least_height)
        figure.set_size_inches(size)
        axes = figure.subplots()
        least = np.nanmin(values, initial=1.0)
        most = np.nanmax(values, initial=least + _LEAST_SPAN)
        image = axes.imshow(values, cmap="viridis", aspect="auto", vmin=least, vmax=most)
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                is_light = value > (least + most) / 2
                axes.text(
                    column,
                    row,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    color="black" if is_light else "white",
                    fontsize=8,
                )
        axes.set_xticks(range(len(densities)), [f"{each:g}" for each in densities])
        axes.set_yticks(range(len(sharings)), [f"{each:g}" for each in sharings])
        axes.set(xlabel="compute density", ylabel="prefix sharing")
        num_seeds = points[0].num_seeds
        seeds = f", mean of {num_seeds} seeds" if num_seeds > 1 else ""
        axes.set_title(
            f"Throughput of {BLEND} over {REFERENCE}\n{self.source}, mmlu and openvid; "
            f"{self.requests:,} requests a point{seeds}",
            fontsize=10,
        )
        figure.colorbar(image)


@dataclass(frozen=True, kw_only=True)
class UsageStudy(Pools):
    """Plot BlendServe's figure 8: compute and memory time of the steps, in each order.

    Attributes:
        trace: number of the pool in the paper's table 2.
    """

    orders: str = f"{REFERENCE},{BLEND}"
    trace: int = 2

    scenario: ClassVar[str] = "blendserve-usage"
    title: ClassVar[str] = "BlendServe, figure 8"

    def heading(self, seed: int) -> list[str]:
        return [f"{self.title}: trace {self.trace}"]

    def targets(self) -> list[Target]:
        if not 1 <= self.trace <= len(TRACES):
            raise ConfigError(f"`trace` must be 1 to {len(TRACES)}, got {self.trace}.")
        return [list(TRACES.values())[self.trace - 1]]

    def report(self, console: Console, points: Sequence[BlendPoint]) -> None:
        print_point(console, f"trace {self.trace}", points[0])
        print_usage(console, points[0])

    def as_json(self, points: Sequence[BlendPoint]) -> dict[str, Any]:
        return {**super().as_json(points), "usage": points[0].usage_as_json()}

    def draw(self, figure: Figure, points: Sequence[BlendPoint]) -> None:
        """Compute and memory seconds of steps, a row for each order with the same axes."""
        (point,) = points
        figure.set_size_inches(10, 1 + _ROW_INCHES * len(point.usage))
        figure.suptitle(
            f"Resources of a step, density {point.target.density:g}, sharing {point.target.sharing:g}"
        )
        axes = figure.subplots(len(point.usage), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axis, (order, result) in zip(axes, point.usage.items(), strict=True):
            steps = np.linspace(0, result.num_steps, len(result.compute_s))
            axis.plot(steps, 1000 * result.compute_s, label="compute", color="#b2182b")
            axis.plot(steps, 1000 * result.memory_s, label="memory", color="#2166ac")
            axis.set(ylabel=f"{order}\nms alone")
        axes[0].set_ylim(bottom=0)
        axes[0].legend(fontsize=8)
        axes[-1].set(xlabel="step")


def _finished(point: BlendPoint) -> BlendPoint:
    RunShare().note(1.0)
    return point


table2, grid, usage = (command_of(study, "EXPERIMENTS_") for study in (Table2, Grid, UsageStudy))
