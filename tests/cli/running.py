"""Runs the command line as a user does."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from cyclopts import App

from backfill.cli.main import app, main
from tests.patience import TIMEOUT_S


def run_cli(*arguments: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "backfill", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def assert_refused(result: subprocess.CompletedProcess[str], part: str) -> None:
    """The command ended with status 1 and one line of error that contains ``part``."""
    assert result.returncode == 1
    assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("backfill: ")]) == 1


def assert_fits(stdout: str) -> None:
    """Nothing is cut off, and tables are no wider than a terminal of 80 columns."""
    assert "…" not in stdout
    tables = [line for line in stdout.splitlines() if line.startswith(("┏", "│", "┃"))]
    assert max(map(len, tables)) <= 80


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """The tests' handlers come back after a block that sets others."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_cli_here(*arguments: str, commands: App = app) -> subprocess.CompletedProcess[str]:
    """The same in this process, seconds sooner: for commands that end before they start another one."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        signal_handlers_kept(),
        mock.patch.object(sys, "argv", ["backfill", *arguments]),
        # As where pydantic is not imported yet: cyclopts would let it check each option again.
        mock.patch("cyclopts.argument._argument.parse_version", return_value=(1,)),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as ended,
    ):
        main(commands)
    return subprocess.CompletedProcess(
        arguments, int(ended.value.code or 0), stdout.getvalue(), stderr.getvalue()
    )


def run_to_json(*arguments: str, commands: App = app) -> tuple[str, Any]:
    """Of a command that succeeds: what it prints before the last line, and the JSON in that."""
    done = run_cli_here(*arguments, commands=commands)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    return "\n".join(lines), json.loads(last)
