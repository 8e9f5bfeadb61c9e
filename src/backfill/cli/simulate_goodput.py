"""``backfill simulate goodput``: goodput against load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.sweeps import SweepOptions, cell, names_of, numbers_of
from backfill.core.options import check_types
from backfill.simulation.goodput import (
    CVS,
    LOADS,
    POLICIES,
    WORKLOADS,
    GoodputPoint,
    GoodputSweep,
    Panel,
    PolicySummary,
    Setting,
    run_goodput,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputOptions:
    """The points of a sweep.

    Attributes:
        workloads: kinds of online requests, separated by commas: conversation, code, document. Default: all.
        loads: multiples of each workload's capacity, separated by commas. Default:
            0.3,0.5,0.7,0.8,0.9,1,1.1,1.25,1.5.
        cvs: variation of the gaps between online requests, separated by commas. Default: 1,4.
        num_requests: online requests of a point.
        slowness: the simulated device is so many times as slow, and objectives are as many times as long.
    """

    workloads: str | None = None
    loads: str | None = None
    cvs: str | None = None
    num_requests: int = 1000
    slowness: float = 1.0

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)

    def sweep(self, options: SweepOptions) -> GoodputSweep:
        """Raises: ConfigError."""
        sweep = GoodputSweep(
            workloads=names_of(self.workloads, tuple(WORKLOADS)),
            loads=numbers_of("loads", self.loads, LOADS),
            cvs=numbers_of("cvs", self.cvs, CVS),
            policies=names_of(options.policies, POLICIES),
            num_requests=self.num_requests,
            num_seeds=options.seeds,
            slowness=self.slowness,
        )
        sweep.validate()
        return sweep


def goodput(points: GoodputOptions, options: SweepOptions) -> None:
    """Sweep the online load from 0.3 to 1.5 times what the device completes, under each policy.

    Prints goodput, latencies and offline tokens per second at each point, with a flood of document summaries
    and without offline requests, and a summary of each policy.
    """
    console = Console()
    sweep = points.sweep(options)
    path = options.begin(console, "Goodput against load, with and without offline requests", "goodput")

    def on_done(setting: Setting, policy: str, _: Mapping[str, float]) -> None:
        console.print(f"{_title(setting.panel)}, load {setting.load:g}: {policy} done", style="dim")

    with interruptible():
        result = run_goodput(sweep, options.jobs, on_done)
    for panel, of_panel in result.panels().items():
        _print_panel(console, panel, of_panel)
    for name, has_offline in (("with an offline flood", True), ("without offline requests", False)):
        _print_summary(console, f"Summary, {name}", result.summaries(has_offline=has_offline))
    for workload, capacity in result.capacities.items():
        console.print(f"capacity of {workload}: {capacity:.2f} requests/s")
    if path is not None:
        from backfill.simulation.sweep_plot import save_goodput_plot

        save_goodput_plot(path, result)
    options.end(console, path, result.as_json())


app = command(
    goodput,
    {
        "Points": "workloads loads cvs num_requests slowness",
        "Runs": "policies seeds jobs",
        "Output": "plot json",
    },
    prefix="BACKFILL_SIMULATE_GOODPUT_",
)

_PANEL_COLUMNS = {
    "goodput_rps": ("goodput req/s", ".2f"),
    "attainment": ("both met", ".1%"),
    "ttft_p99_s": ("TTFT P99 s", ".3f"),
    "itl_p99_s": ("gap P99 s", ".3f"),
    "itl_attainment": ("gaps met", ".2%"),
    "offline_tok_s": ("offline tok/s", ".0f"),
}
_SUMMARY_COLUMNS = {
    "over_online_only": "worst goodput / online-only",
    "over_best": "/ best co-serving",
    "offline_over_priority": "offline / priority, load < 0.8",
    "stability": "goodput at 1.0 and more / peak",
}


def _print_panel(console: Console, panel: Panel, points: list[GoodputPoint]) -> None:
    table = Table(title=_title(panel), pad_edge=False, padding=(0, 0, 0, 1))
    headings = ["load", "policy", *(heading for heading, _ in _PANEL_COLUMNS.values())]
    for heading in headings:
        is_name = heading == "policy"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for point in points:
        for policy, figures in point.policies.items():
            cells = [format(figures[name], kind) for name, (_, kind) in _PANEL_COLUMNS.items()]
            table.add_row(f"{point.setting.load:g}", policy, *cells)
        table.add_section()
    console.print(table)


def _print_summary(console: Console, title: str, summaries: Mapping[str, PolicySummary]) -> None:
    table = Table(title=title, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("policy", no_wrap=True)
    for heading in _SUMMARY_COLUMNS.values():
        table.add_column(heading, justify="right")
    for policy, summary in summaries.items():
        table.add_row(policy, *(cell(getattr(summary, name), ".3f") for name in _SUMMARY_COLUMNS))
    console.print(table)


def _title(panel: Panel) -> str:
    beside = "beside offline requests" if panel.has_offline else "alone"
    return f"{panel.workload} {beside}, CV {panel.cv:g}"
