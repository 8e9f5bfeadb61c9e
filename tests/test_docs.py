"""The documents name every option and every metric."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App

from backfill.api.metrics.registry import Metrics
from backfill.bench.coserve_figures import CoserveFigures, policy_json
from backfill.cli.main import app
from backfill.core.counters import ClassCounters
from backfill.core.slo import SLO
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats
from backfill.http.metrics import JobMetrics
from backfill.jobs.open_batch import JobsSnapshot
from backfill.preparation.client import PreparationClient
from backfill.preparation.messages import PreparationSetup
from backfill.protocol.chat import ChatCompletionRequest
from backfill.protocol.generation import CompletionRequest
from backfill.protocol.generation_fields import IGNORED_FIELDS, UNSUPPORTED_FIELDS
from backfill.protocol.preparer import ServedModel
from experiments.__main__ import app as studies
from tests.builders import make_info, make_profile

ROOT = Path(__file__).parent.parent


def commands(root: App = app) -> dict[str, App]:
    """Every command by its words after ``backfill``, or after ``python -m experiments``."""
    found: dict[str, App] = {}

    def collect(words: tuple[str, ...], command: App) -> None:
        children = {
            name: child for name, child in command.resolved_commands().items() if not name.startswith("-")
        }
        if not children or command.default_command is not None:
            found[" ".join(words)] = command
        for name, child in children.items():
            collect((*words, name), child)

    collect((), root)
    return found


def options(command: str, root: App = app) -> set[str]:
    """The flags of a command, without negative ones."""
    arguments = commands(root)[command].assemble_argument_collection()
    return {name for each in arguments for name in (*each.parameter.name, *each.parameter.alias)}


def options_page() -> str:
    """``docs/options.md``: each option once, with its help and the commands that have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    titles: dict[tuple[str, str], str] = {}
    for name, command in commands().items():
        for argument in command.assemble_argument_collection():
            parameter = argument.parameter
            flags = ", ".join(f"`{flag}`" for flag in (*parameter.name, *parameter.alias))
            row = (flags, " ".join((parameter.help or "").split()).replace("|", "\\|"))
            rows.setdefault(row, []).append(name)
            titles.setdefault(row, str(parameter.group[0].name))
    text = (
        "# Options\n\nEvery option of every command. [operations.md](operations.md) says how files and "
        "variables set\nthem. `tests/test_docs.py`, run as a module, writes this page.\n"
    )
    for title in dict.fromkeys(titles.values()):
        text += f"\n## {title}\n\n| option | meaning | commands |\n| --- | --- | --- |\n"
        for row, names in rows.items():
            if titles[row] == title:
                text += f"| {row[0]} | {row[1]} | {', '.join(names)} |\n"
    return text


def parse(command: App, arguments: Sequence[str]) -> None:
    """Raises: an exception for arguments that are not understood."""
    command.parse_args(arguments, exit_on_error=False, print_error=False)


def exposed_metrics() -> dict[str, str]:
    """The kind of each metric of a server, by its name without a prefix."""
    idle = ClassStats(0, 0, ClassCounters())
    step = StepStats("online", 1, 0.1, 0.1, stop_latency_s=0.1)
    jobs = JobMetrics("m")
    jobs.watch(
        lambda: JobsSnapshot(jobs_by_status={}, num_lines_queued=0, oldest_line_s=0.0, least_slack_s=0.0)
    )
    model = ServedModel(names=("m",), root="m", folder=Path(), created=0)
    metrics = Metrics(
        "m",
        make_info(),
        slo=SLO(1.5, 0.11),
        preparation=PreparationClient(PreparationSetup(model=model, order="fcfs")),
        jobs=jobs,
        vllm_names=True,
    )
    metrics.engine.on_profile(make_profile())
    metrics.engine.on_report(StepReport([], EngineStats(idle, idle, 0.0, 16, 0.0, 0, step)))
    kinds = {}
    for family in metrics.registry.collect():
        name = re.sub("^(backfill|vllm):", "", family.name)
        kinds[f"{name}_total" if family.type == "counter" else name] = family.type
    return kinds


def test_the_metrics_of_a_server_are_those_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    first_cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    rows = [
        row
        for cell in first_cells
        for row in re.findall(r"`(\w+)(?:\{\w+\})?` \((gauge|counter|histogram)\)", cell)
    ]
    assert len(rows) == len(dict(rows)) == sum(cell.count("`") // 2 for cell in first_cells)
    assert dict(rows) == exposed_metrics()


def test_every_command_and_option_has_help() -> None:
    found = commands()
    assert found.keys() >= {"serve", "run-batch", "pull", "bench coserve"}
    for name, command in found.items():
        assert command.help, name
        for argument in command.assemble_argument_collection():
            assert argument.parameter.help, (name, argument.name)


def test_the_page_of_options_is_current() -> None:
    """``python -m tests.test_docs`` writes it."""
    assert (ROOT / "docs" / "options.md").read_text() == options_page()


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


def test_every_figure_of_coserving_is_documented() -> None:
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    section = text[text.index("## Online beside offline") : text.index("## Bad conditions")]
    for figure in policy_json([CoserveFigures()] * 2, {}):
        assert f"`{figure}`" in section, figure


def test_every_field_of_requests_is_documented_as_what_it_is() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    fields = {*CompletionRequest.known_fields(), *ChatCompletionRequest.known_fields()}
    no_effect = {*IGNORED_FIELDS, "user"}
    expected = {
        "Supported": {name for name in fields if "." not in name} - no_effect,
        "Ignored": no_effect,
        "Refused": UNSUPPORTED_FIELDS.keys(),
    }
    for title, names in expected.items():
        section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == names, title


DOCUMENTS = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
)
# In backticks, and not in the repository: what a command writes or reads.
ELSEWHERE = {"SCENARIO.png", "config.json", "files/"}


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
    folders = (ROOT, ROOT / "src" / "backfill", ROOT / "benchmarks", ROOT / "experiments")
    path = r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|json|png|h|cpp)|(?:[\w.-]+/)+)(?![\w/.-])"
    num_found = 0
    for document in DOCUMENTS:
        for span in re.findall(r"`([^`\n]+)`", without_blocks(document)):
            for name in set(re.findall(path, span)) - ELSEWHERE:
                assert any((folder / name).exists() for folder in folders), f"{document.name}: {name}"
                num_found += 1
    assert num_found > 50


def test_options_in_documents_exist() -> None:
    known = {option for root in (app, studies) for name in commands(root) for option in options(name, root)}
    known |= {"--help", *(f"--no-{option[2:]}" for option in known)}
    known |= {"--scheduling-policy"}  # vLLM's
    known |= {"--burstiness", "--goodput", "--request-rate-series", "--workers-max"}  # of load generators
    known |= {"--head", "--address"}  # of `ray start`
    known |= {"--worker-urls"}  # SMG's
    scripts = "".join(script.read_text() for script in (ROOT / "benchmarks").glob("*.py"))
    for document in DOCUMENTS:
        text = re.sub(r"^```text.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)  # others'
        for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)) - known:
            assert f'"{option}"' in scripts, f"{document.name}: {option}"


def test_metrics_in_documents_exist() -> None:
    listed = (ROOT / "docs" / "metrics.md").read_text()
    for document in DOCUMENTS:
        for name in re.findall(r"backfill:(\w+)", document.read_text()):
            assert name in listed, f"{document.name}: {name}"


if __name__ == "__main__":
    (ROOT / "docs" / "options.md").write_text(options_page())
