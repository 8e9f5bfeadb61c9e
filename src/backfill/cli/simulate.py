"""``backfill simulate``: the experiments of the papers on simulated devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.plots import NEEDS, can_plot, check_folder, check_plot
from backfill.cli.tables import print_figures
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.scenarios import (
    VARIANTS,
    Inputs,
    PointResult,
    ScenarioResult,
    build_scenario,
    run_scenario,
)

_FIGURES = (
    "ttft_p50_s ttft_p99_s itl_p50_s itl_p99_s ttft_attainment itl_attainment total_tok_s online_tok_s "
    "offline_tok_s recomputed_token_share restored_token_share scheduling_time_share"
)
# Where the traces of docs/simulation.md are published.
_TRACES = "https://github.com/microsoft/vidur/tree/main/data/processed_traces"
_CONVERSATIONS = "splitwise_conv.csv"
_SUMMARIES = "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """One experiment.

    Attributes:
        scenario: one of conserve-fig5, conserve-fig6, conserve-fig7 and conserve-fig8.
        policies: policies to run, separated by commas; the paper's by default.
        online_trace: CSV of a conversation trace with arrival times (figure 5).
        offline_lengths: CSV of prompt and output lengths of the offline work.
        plot: PNG to write; SCENARIO.png by default, if matplotlib is installed.
        json: end with one JSON object on a line.
    """

    scenario: str
    policies: str | None = None
    online_trace: Path | None = None
    offline_lengths: Path | None = None
    plot: Path | None = None
    json: bool = False

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        if self.online_trace is not None and self.scenario != "conserve-fig5":
            raise ConfigError(
                "`online_trace` is for conserve-fig5; the requests of the others have one length."
            )
        _check_trace("online_trace", self.online_trace, _CONVERSATIONS)
        _check_trace("offline_lengths", self.offline_lengths, _SUMMARIES)

    def policy_names(self) -> tuple[str, ...] | None:
        """None for the paper's policies. Raises: ConfigError."""
        if self.policies is None:
            return None
        names = tuple(name.strip() for name in self.policies.split(",") if name.strip())
        known = ", ".join(VARIANTS)
        for name in names:
            if name not in VARIANTS:
                raise ConfigError(f"`policies`: there is no policy {name!r}; there are {known}.")
        if not names:
            raise ConfigError(f"`policies` names none; there are {known}.")
        return names

    def plot_path(self) -> Path | None:
        """The file to draw; None without matplotlib. Raises: ConfigError if it cannot be written."""
        check_plot(self.plot)
        if self.plot is not None or not can_plot():
            return self.plot
        path = Path(f"{self.scenario}.png")
        check_folder("plot", path)
        return path


def simulate(options: SimulateOptions) -> None:
    """Run an experiment of ConServe's evaluation and print its figures beside the paper's.

    Without traces the workloads are drawn with the published traces' means and variation.
    """
    console = Console()
    path = options.plot_path()
    scenario = build_scenario(options.scenario, Inputs(options.online_trace, options.offline_lengths))
    policies = options.policy_names() or scenario.policies
    console.print(f"[bold]{scenario.title}[/bold]")
    console.print(
        f"{scenario.hardware.name}, {scenario.hardware.kv_tokens} tokens of KV, "
        f"objectives {scenario.slo.ttft_s:g} s and {scenario.slo.tpot_s * 1000:g} ms"
    )
    if path is None:
        console.print(f"No plot: it needs {NEEDS}.", highlight=False, markup=False)

    def on_done(setting: Mapping[str, float], policy: str, metrics: PolicyMetrics) -> None:
        console.print(f"{_title(setting)}: {policy} done, {metrics.num_steps} steps", style="dim")

    with interruptible():
        result = run_scenario(scenario, policies, on_done)
    for point in result.points:
        _print_point(console, point, result)
    if path is not None:
        from backfill.simulation.plot import save_plot

        save_plot(path, result)
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if options.json:
        print(json.dumps(result.as_json()))


app = command(
    simulate,
    {"Experiment": "scenario policies online_trace offline_lengths", "Output": "plot json"},
    positional="scenario",
    prefix="BACKFILL_SIMULATE_",
)
app.command("backfill.cli.simulate_goodput:app", name="goodput", help="Sweep goodput against load.")
app.command("backfill.cli.simulate_bros:app", name="bros-tradeoff", help="Run BROS's figures 10 and 11.")


def _title(setting: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def _check_trace(field: str, path: Path | None, published_as: str) -> None:
    """Raises: ConfigError that says where such a file is published."""
    if path is not None and not path.exists():
        raise ConfigError(
            f"`{field}` {path} cannot be read: there is no such file. "
            f"The one of docs/simulation.md is {published_as} of {_TRACES}."
        )


def _print_point(console: Console, point: PointResult, result: ScenarioResult) -> None:
    """Print a column for each policy, and beside it the paper's figures if it has some."""
    columns = {}
    for policy, metrics in point.metrics.items():
        columns[policy] = asdict(metrics)
        paper = result.scenario.paper.get(policy, {})
        if any(name in paper for name in _FIGURES.split()):
            columns[f"{policy} (paper)"] = paper
    print_figures(console, _title(point.setting), _FIGURES, columns)
