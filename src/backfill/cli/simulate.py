"""``backfill simulate``: the experiments of the papers on simulated devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from backfill.core.errors import BackfillError, ConfigError
from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.scenarios import Inputs, ScenarioResult, build_scenario, run_scenario
from backfill.simulation.variants import variant_names

# Column, attribute of PolicyMetrics, format.
_COLUMNS = (
    ("TTFT P50 s", "ttft_p50_s", ".3f"),
    ("P99 s", "ttft_p99_s", ".3f"),
    ("ITL P50 s", "itl_p50_s", ".3f"),
    ("P99 s", "itl_p99_s", ".3f"),
    ("TTFT met", "ttft_attainment", ".1%"),
    ("ITL met", "itl_attainment", ".1%"),
    ("tok/s", "total_tok_s", ".0f"),
    ("online", "online_tok_s", ".0f"),
    ("offline", "offline_tok_s", ".0f"),
    ("recomputed", "recomputed_token_share", ".2%"),
    ("restored", "restored_token_share", ".1%"),
    ("scheduling", "scheduling_time_share", ".2%"),
)


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
    plot: Annotated[Path | None, typer.Option(help="PNG to write; SCENARIO.png by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on a line.")] = False,
) -> None:
    """Run an experiment of ConServe's evaluation and print its figures beside the paper's.

    Without traces the workloads are drawn with the published traces' means and variation.
    """
    console = Console(width=150)
    try:
        path = plot or Path(f"{scenario}.png")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"--plot {path} cannot be written: there is no folder {path.parent}.")
        if online_trace is not None and scenario != "conserve-fig5":
            raise ConfigError(
                "--online-trace is for conserve-fig5; the requests of the others have one length."
            )
        built = build_scenario(scenario, Inputs(online_trace, offline_lengths))
        chosen = built.policies if policies is None else _parse_policies(policies)
        console.print(f"[bold]{built.title}[/bold]")
        console.print(
            f"{built.hardware.name}, {built.hardware.kv_tokens} tokens of KV, "
            f"objectives {built.slo.ttft_s:g} s and {built.slo.tpot_s * 1000:g} ms"
        )

        def on_done(setting: Mapping[str, float], policy: str, metrics: PolicyMetrics) -> None:
            where = ", ".join(f"{name} {value:g}" for name, value in setting.items())
            console.print(f"{where}: {policy} done, {metrics.num_steps} steps", style="dim")

        result = run_scenario(built, chosen, on_done)
        for table in _tables(result):
            console.print(table)
        _save_plot(path, result)
        console.print(f"wrote {path}")
    except BackfillError as error:
        typer.echo(f"backfill: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(result.as_json()))


def _parse_policies(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in variant_names():
            raise ConfigError(
                f"--policies: there is no policy {name!r}; there are {', '.join(variant_names())}."
            )
    if not names:
        raise ConfigError(f"--policies names none; there are {', '.join(variant_names())}.")
    return tuple(names)


def _tables(result: ScenarioResult) -> list[Table]:
    tables = []
    for point in result.points:
        table = Table(title=", ".join(f"{name} {value:g}" for name, value in point.setting.items()))
        table.add_column("policy")
        for column, _, _ in _COLUMNS:
            table.add_column(column, justify="right")
        for policy, metrics in point.metrics.items():
            table.add_row(policy, *(format(getattr(metrics, name), spec) for _, name, spec in _COLUMNS))
            printed = result.scenario.paper.get(policy, {})
            if any(name in printed for _, name, _ in _COLUMNS):
                table.add_row(
                    "  paper",
                    *(format(printed[name], spec) if name in printed else "" for _, name, spec in _COLUMNS),
                )
        tables.append(table)
    return tables


def _save_plot(path: Path, result: ScenarioResult) -> None:
    try:
        from backfill.simulation.plot import save_plot
    except ImportError as error:
        raise ConfigError("Plots need matplotlib: pip install 'backfill[bench]'.") from error
    save_plot(path, result)
