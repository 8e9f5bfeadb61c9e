"""The documents name every option and every metric."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from backfill.api.metrics import Metrics
from backfill.cli.main import app
from tests.builders import make_info

ROOT = Path(__file__).parent.parent


def test_every_metric_is_documented() -> None:
    metrics = Metrics("m", make_info())
    text = (ROOT / "docs" / "metrics.md").read_text()
    exposed = {family.name for family in metrics.registry.collect()}
    exposed |= {"backfill:num_requests_running", "backfill:num_requests_waiting"}
    assert len(exposed) > 20
    for name in exposed:
        assert name.removeprefix("backfill:") in text, name


def test_every_command_and_option_has_help() -> None:
    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    assert set(commands) == {"serve", "pull"}
    for command in commands.values():
        assert command.help
        for parameter in command.params:
            assert parameter.name == "help" or parameter.help, (command.name, parameter.name)


def test_options_in_the_readme_exist() -> None:
    group = typer.main.get_command(app)
    known = {
        option
        for command in group.commands.values()  # type: ignore[attr-defined]
        for parameter in command.params
        for option in parameter.opts
    }
    mentioned = set(re.findall(r"`?(--[a-z][a-z-]+)", (ROOT / "README.md").read_text()))
    assert mentioned - {"--help"} <= known


def test_links_between_documents_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
