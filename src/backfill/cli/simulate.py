"""``backfill simulate``: the experiments of the papers on simulated devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backfill.cli.interrupts import interruptible
from backfill.cli.typer_command import typer_command
from backfill.core.errors import BackfillError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from backfill.simulation.metrics import PolicyMetrics
    from backfill.simulation.scenarios import PointResult, ScenarioResult

# Name in the table, attribute of PolicyMetrics, format.
_FIGURES = (
    ("TTFT P50 s", "ttft_p50_s", ".3f"),
    ("TTFT P99 s", "ttft_p99_s", ".3f"),
    ("ITL P50 s", "itl_p50_s", ".3f"),
    ("ITL P99 s", "itl_p99_s", ".3f"),
    ("TTFT met", "ttft_attainment", ".1%"),
    ("ITL met", "itl_attainment", ".1%"),
    ("total tok/s", "total_tok_s", ".0f"),
    ("online tok/s", "online_tok_s", ".0f"),
    ("offline tok/s", "offline_tok_s", ".0f"),
    ("recomputed", "recomputed_token_share", ".2%"),
    ("restored", "restored_token_share", ".1%"),
    ("scheduling", "scheduling_time_share", ".2%"),
)
# Where the traces of docs/simulation.md are published.
_TRACES = "https://github.com/microsoft/vidur/tree/main/data/processed_traces"
_CONVERSATIONS = "splitwise_conv.csv"
_SUMMARIES = "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"


def simulate(
    scenario: Annotated[str, typer.Argument(help="conserve-fig5, -fig6, -fig7 or -fig8.")],
    policies: Annotated[
        str | None, typer.Option(help="Policies to run, separated by commas; by default the paper's.")
    ] = None,
    online_trace: Annotated[
        Path | None, typer.Option(help="CSV of a conversation trace with arrival times (figure 5).")
    ] = None,
    offline_lengths: Annotated[
        Path | None, typer.Option(help="CSV of prompt and output lengths of the offline work.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="PNG to write. Default: SCENARIO.png, where matplotlib is installed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on a line.")] = False,
) -> None:
    """Run an experiment of ConServe's evaluation and print its figures beside the paper's.

    Without traces the workloads are drawn with the published traces' means and variation.
    """
    from rich.console import Console

    from backfill.cli.plots import NEEDS, can_plot, check_folder, check_plot
    from backfill.simulation.scenarios import Inputs, build_scenario, run_scenario

    console = Console()
    try:
        check_plot(plot)
        path = plot
        if plot is None and can_plot():
            path = Path(f"{scenario}.png")
            check_folder("--plot", path)
        if online_trace is not None and scenario != "conserve-fig5":
            raise ConfigError(
                "--online-trace is for conserve-fig5; the requests of the others have one length."
            )
        _check_trace("--online-trace", online_trace, _CONVERSATIONS)
        _check_trace("--offline-lengths", offline_lengths, _SUMMARIES)
        built = build_scenario(scenario, Inputs(online_trace, offline_lengths))
        chosen = built.policies if policies is None else _parse_policies(policies)
        console.print(f"[bold]{built.title}[/bold]")
        console.print(
            f"{built.hardware.name}, {built.hardware.kv_tokens} tokens of KV, "
            f"objectives {built.slo.ttft_s:g} s and {built.slo.tpot_s * 1000:g} ms"
        )
        if path is None:
            console.print(f"No plot: it needs {NEEDS}.", highlight=False, markup=False)

        def on_done(setting: Mapping[str, float], policy: str, metrics: PolicyMetrics) -> None:
            where = ", ".join(f"{name} {value:g}" for name, value in setting.items())
            console.print(f"{where}: {policy} done, {metrics.num_steps} steps", style="dim")

        with interruptible():
            result = run_scenario(built, chosen, on_done)
        for point in result.points:
            _print_point(console, point, result)
        if path is not None:
            from backfill.simulation.plot import save_plot

            save_plot(path, result)
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
    except BackfillError as error:
        typer.echo(f"backfill: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(result.as_json()))


def _check_trace(option: str, path: Path | None, published_as: str) -> None:
    """Raises: ConfigError that says where such a file is published."""
    if path is not None and not path.exists():
        raise ConfigError(
            f"{option} {path} cannot be read: there is no such file. "
            f"The one of docs/simulation.md is {published_as} of {_TRACES}."
        )


def _parse_policies(text: str) -> tuple[str, ...]:
    from backfill.simulation.variants import variant_names

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in variant_names():
            raise ConfigError(
                f"--policies: there is no policy {name!r}; there are {', '.join(variant_names())}."
            )
    if not names:
        raise ConfigError(f"--policies names none; there are {', '.join(variant_names())}.")
    return tuple(names)


def _print_point(console: Console, point: PointResult, result: ScenarioResult) -> None:
    """A column for each policy, and beside it one of what the paper prints of it."""
    from backfill.cli.tables import print_figures

    columns = {}
    for policy, metrics in point.metrics.items():
        columns[policy] = [format(getattr(metrics, name), spec) for _, name, spec in _FIGURES]
        printed = result.scenario.paper.get(policy, {})
        cells = [format(printed[name], spec) if name in printed else "" for _, name, spec in _FIGURES]
        if any(cells):
            columns[f"{policy} (paper)"] = cells
    title = ", ".join(f"{name} {value:g}" for name, value in point.setting.items())
    print_figures(console, title, [name for name, _, _ in _FIGURES], columns)


app = typer_command("simulate", simulate)
