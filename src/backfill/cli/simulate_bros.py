"""``backfill simulate bros-tradeoff``: the trade-off of BROS's evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.sweeps import SweepOptions, cell, names_of, numbers_of
from backfill.core.options import check_types
from backfill.simulation.bros import (
    ALL_RATES_PER_S,
    BASELINES,
    DURATION_S,
    MODELS,
    PAPER,
    POLICIES,
    RATES_PER_S,
    WORKLOADS,
    BrosExperiment,
    BrosPoint,
    BrosResult,
    Setting,
    run_bros,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrosOptions:
    """The points of an experiment.

    Attributes:
        models: models to serve, separated by commas, of opt-13b, opt-30b and llama-3-70b.
        workloads: lengths of online requests, separated by commas, of sharegpt and lmsys.
        rates: online requests per second, separated by commas, or all for 1 to 15.
        duration: seconds of a trace, at least 1. The paper's are 600.
        online_lengths: CSV of prompt and output lengths instead of those drawn for sharegpt.
    """

    models: str = ",".join(MODELS)
    workloads: str = ",".join(WORKLOADS)
    rates: str = ",".join(f"{rate:g}" for rate in RATES_PER_S)
    duration: float = DURATION_S
    online_lengths: Path | None = None

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)

    def experiment(self, options: SweepOptions, policies: tuple[str, ...] = POLICIES) -> BrosExperiment:
        """Those of ``policies`` run unless the options name others. Raises: ConfigError."""
        is_all = self.rates == "all"
        experiment = BrosExperiment(
            models=names_of(self.models),
            workloads=names_of(self.workloads),
            rates_per_s=ALL_RATES_PER_S if is_all else numbers_of("rates", self.rates),
            policies=names_of(options.policies, policies),
            online_lengths=self.online_lengths,
            duration_s=self.duration,
            num_seeds=options.seeds,
        )
        experiment.validate()
        return experiment


def bros_tradeoff(points: BrosOptions, options: SweepOptions) -> None:
    """Run BROS's figures 10 and 11: latencies, attainments and offline throughput beside the paper's.

    Lengths are drawn with the means and deviations that the paper prints.
    """
    console = Console()
    experiment = points.experiment(options)
    title = "BROS, figures 10 and 11: online latency against offline throughput"
    path = options.begin(console, title, "bros-tradeoff")

    def on_done(setting: Setting, policy: str, _: Mapping[str, float]) -> None:
        console.print(f"{title_of(setting)}: {policy} done", style="dim")

    with interruptible():
        result = run_bros(experiment, options.jobs, on_done)
    for workload in experiment.workloads:
        for model in experiment.models:
            of_model = [point for point in result.of_workload(workload) if point.setting.model == model]
            _print_points(console, f"{model}, {workload}", of_model)
        _print_comparisons(console, workload, result)
    if path is not None:
        from backfill.simulation.sweep_plot import save_bros_plot

        save_bros_plot(path, result)
    options.end(console, path, result.as_json())


app = command(
    bros_tradeoff,
    {
        "Points": "models workloads rates duration online_lengths",
        "Runs": "policies seeds jobs",
        "Output": "plot json",
    },
    prefix="BACKFILL_SIMULATE_BROS_",
)

_COLUMNS = {
    "normalized_latency_s": ("latency/token s", ".3f"),
    "ttft_attainment": ("TTFT met", ".1%"),
    "tpot_attainment": ("TPOT met", ".1%"),
    "offline_rps": ("offline req/s", ".2f"),
}


def _print_points(console: Console, title: str, points: list[BrosPoint]) -> None:
    table = Table(title=title, pad_edge=False, padding=(0, 0, 0, 1))
    headings = ["req/s", "feasible", "policy", *(heading for heading, _ in _COLUMNS.values())]
    for heading in headings:
        is_name = heading == "policy"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for point in points:
        feasible = {None: "", True: "yes", False: "no"}[point.is_feasible]
        for policy, figures in point.policies.items():
            cells = [format(figures[name], kind) for name, (_, kind) in _COLUMNS.items()]
            table.add_row(f"{point.setting.rate_per_s:g}", feasible, policy, *cells)
        table.add_section()
    console.print(table)


def _print_comparisons(console: Console, workload: str, result: BrosResult) -> None:
    """A row for each policy and baseline, and the paper's below."""
    table = Table(title=f"{workload}: means over models and rates")
    for heading in ("policy", "over", "latency", "offline req/s", "TTFT met", "TPOT met"):
        table.add_column(heading, justify="left" if heading in ("policy", "over") else "right")
    for label, summary in (("", result.summary(workload)), (" (paper)", PAPER[workload])):
        for policy, figures in summary.items():
            met = [cell(figures.get(f"{name}_attainment"), ".1%") for name in ("ttft", "tpot")]
            table.add_row(f"{policy}{label}", "", "", "", *met)
            for baseline in BASELINES:
                if ratios := figures.get(f"over {baseline}"):
                    table.add_row(
                        "",
                        baseline,
                        _change(ratios["latency_reduction"]),
                        _change(ratios["offline_reduction"]),
                        *(_times(ratios[f"{name}_attainment_ratio"]) for name in ("ttft", "tpot")),
                    )
    console.print(table)


def title_of(setting: Setting) -> str:
    """The point in words."""
    return f"{setting.model}, {setting.workload}, {setting.rate_per_s:g} requests/s"


def _change(reduction: float | None) -> str:
    return "" if reduction is None else f"{-reduction:+.1%}"


def _times(ratio: float | None) -> str:
    """A ratio in a cell; empty where there is none."""
    return "" if ratio is None else f"x {ratio:.2f}"
