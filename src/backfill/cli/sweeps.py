"""Scenarios of ``backfill simulate`` that sweep the online load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.simulation import bros, goodput

_MOST_JOBS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What goodput and bros-tradeoff run beside what every scenario has.

    Attributes:
        workloads: kinds of online requests, separated by commas: of goodput conversation, code and document,
            of bros-tradeoff sharegpt and lmsys. All by default.
        loads: multiples of each workload's capacity, separated by commas (goodput). Default:
            0.3,0.5,0.7,0.8,0.9,1,1.1,1.25,1.5.
        cvs: variation of the gaps between online requests, separated by commas (goodput). Default: 1,4.
        num_requests: online requests of a point (goodput). Default: 1000.
        models: opt-13b, opt-30b and llama-3-70b, separated by commas (bros-tradeoff). All by default.
        rates: online requests per second, separated by commas, or all for 1 to 15 (bros-tradeoff). Default:
            1,3,5,8,11,15.
        duration: seconds of a trace (bros-tradeoff); the paper's are 600. Default: 120.
        online_lengths: CSV of prompt and output lengths instead of those drawn for sharegpt (bros-tradeoff).
        seeds: figures are means over the seeds 1 to this (goodput, bros-tradeoff). Default: 1.
        jobs: processes to run in (goodput, bros-tradeoff). Figures do not depend on it. Default: 1.
    """

    workloads: str | None = None
    loads: str | None = None
    cvs: str | None = None
    num_requests: int | None = None
    models: str | None = None
    rates: str | None = None
    duration: float | None = None
    online_lengths: Path | None = None
    seeds: int | None = None
    jobs: int | None = None

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        if self.jobs is not None and not 1 <= self.jobs <= _MOST_JOBS:
            raise ConfigError(f"`jobs` must be 1 to {_MOST_JOBS}, got {self.jobs}.")

    def check_scenario(self, scenario: str) -> None:
        """Raises: ConfigError for an option that the scenario does not have."""
        allowed = SWEEPS[scenario].options.split() if scenario in SWEEPS else []
        for name, value in asdict(self).items():
            if value is not None and name not in allowed:
                having = [each for each, sweep in SWEEPS.items() if name in sweep.options.split()]
                raise ConfigError(f"`{name}` is for {' and '.join(having)}.")

    def goodput(self, policies: tuple[str, ...] | None) -> goodput.GoodputSweep:
        """Raises: ConfigError."""
        given = {
            "workloads": _names(self.workloads),
            "loads": _numbers("loads", self.loads),
            "cvs": _numbers("cvs", self.cvs),
            "policies": policies,
            "num_requests": self.num_requests,
            "num_seeds": self.seeds,
        }
        sweep = goodput.GoodputSweep(**_without_none(given))
        sweep.validate()
        return sweep

    def bros(self, policies: tuple[str, ...] | None) -> bros.BrosExperiment:
        """Raises: ConfigError."""
        rates = bros.ALL_RATES_PER_S if self.rates == "all" else _numbers("rates", self.rates)
        given = {
            "models": _names(self.models),
            "workloads": _names(self.workloads),
            "rates_per_s": rates,
            "policies": policies,
            "online_lengths": self.online_lengths,
            "duration_s": self.duration,
            "num_seeds": self.seeds,
        }
        experiment = bros.BrosExperiment(**_without_none(given))
        experiment.validate()
        return experiment


@dataclass(frozen=True, slots=True)
class Sweep:
    """A scenario that sweeps the load.

    Attributes:
        options: names of the ``SweepOptions`` that it has.
        run: runs it with these policies (None for the scenario's), prints its tables and draws the plot if
            there is a path. Returns what ``--json`` prints.
    """

    options: str
    run: Callable[[Console, SweepOptions, tuple[str, ...] | None, Path | None], Mapping[str, Any]]


def run_goodput(
    console: Console, options: SweepOptions, policies: tuple[str, ...] | None, plot: Path | None
) -> Mapping[str, Any]:
    sweep = options.goodput(policies)
    console.print("[bold]Goodput against load, with and without a flood of document summaries[/bold]")

    def on_done(setting: goodput.Setting, policy: str, _: Mapping[str, float]) -> None:
        console.print(f"{_panel_title(setting.panel)}, load {setting.load:g}: {policy} done", style="dim")

    result = goodput.run_goodput(sweep, options.jobs or 1, on_done)
    for panel, points in result.panels().items():
        _print_panel(console, panel, points)
    for name, has_offline in (("with an offline flood", True), ("without offline requests", False)):
        _print_summary(console, f"Summary, {name}", result.summaries(has_offline=has_offline))
    for workload, capacity in result.capacities.items():
        console.print(f"capacity of {workload}: {capacity:.2f} requests/s")
    if plot is not None:
        from backfill.simulation.sweep_plot import save_goodput_plot

        save_goodput_plot(plot, result)
    return result.as_json()


def run_bros(
    console: Console, options: SweepOptions, policies: tuple[str, ...] | None, plot: Path | None
) -> Mapping[str, Any]:
    experiment = options.bros(policies)
    console.print("[bold]BROS, figures 10 and 11: online latency against offline throughput[/bold]")

    def on_done(setting: bros.Setting, policy: str, _: Mapping[str, float]) -> None:
        console.print(f"{_bros_title(setting)}: {policy} done", style="dim")

    result = bros.run_bros(experiment, options.jobs or 1, on_done)
    for workload in experiment.workloads:
        for model in experiment.models:
            points = [point for point in result.of_workload(workload) if point.setting.model == model]
            _print_bros(console, f"{model}, {workload}", points)
        _print_comparisons(console, workload, result)
    if plot is not None:
        from backfill.simulation.sweep_plot import save_bros_plot

        save_bros_plot(plot, result)
    return result.as_json()


SWEEPS: Mapping[str, Sweep] = {
    "goodput": Sweep("workloads loads cvs num_requests seeds jobs", run_goodput),
    "bros-tradeoff": Sweep("workloads models rates duration online_lengths seeds jobs", run_bros),
}

_PANEL_COLUMNS = {
    "goodput_rps": ("goodput req/s", ".2f"),
    "attainment": ("both met", ".1%"),
    "ttft_p99_s": ("TTFT P99 s", ".3f"),
    "itl_p99_s": ("gap P99 s", ".3f"),
    "itl_attainment": ("gaps met", ".2%"),
    "offline_tok_s": ("offline tok/s", ".0f"),
}
_BROS_COLUMNS = {
    "normalized_latency_s": ("latency/token s", ".3f"),
    "ttft_attainment": ("TTFT met", ".1%"),
    "tpot_attainment": ("TPOT met", ".1%"),
    "offline_rps": ("offline req/s", ".2f"),
}
_SUMMARY_COLUMNS = {
    "over_online_only": "worst goodput / online-only",
    "over_best": "/ best co-serving",
    "offline_over_priority": "offline / priority, load < 0.8",
    "stability": "goodput at 1.0 and more / peak",
}


def _print_panel(console: Console, panel: goodput.Panel, points: list[goodput.GoodputPoint]) -> None:
    table = Table(title=_panel_title(panel))
    headings = ["load", "req/s", "policy", *(heading for heading, _ in _PANEL_COLUMNS.values())]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for point in points:
        for policy, figures in point.policies.items():
            cells = [format(figures[name], kind) for name, (_, kind) in _PANEL_COLUMNS.items()]
            table.add_row(f"{point.setting.load:g}", f"{point.rate_per_s:.2f}", policy, *cells)
        table.add_section()
    console.print(table)


def _print_summary(console: Console, title: str, summaries: Mapping[str, goodput.PolicySummary]) -> None:
    table = Table(title=title)
    table.add_column("policy")
    for heading in _SUMMARY_COLUMNS.values():
        table.add_column(heading, justify="right")
    for policy, summary in summaries.items():
        table.add_row(policy, *(_cell(getattr(summary, name), ".3f") for name in _SUMMARY_COLUMNS))
    console.print(table)


def _print_bros(console: Console, title: str, points: list[bros.BrosPoint]) -> None:
    table = Table(title=title)
    headings = ["req/s", "feasible", "policy", *(heading for heading, _ in _BROS_COLUMNS.values())]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for point in points:
        feasible = {None: "", True: "yes", False: "no"}[point.is_feasible]
        for policy, figures in point.policies.items():
            cells = [format(figures[name], kind) for name, (_, kind) in _BROS_COLUMNS.items()]
            table.add_row(f"{point.setting.rate_per_s:g}", feasible, policy, *cells)
        table.add_section()
    console.print(table)


def _print_comparisons(console: Console, workload: str, result: bros.BrosResult) -> None:
    """A row for each policy and baseline, and the paper's below."""
    table = Table(title=f"{workload}: means over models and rates")
    for heading in ("policy", "over", "latency", "offline req/s", "TTFT met", "TPOT met"):
        table.add_column(heading, justify="left" if heading in ("policy", "over") else "right")
    for label, summary in (("", result.summary(workload)), (" (paper)", bros.PAPER[workload])):
        for policy, figures in summary.items():
            met = [_cell(figures.get(f"{name}_attainment"), ".1%") for name in ("ttft", "tpot")]
            table.add_row(f"{policy}{label}", "", "", "", *met)
            for baseline in bros.BASELINES:
                if ratios := figures.get(f"over {baseline}"):
                    table.add_row(
                        "",
                        baseline,
                        _change(ratios["latency_reduction"]),
                        _change(ratios["offline_reduction"]),
                        *(_times(ratios[f"{name}_attainment_ratio"]) for name in ("ttft", "tpot")),
                    )
    console.print(table)


def _panel_title(panel: goodput.Panel) -> str:
    beside = "beside offline requests" if panel.has_offline else "alone"
    return f"{panel.workload} {beside}, CV {panel.cv:g}"


def _bros_title(setting: bros.Setting) -> str:
    return f"{setting.model}, {setting.workload}, {setting.rate_per_s:g} requests/s"


def _cell(value: float | None, kind: str) -> str:
    return "" if value is None else format(value, kind)


def _change(reduction: float | None) -> str:
    return "" if reduction is None else f"{-reduction:+.1%}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"x {ratio:.2f}"


def _names(text: str | None) -> tuple[str, ...] | None:
    """Names separated by commas, each once."""
    if text is None:
        return None
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _numbers(field: str, text: str | None) -> tuple[float, ...] | None:
    """Numbers separated by commas, each once. Raises: ConfigError."""
    if text is None:
        return None
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"`{field}` must be numbers separated by commas, got {text!r:.80}.") from None


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
