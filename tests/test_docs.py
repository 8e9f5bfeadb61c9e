"""The documents name every option and every metric."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from backfill.api.loop_lag import LoopLag
from backfill.api.metrics import JobMetrics, Metrics
from backfill.bench.coserve_figures import CoserveFigures, policy_json
from backfill.bench.metrics import compute_metrics
from backfill.bench.report import result_json
from backfill.bench.runner import Run
from backfill.cli.main import app
from backfill.core.slo import SLO
from backfill.jobs.manager import JobsSnapshot
from backfill.preparation.client import PreparationClient
from backfill.preparation.messages import PreparationSetup
from backfill.protocol.preparer import ServedModel
from tests.builders import make_info, make_profile

ROOT = Path(__file__).parent.parent


def commands() -> dict[str, Any]:
    """Every command by its words after ``backfill``."""
    found: dict[str, Any] = {}

    def collect(words: tuple[str, ...], command: Any) -> None:
        children = getattr(command, "commands", None)
        if children is None:
            found[" ".join(words)] = command
        for name, child in (children or {}).items():
            collect((*words, name), child)

    collect((), typer.main.get_command(app))
    return found


def options(command: str) -> set[str]:
    return {option for parameter in commands()[command].params for option in parameter.opts}


def test_every_metric_is_documented() -> None:
    jobs = JobMetrics("m")
    jobs.watch(
        lambda: JobsSnapshot(jobs_by_status={}, num_lines_queued=0, oldest_line_s=0.0, least_slack_s=None)
    )
    model = ServedModel(names=("m",), root="m", folder=Path(), created=0)
    preparation = PreparationClient(PreparationSetup(model=model))
    lag = LoopLag("m")
    metrics = Metrics("m", make_info(), slo=SLO(1.5, 0.11), loop_lag=lag, preparation=preparation, jobs=jobs)
    metrics.engine.on_profile(make_profile())
    text = (ROOT / "docs" / "metrics.md").read_text()
    exposed = {family.name for family in metrics.registry.collect()}
    exposed |= {"backfill:num_requests_running", "backfill:num_requests_waiting"}
    assert len(exposed) > 20
    for name in exposed:
        assert name.removeprefix("backfill:") in text, name


def test_every_command_and_option_has_help() -> None:
    found = commands()
    assert found.keys() >= {"serve", "run-batch", "pull", "bench serve"}
    for name, command in found.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.name == "help" or parameter.help, (name, parameter.name)


def test_options_in_the_readme_exist() -> None:
    known = {option for name in commands() for option in options(name)}
    mentioned = set(re.findall(r"`?(--[a-z][a-z-]+)", (ROOT / "README.md").read_text()))
    assert mentioned - {"--help"} <= known


def test_every_option_of_batches_is_documented() -> None:
    text = (ROOT / "docs" / "batch.md").read_text()
    own = options("run-batch") - options("serve")
    for option in own | {option for option in options("serve") if option.startswith("--batch-")}:
        if option != "--batch-api":
            assert f"`{option}`" in text, option


def test_every_option_of_the_load_generator_is_documented() -> None:
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    for option in options("bench serve") - {"--help"}:
        assert f"`{option}`" in text, option


def test_every_option_and_figure_of_coserving_is_documented() -> None:
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    section = text[text.index("## Online beside offline") : text.index("## Agreement")]
    for option in options("bench coserve") - {"--help"}:
        assert f"`{option}`" in section, option
    for figure in policy_json([CoserveFigures()] * 2, {}):
        assert f"`{figure}`" in section, figure


def test_every_key_of_a_result_is_documented() -> None:
    run = Run(started_at=0.0, num_requests=0)
    metrics = compute_metrics([], duration_s=1.0, num_requests=0, objectives_s={"ttft": 1.0})
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    statistic = r"(mean|median|std|p50|p90|p99)_(\w+)_ms"
    for key in result_json(metrics, run, {}, is_detailed=True):
        name = match[2] if (match := re.fullmatch(statistic, key)) else key
        assert f"`{name}`" in text, key


DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
# In backticks, and not in the repository: what a command writes or reads.
ELSEWHERE = {"SCENARIO.png", "LABEL-RATEqps-MODEL-DATE.json", "config.json", "files/", "suspects/"}


def without_blocks(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", document.read_text()):
            linked = document.parent / target if target else document
            assert linked.exists(), f"{document.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{document.name}: {target}#{anchor}"


def test_files_in_documents_exist() -> None:
    """Names are from the root, the package, or the folder of the benchmarks; published CSVs are elsewhere."""
    folders = (ROOT, ROOT / "src" / "backfill", ROOT / "benchmarks")
    path = r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|json|png|h|cpp)|(?:[\w.-]+/)+)(?![\w/.-])"
    num_found = 0
    for document in DOCUMENTS:
        for span in re.findall(r"`([^`\n]+)`", without_blocks(document)):
            for name in set(re.findall(path, span)) - ELSEWHERE:
                assert any((folder / name).exists() for folder in folders), f"{document.name}: {name}"
                num_found += 1
    assert num_found > 50


def test_options_in_documents_exist() -> None:
    known = {option for name in commands() for option in options(name)}
    known |= {"--help", "--no-batch-api", "--no-self-timed"}
    known.add("--scheduling-policy")  # vLLM's
    scripts = "".join(script.read_text() for script in (ROOT / "benchmarks").glob("*.py"))
    for document in DOCUMENTS:
        for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", document.read_text())) - known:
            assert f'"{option}"' in scripts, f"{document.name}: {option}"


def test_metrics_in_documents_exist() -> None:
    listed = (ROOT / "docs" / "metrics.md").read_text()
    for document in DOCUMENTS:
        for name in re.findall(r"backfill:(\w+)", document.read_text()):
            assert name in listed, f"{document.name}: {name}"
