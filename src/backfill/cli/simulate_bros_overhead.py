"""``backfill simulate bros-overhead``: the time of scheduling, beside that of simulated steps."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.simulate_bros import BrosOptions, title_of
from backfill.cli.sweeps import SweepOptions, cell
from backfill.core.config import at_least
from backfill.core.options import check_types
from backfill.simulation.bros import Setting
from backfill.simulation.bros_overhead import (
    OVERHEAD_DURATION_S,
    OVERHEAD_MODELS,
    OVERHEAD_POLICIES,
    OVERHEAD_RATES_PER_S,
    PAPER_SHARES,
    Overhead,
    OverheadPoint,
    run_bros_overhead,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadOptions(BrosOptions):
    """The points of the experiment, and how often decisions are timed.

    Attributes:
        repeats: runs of each point. A step's decision takes the median of its times in them.
    """

    models: str = ",".join(OVERHEAD_MODELS)
    rates: str = ",".join(f"{rate:g}" for rate in OVERHEAD_RATES_PER_S)
    duration: float = OVERHEAD_DURATION_S
    repeats: int = 3

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        at_least("repeats", self.repeats, 1)


def bros_overhead(points: OverheadOptions, options: SweepOptions) -> None:
    """Run BROS's figure 14: what scheduling takes of an iteration.

    Decisions (planning and committing a step) run on this machine and are timed. Steps and copies are those
    of a simulated device.
    """
    console = Console()
    experiment = points.experiment(options, OVERHEAD_POLICIES)
    title = "BROS, figure 14: decisions measured on this machine, steps of a simulated device"
    path = options.begin(console, title, "bros-overhead")

    def on_done(setting: Setting, policy: str) -> None:
        console.print(f"{title_of(setting)}: {policy} done", style="dim")

    with interruptible():
        result = run_bros_overhead(experiment, points.repeats, on_done)
    for point in result.points:
        _print_point(console, point)
    if path is not None:
        from backfill.simulation.bros_plot import save_overhead_plot

        save_overhead_plot(path, result)
    options.end(console, path, result.as_json())


app = command(
    bros_overhead,
    {
        "Points": "models workloads rates duration online_lengths",
        "Runs": "policies seeds repeats",
        "Output": "plot json",
    },
    prefix="BACKFILL_SIMULATE_BROS_OVERHEAD_",
)

_CAPTION = (
    "requests: that have blocks; share: of decisions in an iteration; copies: their time over the steps'"
)


def _print_point(console: Console, point: OverheadPoint) -> None:
    title = title_of(point.setting)
    if point.setting.model in PAPER_SHARES:
        low, high = PAPER_SHARES[point.setting.model]
        title += f" (paper: scheduling is {low:.2%} to {high:.2%} of an iteration)"
    table = Table(title=title, caption=_CAPTION, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in ("policy", "requests"):
        table.add_column(heading, no_wrap=True)
    for heading in ("steps", "decision ms", "step ms", "share", "copies"):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy, overhead in point.policies.items():
        table.add_row(policy, "any", *_cells(overhead))
        for most, of_group in point.groups[policy].items():
            table.add_row("", f"up to {most}", *_cells(of_group))
        table.add_section()
    console.print(table)


def _cells(overhead: Overhead) -> list[str]:
    return [
        str(overhead.num_steps),
        f"{overhead.decision_ms:.3f}",
        f"{overhead.step_ms:.2f}",
        f"{overhead.share:.2%}",
        cell(overhead.copy_share, ".2%"),
    ]
