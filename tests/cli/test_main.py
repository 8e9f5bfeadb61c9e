"""The command line before a command begins."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.running import run_cli_here

HEAVY = {
    "numpy",
    "scipy",
    "torch",
    "transformers",
    "fastapi",
    "aiohttp",
    "sqlalchemy",
    "matplotlib",
    "msgspec",
}


def test_help_needs_no_heavy_module() -> None:
    code = "import sys, backfill.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_the_version_is_printed() -> None:
    assert run_cli_here("--version").stdout.startswith("backfill 0.")


def test_without_a_command_help_is_printed() -> None:
    for arguments, status in (((), 2), (("bench",), 2), (("-h",), 0), (("bench", "--help"), 0)):
        done = run_cli_here(*arguments)
        assert (done.returncode, done.stderr) == (status, "")
        assert done.stdout.startswith("Usage: backfill")


def test_a_command_near_the_unknown_one_is_named() -> None:
    done = run_cli_here("serv")
    assert done.returncode == 2
    assert done.stderr.startswith('backfill: Unknown command "serv". Did you mean "serve"?')


def test_errors_of_every_command_begin_alike() -> None:
    for command in (("pull", "no-such-model"), ("serve", "no-such-model", "--port", "0")):
        done = run_cli_here(*command)
        assert done.returncode == 1
        assert done.stderr.startswith("backfill: no model 'no-such-model'")
