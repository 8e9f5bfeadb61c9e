"""``backfill simulate bros-cache``: two requests in a block against other ways to preempt."""

from __future__ import annotations

from rich.console import Console

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.simulate_bros import BrosOptions, title_of
from backfill.cli.sweeps import SweepOptions
from backfill.cli.tables import print_rows
from backfill.simulation.bros import Setting
from backfill.simulation.bros_cache import (
    BASELINES,
    BIDIRECTIONAL,
    CACHE_MODEL,
    CACHE_POLICIES,
    CACHE_RATE_PER_S,
    PAPER_RATIOS,
    CachePoint,
    run_bros_cache,
)

_POINTS = BrosOptions(models=CACHE_MODEL, rates=f"{CACHE_RATE_PER_S:g}")


def bros_cache(options: SweepOptions, points: BrosOptions = _POINTS) -> None:
    """Run BROS's figure 13: blocks that two requests share, and other ways to preempt a request.

    Prints attainments beside the paper's ratios and what the KV pool is used for; the plot has it over time.
    """
    console = Console()
    experiment = points.experiment(options, CACHE_POLICIES)
    path = options.begin(console, "BROS, figure 13: bidirectional KV cache", "bros-cache")

    def on_done(setting: Setting, policy: str) -> None:
        console.print(f"{title_of(setting)}: {policy} done", style="dim")

    with interruptible():
        result = run_bros_cache(experiment, options.jobs, on_done)
    for point in result.points:
        _print_latencies(console, point)
        _print_pool(console, point)
        _print_ratios(console, point)
    if path is not None:
        from backfill.simulation.bros_plot import save_cache_plot

        save_cache_plot(path, result)
    options.end(console, path, result.as_json())


app = command(
    bros_cache,
    {
        "Points": "models workloads rates duration online_lengths",
        "Runs": "policies seeds jobs",
        "Output": "plot json",
    },
    prefix="BACKFILL_SIMULATE_BROS_CACHE_",
)

_LATENCIES = {
    "normalized_latency_s": ("latency/token s", ".3f"),
    "ttft_attainment": ("TTFT met", ".1%"),
    "tpot_attainment": ("TPOT met", ".1%"),
    "offline_rps": ("offline req/s", ".2f"),
    "num_preemptions": ("preempted", ".0f"),
    "recomputed_token_share": ("recomputed", ".1%"),
    "restored_token_share": ("restored", ".1%"),
}
_POOL = {
    "usable": ("usable", ".3f"),
    "online": ("online", ".1%"),
    "offline": ("offline", ".1%"),
    "shared": ("shared", ".2%"),
    "preempted": ("preempted", ".1%"),
    "sharing_steps": ("steps sharing", ".0%"),
    "num_entered_blocks": ("entered", ".0f"),
    "num_copied_slots": ("slots copied", ".0f"),
    "num_overwritten_slots": ("overwritten", ".0f"),
}
_RATIOS = {"ttft_attainment": ("TTFT met", ".2f"), "tpot_attainment": ("TPOT met", ".2f")}


def _print_latencies(console: Console, point: CachePoint) -> None:
    print_rows(console, title_of(point.setting), _LATENCIES, point.policies)


def _print_pool(console: Console, point: CachePoint) -> None:
    title = f"{title_of(point.setting)}: parts of the KV pool, means over time"
    print_rows(console, title, _POOL, point.policies)


def _print_ratios(console: Console, point: CachePoint) -> None:
    """How many times as many requests of the same load meet each objective."""
    for baseline in BASELINES:
        columns = {policy: point.over(policy, baseline) for policy in point.policies}
        if any(columns.values()):
            title = f"{title_of(point.setting)}: attainments over those of {baseline}"
            columns[f"{BIDIRECTIONAL} (paper)"] = dict(PAPER_RATIOS)
            print_rows(console, title, _RATIOS, columns)
