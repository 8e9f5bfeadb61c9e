"""Commands whose standard streams are closed, or cannot be written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.batch_inputs import as_jsonl, completion_line
from tests.api.servers import MODEL, SMALL_MODEL, TIMEOUT_S


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_place_for_the_next_file(closed: str) -> None:
    script = (
        "from backfill.cli.standard_streams import open_standard_streams as open_them; open_them(); "
        "import os, sys; print(1); print(2, file=sys.stderr); sys.exit(open(os.devnull).fileno() < 3)"
    )
    command = f"exec {sys.executable} -c '{script}' {closed}"
    assert subprocess.run(["bash", "-c", command], check=False, timeout=TIMEOUT_S).returncode == 0


@pytest.mark.slow
def test_a_batch_runs_with_standard_error_closed(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(as_jsonl([completion_line("a", max_tokens=2)]))
    options = ["-i", "in.jsonl", "-o", "out.jsonl", "--model", str(small_model), "--served-model-name", MODEL]
    command = f'exec {sys.executable} -m backfill run-batch "$@" 2>&-'
    result = subprocess.run(
        ["bash", "-c", command, "bash", *options, *SMALL_MODEL], cwd=tmp_path, check=False, timeout=TIMEOUT_S
    )
    assert result.returncode == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["custom_id"] == "a"


def test_what_nobody_can_read_ends_no_server() -> None:
    script = (
        "from backfill.cli.standard_streams import print_if_read; "
        "print_if_read(1); print_if_read(2); print(3, flush=True)"
    )
    command = f"exec {sys.executable} -c '{script}' > /dev/full"
    assert subprocess.run(["bash", "-c", command], check=False, timeout=TIMEOUT_S).returncode == 0
