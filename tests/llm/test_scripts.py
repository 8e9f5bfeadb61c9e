"""LLM in the programs of users: of the documents, without a guard, from a file or stdin."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import backfill
from tests.api.servers import MODEL, TIMEOUT_S, wait_until

SCRIPT = """
from backfill import LLM, SamplingParams

print("the script begins")
llm = LLM({model!r}, dtype="float32", threads=1, kv_gib=0.01, max_model_len=256)
(output,) = llm.generate([[1000, 2000]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
print(len(output.outputs[0].token_ids), "tokens")
"""
FOREVER = """
print("generating", flush=True)
llm.generate([[1000]] * 200, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.slow  # children run without the main module: tests/ipc/test_python_process.py
def test_a_script_needs_no_guard_and_ends_quietly(small_model: Path, tmp_path: Path) -> None:
    """From standard input."""
    result = subprocess.run(
        [sys.executable, "-"],
        input=SCRIPT.format(model=str(small_model)),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["the script begins", "4 tokens"]
    assert result.returncode == 0


@pytest.mark.slow
def test_ctrl_c_ends_a_script_with_one_traceback_and_nothing_left(small_model: Path, tmp_path: Path) -> None:
    """A script in a file, which needs no guard either."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=str(small_model)) + FOREVER)
    (tmp_path / "temporary").mkdir()
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group, as a terminal gives a command
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    ) as process:
        assert process.stdout is not None
        for line in ("the script begins\n", "4 tokens\n", "generating\n"):
            assert process.stdout.readline() == line
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: not exists(process.pid), "the end of its engine")
    assert list((tmp_path / "temporary").iterdir()) == []


def exists(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_package_is_imported_without_what_it_does_not_need() -> None:
    code = """
import sys
import backfill
assert not {"torch", "transformers", "zmq", "pydantic", "numpy"} & set(sys.modules), sys.modules.keys()
assert set(backfill.__all__) <= set(dir(backfill))
for name in set(backfill.__all__) - {"offload"}:
    getattr(backfill, name)
assert not {"torch", "transformers", "pydantic"} & set(sys.modules)
try:
    backfill.LMM
except AttributeError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert result.stdout == "module 'backfill' has no attribute 'LMM'\n"


ROOT = Path(__file__).parent.parent.parent
LIBRARY = (ROOT / "docs" / "library.md").read_text()


def snippets(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_the_snippets_of_the_library_run_one_after_another(capfd: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    printed = []
    for snippet in snippets(LIBRARY):
        exec(compile(snippet, "library.md", "exec"), names)
        printed.append(capfd.readouterr().out)
    generate, chat, stream, offloaded = printed
    assert re.search(r"Gravity is -> .+", generate) and re.search(r"The sea is -> .+", generate)
    assert len(chat) > 20
    assert "offline:" in stream and len(stream) > 100
    assert offloaded == "cpu, the same tokens: True\n"


@pytest.mark.slow
def test_the_readme_shows_the_library_first(small_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (snippet,) = (each for each in snippets((ROOT / "README.md").read_text()) if "import LLM" in each)
    assert snippet.count(f'LLM("{MODEL}")') == 1
    names: dict[str, Any] = {}
    exec(compile(snippet.replace(MODEL, str(small_model)), "README.md", "exec"), names)
    names["llm"].close()
    assert len(capfd.readouterr().out) > 40


def test_named_classes_and_keywords_exist() -> None:
    others = {"TypeError", "ValueError", "KeyboardInterrupt", "WARNING", "FINAL_ONLY"}
    assert set(re.findall(r"`([A-Z]\w+)`", LIBRARY)) <= others | set(backfill.__all__)
    keywords = re.search(r"## Options and errors\n(.*?)\n\|", LIBRARY, re.DOTALL)
    assert keywords is not None
    known = {*inspect.signature(backfill.LLM).parameters, "help(LLM)", "WARNING", "backfill serve"}
    assert set(re.findall(r"`([^`]+)`", keywords[1])) <= known
