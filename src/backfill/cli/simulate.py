"""``backfill simulate``: an operator's questions about traffic, in simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App
from rich.console import Console

from backfill.cli.startup import NEEDS_MATPLOTLIB, can_plot, check_folder, check_plot
from backfill.cli.tables import print_figures
from backfill.core.config import at_least
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.scenarios import VARIANTS, Scenario
from backfill.simulation.seeds import FIRST_REPORTED_SEED, SeededResult


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
        console.print(f"No plot: it needs {NEEDS_MATPLOTLIB}.", highlight=False, markup=False)


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


app = App(name="simulate", help="Run the serving code in simulated time.")
app.command("backfill.cli.simulate_run:app", name="run", help="Run your own traffic in simulated time.")
app.command("backfill.cli.simulate_fleet:app", name="fleet", help="Compare routers of a fleet of replicas.")
app.command("backfill.cli.simulate_goodput:app", name="goodput", help="Sweep goodput against load.")


def _title(setting: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


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
