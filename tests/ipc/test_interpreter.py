"""An interpreter waits for its work, and ends with its parent or without any."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backfill.engine.interpreter import end_interpreter, start_interpreter, take_interpreter
from backfill.ipc.interpreter import Interpreter
from tests.ipc.functions import write_modules
from tests.ipc.test_python_process import TIMEOUT_S
from tests.parallel.processes import wait_ended


def test_it_has_imported_what_it_can_when_its_work_comes(tmp_path: Path) -> None:
    modules = ("wave", "backfill.not_there")
    interpreter = Interpreter("test", {}, modules=modules)
    interpreter.run(pickle.dumps((write_modules, (str(tmp_path / "imported"), modules))))
    assert interpreter.process.wait(TIMEOUT_S) == 0
    assert (tmp_path / "imported").read_text() == "wave"


def test_it_can_be_ended_without_work() -> None:
    interpreter = Interpreter("test", {})
    interpreter.end()
    assert interpreter.process.returncode is not None


PARENT = """
import sys
from backfill.ipc.interpreter import Interpreter
interpreter = Interpreter("test", {}, modules=("wave",))
print(interpreter.process.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_a_parent_that_had_no_work() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.1)
        parent.kill()
    wait_ended([pid])


def test_it_ends_by_itself_where_no_signal_tells_it_of_its_parents_end() -> None:
    interpreter = Interpreter("test", {})
    assert interpreter.process.stdin is not None
    interpreter.process.stdin.close()
    assert interpreter.process.wait(TIMEOUT_S) == 1


def test_the_engines_is_taken_once_or_ended() -> None:
    start_interpreter()
    interpreter = take_interpreter()
    assert interpreter is not None
    assert take_interpreter() is None
    interpreter.end()
    start_interpreter()
    end_interpreter()
    assert take_interpreter() is None


def test_an_interpreter_that_cannot_be_started_is_left_to_the_engines_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, os.strerror(11))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    start_interpreter()
    assert take_interpreter() is None
