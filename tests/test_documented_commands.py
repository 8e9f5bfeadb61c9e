"""The commands that README and docs print are understood, and some run in what ``make install`` makes.

What only the tests have is hidden from the commands that are run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cyclopts import App

from backfill.cli.main import app
from experiments.__main__ import app as studies
from tests.api.servers import MODEL, SMALL_MODEL, TIMEOUT_S, HeldPort, RunningServer, ending, quick_profile
from tests.api.test_readme import SNIPPETS
from tests.installed import write_blocker
from tests.test_docs import DOCUMENTS, ROOT, commands, parse

_BACKFILL = ".venv/bin/backfill"
_EXPERIMENTS = ".venv/bin/python -m experiments"
_SERVER_OPTIONS = (*SMALL_MODEL, "--max-model-len", "2048", "--served-model-name", MODEL)

# Run as printed but for the options appended, which make it short; {url} is that of a small server.
RUN = {
    f"{_BACKFILL} pull smollm2-135m-instruct": "",
    f"{_BACKFILL} run-batch -i questions.jsonl -o answers.jsonl": "--model path/to/hf-folder {small}",
    f"{_BACKFILL} bench coserve --base-url http://127.0.0.1:8100 --label vllm-online-only "
    "--offline-mode none --result alone.json": (
        "--base-url {url} --duration 1 --warmup 0 --rate 5 --input-len 8 --output-len 4"
    ),
    f"{_EXPERIMENTS} conserve fig5 --online-trace splitwise_conv.csv --offline-lengths "
    "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv --json": "--policies online-only",
    f"{_BACKFILL} simulate run --hardware a100-40g-llama-2-7b --online online.csv --offline offline.csv "
    "--ttft-slo 1.5 --tpot-slo 0.11 --rate 2 --duration 300 --seeds 5": "--duration 5 --seeds 2",
}
# Run with the small server.
REQUESTS = r"curl http://127\.0\.0\.1:8000/v1/(chat/)?completions "
# Of what is not ours, and a name; the library's snippets are run by tests/llm/test_scripts.py.
OTHERS = {
    "pip install openai",
    "pip install 'backfill[otel]'",
    "pip install 'backfill[plot]'",
    "pip install 'backfill[ray]'",
    "pip install 'backfill[s3]'",
    "pip install 'backfill[postgres]'",
    "pip install 'ray[default]'",
    "pip install 'litellm[proxy]'",
    ".venv/bin/python",
}
# Run by tests/router/test_proxy.py with other addresses.
_ENGINES = "http://127.0.0.1:8080/router/engines"
OTHERS |= {
    f"curl {_ENGINES}",
    f"curl {_ENGINES} -H 'Content-Type: application/json' -d '{{\"url\": \"http://10.0.0.3:8000\"}}'",
    f"curl -X DELETE '{_ENGINES}?url=http://10.0.0.3:8000'",
}

_START = re.compile(r"(\.venv/bin/)?(backfill|python|make|pip|curl|benchmarks/\w+\.py)(?![\w:.-])")
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def printed_commands() -> Iterator[tuple[str, str]]:
    """Name of the document and the command on one line, without its comment: of code blocks, and inline."""
    for document in DOCUMENTS:
        text = document.read_text()
        lines = [
            line for block in _BLOCK.findall(text) for line in re.sub(r"\\\n\s*", "", block).splitlines()
        ]
        prose = _BLOCK.sub("", text)
        lines += re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
        lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
        for line in lines:
            if _START.match(line) and line != "backfill":
                yield document.name, re.sub(r"\s+# .*", "", line)


COMMANDS = sorted(set(printed_commands()))
OURS = sorted(
    {
        line
        for _, line in COMMANDS
        if re.search("backfill |-m experiments", line) and not line.startswith("pip")
    }
)


def test_each_line_that_looks_like_a_command_is_checked() -> None:
    printed = {line for _, line in COMMANDS}
    makes = {line for line in printed if line.startswith("make ")}
    scripts = {line for line in printed if "benchmarks/" in line}
    requests = {line for line in printed if re.match(REQUESTS, line)}
    assert printed - makes - scripts - requests - set(OURS) == OTHERS
    assert RUN.keys() <= set(OURS)
    assert len(makes) > 4 and len(scripts) > 4 and len(requests) == 3


@pytest.fixture(scope="module")
def known() -> dict[bool, dict[str, App]]:
    """Commands by their words, of the studies and of ``backfill``."""
    return {True: commands(studies), False: commands(app)}


@pytest.mark.parametrize("line", OURS)
def test_each_command_of_ours_is_understood(line: str, known: dict[bool, dict[str, App]]) -> None:
    is_study = line.startswith(_EXPERIMENTS)
    words = shlex.split(line)[3 if is_study else 1 :]
    known_here = known[is_study]
    name = max((name for name in known_here if words[: len(name.split())] == name.split()), key=len)
    arguments = words[len(name.split()) :]
    if arguments not in ([], ["--help"]):  # else it is a name in a sentence
        parse(known_here[name], arguments)


@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS if line.startswith("make ")}))
def test_each_target_and_variable_of_make_exists(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    _, target, *variables = shlex.split(line)
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for variable in variables:
        assert f"$({variable.partition('=')[0]})" in makefile


@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS if "benchmarks/" in line}))
def test_each_script_and_option_of_it_exists(line: str) -> None:
    words = shlex.split(line)
    (script,) = (word for word in words if word.startswith("benchmarks/"))
    content = (ROOT / script).read_text()
    for option in words:
        assert not option.startswith("--") or option == "--help" or f'"{option}"' in content


class Environment:
    """A folder like a clone after ``make install``, with a small model and files of the published names."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "path" / "to").mkdir(parents=True)
        (folder / "path" / "to" / "hf-folder").symlink_to(model)
        (folder / "hidden").mkdir()
        (folder / "experiments").symlink_to(ROOT / "experiments")
        write_blocker(folder / "hidden")
        writing, _, sending = SNIPPETS[1].partition("file = client.")  # of docs/api.md, the batch
        assert sending
        with contextlib.chdir(folder):
            exec(compile(writing, "api.md", "exec"), {})
        rows = "".join(f"{second / 5},{100 + second % 50},{20 + second % 10}\n" for second in range(1500))
        (folder / "splitwise_conv.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
        (folder / "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv").write_text(
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" + "2015,156,2171,12.9\n" * 50
        )
        (folder / "online.csv").write_text((folder / "splitwise_conv.csv").read_text())
        (folder / "offline.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "900,60\n" * 50)

    def start(self, line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            shlex.split(line),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(self.folder / "hidden"), "PYTHONUNBUFFERED": "1"},
        )


@pytest.fixture(scope="module")
def environment(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("clone"), small_model)


@pytest.fixture(scope="module")
def server(environment: Environment, small_model: Path) -> Iterator[RunningServer]:
    """The documented ``backfill serve path/to/hf-folder``, small."""
    port = HeldPort()
    profile = quick_profile(str(small_model), *SMALL_MODEL[:4])
    options = f"--port {port.number} --data-dir data --profile {profile} {' '.join(_SERVER_OPTIONS)}"
    process = environment.start(f"{_BACKFILL} serve path/to/hf-folder {options}")
    with ending(RunningServer(port, process, environment.folder / "data")) as running:
        running.wait_ready()
        yield running


@pytest.mark.slow
def test_what_only_the_tests_have_is_hidden(environment: Environment) -> None:
    check = "import importlib.util, matplotlib; print([importlib.util.find_spec(name) for name in NAMES])"
    process = environment.start(shlex.join([sys.executable, "-c", f"NAMES = ('pytest', 'openai'); {check}"]))
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert "No module named 'pytest': make install leaves it out" in output


@pytest.mark.slow
@pytest.mark.parametrize("line", RUN)
def test_it_runs(environment: Environment, server: RunningServer, line: str) -> None:
    appended = RUN[line].format(url=server.url, small=" ".join(SMALL_MODEL))
    process = environment.start(f"{line} {appended}")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    for option, name in re.findall(r"--(plot|result) (\S+)", line):
        assert (environment.folder / name).stat().st_size > 0, option


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS if re.match(REQUESTS, line)}))
def test_each_request_is_answered(server: RunningServer, line: str) -> None:
    _, url, _, header, _, body = shlex.split(line)
    name, _, value = header.partition(": ")
    short = json.dumps({**json.loads(body), "max_tokens": 2, "slo": {"ttft": 60, "tpot": 60}})
    address = url.replace("http://127.0.0.1:8000", server.url)
    answer = httpx.post(address, headers={name: value}, content=short, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
