"""What the README prints is run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api.servers import RunningServer

README = (Path(__file__).parent.parent.parent / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    ("snippet", "printed"), [(SNIPPETS[0], ""), (SNIPPETS[1], r"(?s)sky .*sea |sea .*sky ")]
)
def test_snippets_run(
    server: RunningServer, capsys: pytest.CaptureFixture[str], snippet: str, printed: str
) -> None:
    assert "http://127.0.0.1:8000" in snippet
    exec(compile(snippet.replace("http://127.0.0.1:8000", server.url), "README.md", "exec"), {})
    output = capsys.readouterr().out
    assert len(output) > 20
    assert re.search(printed, output)
