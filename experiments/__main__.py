"""``python -m experiments PAPER FIGURE``: studies of papers on the simulator, beside the papers' figures."""

from __future__ import annotations

from typing import NamedTuple

from cyclopts import App

from backfill.cli.main import main


class Command(NamedTuple):
    """Where a study's command is, and what it runs. A module is imported once its command runs."""

    where: str
    help: str


PAPERS = {
    "blendserve": {
        "table2": Command("blendserve.figures:table2", "Table 2, figures 6 and 7: four pools."),
        "grid": Command("blendserve.figures:grid", "Figures 9 to 12: densities and sharings."),
        "usage": Command("blendserve.figures:usage", "Figure 8: resources of the steps."),
        "coserving": Command("blendserve.coserving:app", "Orders beside online traffic (ours)."),
        "lengths": Command("blendserve.lengths:app", "Estimates of output lengths (ours)."),
        "engines": Command("blendserve.engines:app", "Several engines on one batch (ours)."),
    },
    "bros": {
        "alone": Command("bros.alone:app", "Figure 12: online requests without offline ones."),
        "tradeoff": Command("bros.tradeoff:app", "Figures 10 and 11: online latency and offline throughput."),
        "cache": Command("bros.cache:app", "Figure 13: two requests in a block."),
        "overhead": Command("bros.overhead:app", "Figure 14: what scheduling takes of an iteration."),
    },
    "conserve": {
        "fig5": Command("conserve.figures:fig5", "Figure 5: a conversation trace with a burst."),
        "fig6": Command("conserve.figures:fig6", "Figure 6: load ON, OFF and ON again."),
        "fig7": Command("conserve.figures:fig7", "Figure 7: burstiness and rates."),
        "fig8": Command("conserve.figures:fig8", "Figure 8: one optimisation after another."),
        "slow-1": Command("conserve.figures:slow_1", "Chats beside a batch on an A100 (ours)."),
        "slow-10": Command("conserve.figures:slow_10", "The same on a device ten times as slow."),
        "slow-100": Command("conserve.figures:slow_100", "The same on a device a hundred times as slow."),
    },
    "selectn": {
        "slo": Command("selectn.figures:slo", "Figure 9: latency over its objective."),
        "memory": Command("selectn.figures:memory", "Figure 10: host memory and throughput."),
        "interval": Command("selectn.figures:interval", "Figure 11: every interval."),
        "contention": Command("selectn.figures:contention", "Figure 12: two devices on one bus."),
        "maxlen": Command("selectn.figures:maxlen", "Figure 14: tokens of KV at each interval."),
    },
}

app = App(
    name="python -m experiments",
    help="Studies of papers on the simulator.",
    help_format="plaintext",
    version_flags=(),
)


@app.default
def list_studies() -> None:
    """Print every study."""
    for paper, studies in PAPERS.items():
        print(paper)
        for name, study in studies.items():
            print(f"  {name:<12}{study.help}")


for _paper, _studies in PAPERS.items():
    _commands = App(name=_paper, help=f"{len(_studies)} studies.")
    for _name, _study in _studies.items():
        _commands.command(f"experiments.{_study.where}", name=_name, help=_study.help)
    app.command(_commands)


if __name__ == "__main__":
    main(app)
