"""``make install``, with a pip that only writes down what it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.installed import ROOT

PIP = """#!/bin/sh
echo "$@" >> asked
echo "$PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT" > constrained
case "$*" in *--index-url*) exit {status};; esac
"""


def install(folder: Path, *arguments: str, index_status: int = 0) -> tuple[list[str], str]:
    """What pip is asked for, one line a time, and what the user is told.

    Args:
        index_status: pip's exit status when it is sent to another index.
    """
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "src").mkdir()
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "pip").write_text(PIP.format(status=index_status))
    for name in ("pip", "python"):
        (programs / name).touch()
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["make", "install", *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return (folder / "asked").read_text().splitlines(), done.stderr


INDEX = "TORCH_INDEX=https://index.example/cpu"


@pytest.mark.parametrize("status", [0, 1])
def test_torchs_index_is_asked_once_and_for_torch_alone(tmp_path: Path, status: int) -> None:
    (torch, ours), told = install(tmp_path, INDEX, index_status=status)
    assert torch.endswith("--retries 1 --timeout 10 --no-deps --index-url https://index.example/cpu torch")
    assert "index" not in ours
    assert ours.endswith("-c constraints.txt -e .[plot]")
    assert (tmp_path / "constrained").read_text().split() == ["constraints.txt"] * 2, "of what builds it too"
    assert ("2.7 GB" in told) == (status != 0)


def test_without_an_index_only_pips_own_is_asked(tmp_path: Path) -> None:
    (ours,), told = install(tmp_path, "TORCH_INDEX=")
    assert ours.endswith("-e .[plot]")
    assert "a minute or two" in told, "pip shows nothing of it"


@pytest.mark.parametrize(
    ("given", "passed"), [(["PORT=8001", "ARGS=--x"], "serve --port 8001 --x"), ([], "serve")]
)
def test_serve_takes_a_port_from_the_command_line_alone(given: list[str], passed: str) -> None:
    # The tests themselves may run under make, with flags and a level of its own.
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "ARGS"
    }
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "serve", *given],
        cwd=ROOT,
        env={**outside, "PORT": "3000"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert " ".join(done.stdout.splitlines()[-1].split()).endswith(f"bin/backfill {passed}")
