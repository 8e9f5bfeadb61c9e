"""The engine's interpreter of ``serve``, which is started before the command line is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backfill.__main__ import main
from backfill.cli import serve_replicas
from backfill.cli.serve import serve
from backfill.core.config import EngineConfig
from backfill.engine import interpreter
from backfill.engine.options import ModelOptions
from backfill.http.config import ServerConfig
from backfill.jobs.config import JobsConfig
from backfill.router.config import ReplicaOptions
from tests.cli.running import signal_handlers_kept
from tests.parallel.processes import wait_ended

CHILDREN = """
import os, signal, sys

if "run_child" in " ".join(sys.orig_argv):
    open(os.path.join(os.environ["CHILDREN"], str(os.getpid())), "w").close()

    class Killing:
        def find_spec(self, name, path=None, target=None):
            if name == "torch" and "KILL" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)

    sys.meta_path.insert(0, Killing())
"""


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, list[int]]:
    """Its exit status, its last line, and its children."""
    (folder / "sitecustomize.py").write_text(CHILDREN)
    children = folder / "children"
    children.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(folder), "CHILDREN": str(children), **variables}
    ended = subprocess.run(
        [sys.executable, "-m", "backfill", *arguments],
        capture_output=True, text=True, env=environment, timeout=200, check=False,
    )  # fmt: skip
    line = (ended.stderr or ended.stdout or "\n").splitlines()[-1]
    return ended.returncode, line, [int(path.name) for path in children.iterdir()]


@pytest.mark.parametrize("option", ["--bogus", pytest.param("--max-num-seqs=0", marks=pytest.mark.slow)])
def test_a_command_line_that_is_refused_leaves_no_process(tmp_path: Path, option: str) -> None:
    status, line, children = run(tmp_path, "serve", option)
    assert (status, line[:10]) in ((2, "backfill: "), (1, "backfill: "))
    wait_ended(children)


def test_a_server_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    status, _, children = run(tmp_path, "serve", "--port", "0", KILL="")
    assert status == -9
    assert len(children) == 1
    wait_ended(children)


@pytest.mark.parametrize(
    ("arguments", "serves"),
    [
        (("serve", "m"), True),
        (("serve", "--help"), False),
        (("serve", "--help=all"), False),
        (("serve", "m", "-h"), False),
        (("simulate", "serve"), False),
    ],
)
def test_a_command_that_serves_nothing_starts_none(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], serves: bool
) -> None:
    num_started = []
    monkeypatch.setattr(interpreter, "start_interpreter", lambda: num_started.append(1))
    monkeypatch.setattr("backfill.cli.main.main", lambda: None)
    monkeypatch.setattr(sys, "argv", ["backfill", *arguments])
    with signal_handlers_kept():
        main()
    assert len(num_started) == serves


def test_a_server_of_replicas_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_replicas, "serve_replicas", lambda *_: None)
    interpreter.start_interpreter()
    (waiting,) = interpreter._waiting
    jobs = JobsConfig(data_dir=tmp_path)
    serve(ModelOptions(), ServerConfig(), jobs, ReplicaOptions(data_parallel_size=2), EngineConfig())
    assert waiting.process.returncode is not None
    assert interpreter.take_interpreter() is None
