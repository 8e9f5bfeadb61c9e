"""What docs/library.md and the README's first snippet print is run as printed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import backfill

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
def test_the_readme_shows_the_library_first(capfd: pytest.CaptureFixture[str]) -> None:
    (snippet,) = (each for each in snippets((ROOT / "README.md").read_text()) if "import LLM" in each)
    names: dict[str, Any] = {}
    exec(compile(snippet, "README.md", "exec"), names)
    names["llm"].close()
    assert len(capfd.readouterr().out) > 40


def test_named_classes_and_keywords_exist() -> None:
    others = {"TypeError", "ValueError", "KeyboardInterrupt", "WARNING", "FINAL_ONLY"}
    assert set(re.findall(r"`([A-Z]\w+)`", LIBRARY)) <= others | set(backfill.__all__)
    keywords = re.search(r"## Options\n(.*?)\n## ", LIBRARY, re.DOTALL)
    assert keywords is not None
    known = {*inspect.signature(backfill.LLM).parameters, "help(LLM)", "WARNING", "backfill serve"}
    assert set(re.findall(r"`([^`]+)`", keywords[1])) <= known
