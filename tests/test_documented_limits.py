"""Numbers, names and codes that documents repeat from the code."""
# ruff: noqa: RUF001 (the multiplication sign of the documents)

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import backfill
from backfill.api import server
from backfill.cli.run_batch import run_batch
from backfill.cli.serve import serve
from backfill.core import request, structured
from backfill.core.config import SchedulerConfig
from backfill.costs import copy_profiler, profiler
from backfill.costs.hardware import hardware_profile_names, load_hardware_profile
from backfill.engine import hang, process, supervisor
from backfill.execution import grammars
from backfill.generation import tokenizer
from backfill.http import bodies, connection, errors, multipart
from backfill.http import server as http_server
from backfill.http.config import ServerConfig
from backfill.jobs import claims, feeder, lines, manager, storage, suspects
from backfill.jobs.config import JobsConfig
from backfill.kvcache import protection
from backfill.preparation import process as preparation_process
from backfill.preparation import supervisor as preparation_supervisor
from backfill.protocol import chat, generation_fields, parsing, tools
from backfill.scheduling import builder, planner
from backfill.simulation.variants import VARIANTS
from tests.test_docs import ROOT

CONNECTION = connection.ConnectionLimits(max_connections=1)
SERVER = ServerConfig()
JOBS = JobsConfig(data_dir=Path())
UVICORN = http_server.HttpServer(object(), CONNECTION).config

# Beginning of a row in docs/operations.md, and what it must say.
OPERATIONS = [
    ("connections", f"at most {http_server.MAX_CONNECTIONS})"),
    ("headers", f"{CONNECTION.max_head_bytes >> 10} KiB"),
    ("URL", f"{CONNECTION.max_url_bytes >> 10} KiB"),
    ("time until the headers", f"({SERVER.head_timeout:g} s)"),
    ("idle time", f"{UVICORN.timeout_keep_alive} s"),
    ("pause within a body", f"({SERVER.body_timeout:g} s)"),
    ("time until a body", f"{http_server._WHOLE_BODY_FACTOR} × `--body-timeout`"),
    ("time until a body", f"{connection._MIN_BODY_BYTES_PER_S >> 10} KiB/s"),
    ("time in which a client", f"({SERVER.write_timeout:g} s)"),
    ("pipelined requests", f"{connection.MAX_PIPELINED} "),
    ("online choices", f"({SchedulerConfig().max_num_seqs} + {SERVER.max_queued_requests})"),
    ("offline choices", f"({SERVER.max_queued_offline_requests})"),
    ("JSON body; line", f"({SERVER.max_body_bytes >> 20} MiB)"),
    ("all JSON bodies", f"({SERVER.max_inflight_body_bytes >> 20} MiB); 1/{bodies._RESERVED_PART} "),
    ("all JSON bodies", f"at most {bodies.SMALL_BODY_BYTES >> 10} KiB"),
    ("JSON bodies of `flex`", f"1/{bodies._OFFLINE_PART} of"),
    (
        "objects and arrays",
        f"{parsing.MAX_CONTAINERS:,}; {parsing.MAX_KEYS:,}; {parsing.MAX_ITEMS:,}; {parsing.MAX_LEVELS} ",
    ),
    ("messages;", f"{chat.MAX_MESSAGES:,}; {chat.MAX_PARTS:,} "),
    ("tools;", f"{tools.MAX_TOOLS}; {tools.MAX_NAME_CHARS} "),
    (
        "choices (prompts",
        f"{generation_fields.MAX_CHOICES}; {generation_fields.MAX_STOP_STRINGS}; "
        f"{generation_fields.MAX_STOP_TOKENS}; {generation_fields.MAX_LOGIT_BIASES} ",
    ),
    ("choices × `max_tokens`", f"({SERVER.max_response_tokens:,})"),
    ("length of a `cache_salt`", f"{request.MAX_CACHE_SALT_CHARS} characters"),
    ("a schema, regular", f"{structured.MAX_GRAMMAR_CHARS:,}; 128; {grammars._MAX_COMPILE_S:g} "),
    ("characters of a", f"{tokenizer.MAX_CHARS:,} "),
    ("a step raises", f"After {process._MAX_FAILED_STEPS} failed steps"),
    ("the engine process dies", f"after {supervisor._RESTART_DELAY_S:g} s; "),
    ("the engine process dies", f"up to {supervisor._LONGEST_RESTART_DELAY_S:g} s"),
    ("the engine process dies", f"within {supervisor._QUICK_DEATH_S:g} s"),
    ("the engine sends no report", f"({hang._TIMEOUT_STEPS:g} × the longest possible step"),
    (
        "the engine sends no report",
        f"at least {hang._MIN_TIMEOUT_S:g} s; {hang._TIMEOUT_WITHOUT_PROFILE_S:g} s without",
    ),
    (
        f"{supervisor._MAX_QUICK_DEATHS} times in a row",
        f"lived for {supervisor._TRUSTED_AFTER_S:g} s",
    ),
    ("a preparation process dies", f"after {preparation_process._MAX_WORK_S:g} s"),
    ("a preparation process cannot", f"{preparation_supervisor._MAX_FAILED_LAUNCHES} times"),
    ("`SIGTERM`", f"({SERVER.shutdown_timeout:g} s)"),
]
BATCH = [
    ("`--batch-max-lines`", f"({JOBS.batch_max_lines:,})"),
    ("`--batch-max-bytes`", f"({JOBS.batch_max_bytes // 10**6} MB)"),
    ("`--batch-max-bytes`", f"{JOBS.max_file_bytes // 10**6} MB,"),
    ("`--batch-max-uploads`", f"({JOBS.batch_max_uploads})"),
    ("`--batch-max-open`", f"({JOBS.batch_max_open})"),
    ("`--batch-max-queued-lines`", f"({JOBS.batch_max_queued_lines:,})"),
    ("`--batch-min-free-gib`", f"({JOBS.min_free_bytes >> 30})"),
    ("`--batch-retention-hours`", f"({JOBS.retention_s / 3600:g})"),
    ("fixed", f"{multipart.MAX_OVERHEAD_BYTES >> 10} KiB"),
]
PROSE = [
    ("operations.md", f"from 1 to {errors.MAX_RETRY_AFTER_S} s"),
    ("operations.md", f"at the latest {server._BODIES_WITHIN_S:g} s"),
    ("operations.md", f"a salt of 1 to {request.MAX_CACHE_SALT_CHARS} characters"),
    ("kv-cache.md", f"at most {builder._MAX_PREFIX_WAITS} steps more than"),
    ("kv-cache.md", f"at {planner._MAX_PASSED_OVER:,} waiting requests more than it can hold"),
    ("kv-cache.md", f"at most {builder._MAX_LOOKED_UP} of those that wait"),
    ("kv-cache.md", f"({planner._MAX_UNTIMED_COPIES} copies without one)"),
    (
        "kv-cache.md",
        f"at most {1000 * profiler._INTERFERENCE_BUDGET_S / (2 * profiler._FEWEST_INTERFERENCE_ROUNDS):g} ms",
    ),
    ("kv-cache.md", f"the median of the differences, at most {copy_profiler._MOST_INTERFERENCE:g}."),
    (
        "kv-cache.md",
        f"`adaptive` copies more and more: {SchedulerConfig().checkpoint_from} and "
        f"{SchedulerConfig().checkpoint_all_from}.",
    ),
    ("coserving.md", f"`--max-stop-s` ({1000 * SchedulerConfig().max_stop_s:g} ms)"),
    ("kv-cache.md", f"(weight {protection._WEIGHT:g})"),
    ("kv-cache.md", f"from {protection._LEAST_S:g} to {protection._MOST_S:g} s"),
    ("api.md", f"up to {request.MAX_FORCED_TOKENS} follow"),
    ("batch.md", f"lost {suspects.MAX_LONE_LOSSES} times with no other request"),
    ("batch.md", f"or {suspects.MAX_ONLY_LINE_LOSSES} times as the only line"),
    ("batch.md", f"waits for it {manager.STOP_TIMEOUT_S:g} s"),
    ("batch.md", f"at most {feeder.MAX_BUFFERED_BYTES >> 20} MiB"),
    ("batch.md", f"until they have {claims._LINES_AHEAD} times what they hand"),
    ("batch.md", f"answer within {storage.OPEN_TIMEOUT_S:g} s"),
    ("batch.md", f"died {supervisor._MAX_QUICK_DEATHS} times in a row"),
]


def text_of(document: str) -> str:
    """The document with every run of white space as one space, so that line breaks do not matter."""
    return " ".join((ROOT / "docs" / document).read_text().split())


def row(document: str, start: str) -> str:
    text = (ROOT / "docs" / document).read_text()
    (found,) = re.findall(rf"^\| {re.escape(start)}.*$", text, re.MULTILINE)
    return str(found)


@pytest.mark.parametrize(("start", "stated"), OPERATIONS)
def test_limits_of_the_server(start: str, stated: str) -> None:
    assert stated in row("operations.md", start)


@pytest.mark.parametrize(("start", "stated"), BATCH)
def test_limits_of_batches(start: str, stated: str) -> None:
    assert stated in row("batch.md", start)


@pytest.mark.parametrize(("document", "stated"), PROSE)
def test_numbers_in_sentences(document: str, stated: str) -> None:
    assert stated in text_of(document)


def test_exit_statuses_are_those_of_the_help() -> None:
    functions = {"run-batch": run_batch, "serve": serve}

    def in_help(command: str) -> set[str]:
        text = inspect.getdoc(functions[command]) or ""
        return set(re.findall(r"\b\d+\b", text.partition("Exit status")[2]))

    table = (ROOT / "docs" / "batch.md").read_text().partition("| exit status |")[2]
    cells = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    assert {status for cell in cells for status in cell.split(", ")} == in_help("run-batch")
    sentence = text_of("operations.md").partition("Exit status of `backfill serve`:")[2].partition("##")[0]
    assert set(re.findall(r"\b\d+\b", sentence)) == in_help("serve")


def test_codes_of_batch_errors() -> None:
    sources = ("preparation/lines", "preparation/validation", "protocol/body_check")
    sources += ("protocol/generation_fields", "execution/executor", "jobs/lifecycle")
    package = Path(backfill.__file__).parent
    found = set()
    for source in sources:
        content = (package / f"{source}.py").read_text()
        found |= set(re.findall(r'(?:(?:BadLine|LineError)\(|code=|error\.code or )\s*"(\w+)"', content))
    text = text_of("batch.md")
    of_batches = text.partition("has `errors` with these codes:")[2].partition("Bodies are checked")[0]
    assert set(re.findall(r"`(\w+)`", of_batches)) - {"max_tokens"} == found
    of_lines = text.partition("`error` with a code:")[2].partition("##")[0]
    assert set(re.findall(r"`(\w+)`", of_lines)) == lines._UNANSWERED_MESSAGES.keys()


def test_hardware_profiles() -> None:
    for name in hardware_profile_names():
        profile = load_hardware_profile(name)
        error = profile.costs.error
        stated = row("hardware-profiles.md", f"`{name}`")
        assert f"| {error.median:.1%}, {error.p95:.1%} |".replace("%", " %") in stated
        assert stated.endswith(f"| {profile.kv_tokens:,} |")


def test_variants_of_the_simulator() -> None:
    table = (
        (ROOT / "docs" / "simulation.md").read_text().partition("| name | policy |")[2].partition("\n\n")[0]
    )
    names = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert {name.strip("`") for cell in names for name in cell.split(", ")} == set(VARIANTS)
