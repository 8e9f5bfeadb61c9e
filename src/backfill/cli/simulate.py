"""``backfill simulate``: the experiments of the papers on simulated devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.plots import NEEDS, can_plot, check_folder, check_plot
from backfill.cli.tables import print_figures
from backfill.core.config import at_least
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.scenarios import VARIANTS, Inputs, Scenario, build_scenario
from backfill.simulation.seeds import FIRST_REPORTED_SEED, SeededResult, run_seeds

_FIGURES = (
    "ttft_p50_s ttft_p99_s itl_p50_s itl_p99_s ttft_attainment itl_attainment attainment goodput_rps "
    "total_tok_s online_tok_s offline_tok_s recomputed_token_share restored_token_share scheduling_time_share"
)
# Where the traces of docs/simulation.md are published.
_TRACES = "https://github.com/microsoft/vidur/tree/main/data/processed_traces"
_CONVERSATIONS = "splitwise_conv.csv"
_SUMMARIES = "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOptions:
    """Which seeds a simulation runs under.

    Attributes:
        seeds: seeds to run; each draws a workload and the noise of the device. Figures are medians, with the
            least and the most.
        first_seed: the first of them. Rates and limits were tuned with seed 0.
    """

    seeds: int = 1
    first_seed: int = FIRST_REPORTED_SEED

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        at_least("seeds", self.seeds, 1)
        at_least("first_seed", self.first_seed, 0)

    def all(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """One experiment.

    Attributes:
        scenario: one of conserve-fig5, conserve-fig6, conserve-fig7, conserve-fig8, slow-1, slow-10 and
            slow-100.
        policies: policies to run, separated by commas; the paper's by default.
        online_trace: CSV of a conversation trace with arrival times (figure 5).
        offline_lengths: CSV of prompt and output lengths of the offline work.
        exact: a device without noise and host time, and an engine that predicts it perfectly.
        plot: PNG to write; SCENARIO.png by default, if matplotlib is installed.
        json: end with one JSON object on a line.
    """

    scenario: str
    policies: str | None = None
    online_trace: Path | None = None
    offline_lengths: Path | None = None
    exact: bool = False
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


def simulate(options: SimulateOptions, seeds: SeedOptions) -> None:
    """Run an experiment of ConServe, or one of the commands below, and print its figures beside the paper's.

    Without traces the workloads are drawn with the published traces' means and variation. `backfill simulate
    run` takes your own traffic.
    """
    console = Console()
    path = plot_path(options.plot, f"{options.scenario}.png")
    first = _build(options, seeds.first_seed)
    policies = policy_names(options.policies) or first.policies
    print_scenario(console, first, path)
    with interruptible():
        result = run_seeds(
            lambda seed: _build(options, seed),
            seeds.all(),
            policies,
            lambda seed, setting, policy, metrics: print_done(console, seed, setting, policy, metrics),
        )
    print_result(console, result, _FIGURES, path)
    if options.json:
        print(json.dumps(result.as_json()))


def policy_names(policies: str | None) -> tuple[str, ...] | None:
    """None for the scenario's. Raises: ConfigError."""
    if policies is None:
        return None
    names = tuple(name.strip() for name in policies.split(",") if name.strip())
    known = ", ".join(VARIANTS)
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(f"`policies`: there is no policy {name!r}; there are {known}.")
    if not names:
        raise ConfigError(f"`policies` names none; there are {known}.")
    return names


def plot_path(asked: Path | None, default: str) -> Path | None:
    """The file to draw; None without matplotlib. Raises: ConfigError if it cannot be written."""
    check_plot(asked)
    if asked is not None or not can_plot():
        return asked
    path = Path(default)
    check_folder("plot", path)
    return path


def print_scenario(console: Console, scenario: Scenario, plot: Path | None) -> None:
    """Print what is about to run."""
    console.print(f"[bold]{scenario.title}[/bold]")
    console.print(
        f"{scenario.hardware.name}, {scenario.hardware.kv_tokens} tokens of KV, "
        f"objectives {scenario.slo.ttft_s:g} s and {scenario.slo.tpot_s * 1000:g} ms"
    )
    if plot is None:
        console.print(f"No plot: it needs {NEEDS}.", highlight=False, markup=False)


def print_done(
    console: Console, seed: int, setting: Mapping[str, float], policy: str, metrics: PolicyMetrics
) -> None:
    """Print that a replay has ended."""
    what = _title({**setting, "seed": seed})
    console.print(f"{what}: {policy} done, {metrics.num_steps} steps", style="dim")


def print_result(console: Console, result: SeededResult, figures: str, plot: Path | None) -> None:
    """Print a table for each point, and draw the first seed's run."""
    for index in range(len(result.first.points)):
        _print_point(console, index, result, figures)
    if plot is not None:
        from backfill.simulation.plot import save_plot

        save_plot(plot, result.first)
        console.print(f"wrote {plot}", markup=False, soft_wrap=True)


app = command(
    simulate,
    {
        "Experiment": "scenario policies online_trace offline_lengths exact",
        "Seeds": "seeds first_seed",
        "Output": "plot json",
    },
    positional="scenario",
    prefix="BACKFILL_SIMULATE_",
)
app.command("backfill.cli.simulate_run:app", name="run", help="Run your own traffic in simulated time.")
app.command("backfill.cli.simulate_fleet:app", name="fleet", help="Compare routers of a fleet of replicas.")
app.command("backfill.cli.simulate_goodput:app", name="goodput", help="Sweep goodput against load.")


def _build(options: SimulateOptions, seed: int) -> Scenario:
    """Raises: ConfigError."""
    scenario = build_scenario(options.scenario, Inputs(options.online_trace, options.offline_lengths, seed))
    return scenario.exact() if options.exact else scenario


def _title(setting: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def _check_trace(field: str, path: Path | None, published_as: str) -> None:
    """Raises: ConfigError that says where such a file is published."""
    if path is not None and not path.exists():
        raise ConfigError(
            f"`{field}` {path} cannot be read: there is no such file. "
            f"The one of docs/simulation.md is {published_as} of {_TRACES}."
        )


def _print_point(console: Console, index: int, result: SeededResult, figures: str) -> None:
    """Print a column for each policy, and beside it the paper's figures if it has some."""
    columns: dict[str, Mapping[str, object]] = {}
    is_one_seed = len(result.runs) == 1
    for policy, spreads in result.spreads(index).items():
        columns[policy] = {name: spread.median if is_one_seed else spread for name, spread in spreads.items()}
        paper = result.scenario.paper.get(policy, {})
        if any(name in paper for name in figures.split()):
            columns[f"{policy} (paper)"] = paper
    title = _title(result.first.points[index].setting)
    if not is_one_seed:
        title += f", {len(result.runs)} seeds: median (least to most)"
    print_figures(console, title, figures, columns)
