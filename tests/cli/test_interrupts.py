"""Ctrl-C at any moment ends a command with one line at most and status 130, its children and folders too.

The moment is an import, and not a time: the first of a module, in the command or in a child of it, interrupts
the whole process group, as a terminal does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from backfill.cli.interrupts import LOADING, SIGNALS, interruptible
from tests.api.batch_inputs import as_jsonl, completion_line
from tests.api.servers import MODEL, SMALL_MODEL, quick_profile

INTERRUPTS = """
import os, signal, sys

where, module = os.environ["INTERRUPT_AT"].split()
is_here = where == ("child" if "run_child" in " ".join(sys.orig_argv) else "command")

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module and is_here and not os.path.exists(os.environ["INTERRUPTED"]):
            open(os.environ["INTERRUPTED"], "w").close()
            os.killpg(os.getpgrp(), signal.Signals[os.environ["INTERRUPT_WITH"]])

sys.meta_path.insert(0, Interrupting())
"""
SCRIPT = (str(Path(sys.executable).with_name("backfill")),)
MODULE = (sys.executable, "-m", "backfill")


def run_batch_options(model: Path) -> tuple[str, ...]:
    options = ("-i", "in.jsonl", "-o", "out.jsonl", "--model", str(model), "--served-model-name", MODEL)
    return (*options, *SMALL_MODEL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "command", "moment", "number"),
    [
        (SCRIPT, "serve", "command cyclopts", signal.SIGINT),
        (MODULE, "serve", "command backfill.api.server", signal.SIGINT),
        (MODULE, "serve", "command backfill.api.server", signal.SIGTERM),
        (SCRIPT, "serve", "child backfill.engine.engine", signal.SIGINT),
        (MODULE, "serve", "child torch", signal.SIGINT),
        (SCRIPT, "run-batch", "child backfill.preparation.process", signal.SIGINT),
        (SCRIPT, "simulate", "command numpy", signal.SIGINT),
        (SCRIPT, "bench coserve", "command aiohttp", signal.SIGINT),
        (MODULE, "profile", "command backfill.costs.profiler", signal.SIGINT),
        (SCRIPT, "pull", "command gguf", signal.SIGINT),
    ],
)
def test_an_interrupt_while_a_command_loads_is_one_line(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    small_model: Path,
    start: tuple[str, ...],
    command: str,
    moment: str,
    number: signal.Signals,
) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="bf-"))  # tmp_path is too long for sockets
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    (tmp_path / "in.jsonl").write_bytes(as_jsonl([completion_line("a")]))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    arguments = {
        "serve": (str(small_model), "--port", "0", "--data-dir", str(tmp_path / "data"), *SMALL_MODEL),
        "run-batch": run_batch_options(small_model),
        "simulate": ("run", "--hardware", "a", "--online", "b", "--offline", "c"),
        "bench coserve": ("--base-url", "http://127.0.0.1:1"),
        "profile": (str(small_model), *SMALL_MODEL, "--out", "profile.json"),
        "pull": ("model.gguf", "--download-dir", str(tmp_path / "models")),
    }[command]
    if command == "serve":
        profile = quick_profile(str(small_model), *SMALL_MODEL[:4])
        arguments += ("--profile", profile, "--log-level", "WARNING")
    environment = {
        "INTERRUPT_AT": moment,
        "INTERRUPT_WITH": number.name,
        "INTERRUPTED": str(tmp_path / "interrupted"),
        "TMPDIR": str(temporary),
    }
    process = subprocess.Popen(
        [*start, *command.split(), *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment, "PYTHONPATH": str(tmp_path)},
    )
    stdout, stderr = process.communicate(timeout=200)
    assert (tmp_path / "interrupted").exists(), stderr
    assert (process.returncode, stdout) == (128 + number, ""), stderr
    assert list(temporary.glob("backfill-*")) == []
    assert stderr in (f"backfill: {LOADING}\n", "backfill: interrupted\n")


AFTER_THE_LOOP = """
import asyncio, os, signal
from backfill.cli.interrupts import SIGNALS, exit_at_once, take_from_loop

async def main():
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, print, "the loop")
    take_from_loop(loop)

signal.signal(signal.SIGINT, exit_at_once)
asyncio.run(main())
os.kill(os.getpid(), signal.{name})
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_after_the_loop_has_closed_says_nothing(number: signal.Signals) -> None:
    script = AFTER_THE_LOOP.format(name=number.name)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", "")


CHILDREN = """
import json, os, signal, sys

if "run_child" in " ".join(sys.orig_argv):
    class Recording:
        def find_spec(self, name, path=None, target=None):
            # It loads the model; the preparation's process has a tokenizer to load.
            if name == "safetensors" and "backfill.preparation.process" not in sys.modules:
                with open(os.environ["MODULES"], "w") as file:
                    json.dump(sorted(sys.modules), file)
                os.killpg(os.getpgrp(), signal.SIGKILL)

    sys.meta_path.insert(0, Recording())
"""
OF_OTHERS = {"cli", "api", "bench", "simulation", "jobs", "preparation", "protocol", "generation"}
LIBRARIES_OF_OTHERS = {"cyclopts", "rich", "fastapi", "uvicorn", "aiohttp", "transformers", "sqlalchemy"}


@pytest.mark.slow  # what modules import where they are: the contracts of pyproject.toml
def test_the_engines_process_imports_the_engine_alone(tmp_path: Path, small_model: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CHILDREN)
    (tmp_path / "in.jsonl").write_bytes(as_jsonl([completion_line("a")]))
    options = run_batch_options(small_model)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "MODULES": str(tmp_path / "modules.json")}
    command = [*SCRIPT, "run-batch", *options]
    subprocess.run(command, cwd=tmp_path, check=False, timeout=200, env=environment, start_new_session=True)
    modules = json.loads((tmp_path / "modules.json").read_text())
    packages = {name.split(".")[1] for name in modules if name.startswith("backfill.")}
    assert "engine" in packages
    assert not OF_OTHERS & packages
    assert not LIBRARIES_OF_OTHERS & set(modules)


def end_in_the_middle(closed: list[str], number: signal.Signals) -> None:
    with interruptible():
        try:
            signal.raise_signal(number)
        finally:
            closed.append("what was open")


@pytest.mark.parametrize("number", SIGNALS)
def test_what_is_open_is_closed_where_a_command_is_interruptible(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    closed: list[str] = []
    with pytest.raises(SystemExit) as ended:
        end_in_the_middle(closed, number)
    assert ended.value.code == 128 + number
    assert closed == ["what was open"]
    assert capsys.readouterr().err == "backfill: interrupted\n"
    assert signal.getsignal(number) is before
