"""The snippets of the README and of docs/api.md run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api.servers import RunningServer, wait_until

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)


def run_snippet(snippet: str, server: RunningServer) -> None:
    exec(compile(snippet.replace("http://127.0.0.1:8000", server.url), "api.md", "exec"), {})


def test_the_first_snippet_prints_an_answer(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "stream=True" in SNIPPETS[0]
    run_snippet(SNIPPETS[0].replace("stream=True", "stream=True, max_tokens=60"), server)  # it may never end
    assert len(capsys.readouterr().out) > 20


@pytest.mark.slow  # what it prints: tests/api/test_batches.py
def test_the_batch_prints_its_answers_or_why_there_are_none(
    server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    snippet = SNIPPETS[1]
    for good, harm, shown in (
        ("", "", r"(?s)^(sky .*\nsea |sea .*\nsky )"),
        ('"content": question', '"content": question * 2000', "context_length_exceeded"),
        ('"max_tokens": 40', '"max_tokens": -1', "max_tokens must be at least 1"),
    ):
        assert good in snippet
        run_snippet(snippet.replace(good, harm) if good else snippet, server)
        assert re.search(shown, capsys.readouterr().out)


def test_the_server_prints_the_line_that_is_shown(server: RunningServer) -> None:
    (shown,) = re.findall(r"^curl .*/chat/completions .*\n  -d .*$", README, re.MULTILINE)
    expected = shown.replace("http://127.0.0.1:8000", server.url)
    wait_until(lambda: expected in "".join(server.output), "the line")  # another thread reads the output
