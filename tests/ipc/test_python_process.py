"""Children run one function, without the main module of their parent."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from backfill.ipc.child import ChildProcess, abandon_children
from backfill.ipc.python_process import PythonProcess, is_running
from tests.api.servers import wait_until
from tests.ipc.functions import complain, leave, say_and_end, sleep_long, write_and_sleep
from tests.parallel.processes import wait_ended

pytestmark = pytest.mark.anyio
TIMEOUT_S = 60.0


def ended(process: PythonProcess) -> int | None:
    """Its exit code, once the sentinel has reported its end."""
    assert select.select([process.sentinel], [], [], TIMEOUT_S)[0], "no end"
    process.join(TIMEOUT_S)
    return process.exitcode


def wait_for(path: Path) -> None:
    wait_until(lambda: path.exists() and path.read_text(), path.name)


@pytest.mark.parametrize("status", [0, 7])
def test_it_ends_with_the_functions_status(status: int) -> None:
    process = PythonProcess("test", leave, (status,))
    assert (process.pid, process.exitcode, process.is_alive()) == (None, None, False)
    process.start()
    assert ended(process) == status
    assert not process.is_alive()


def test_it_leaves_the_parents_signals_to_the_parent_and_can_be_killed(tmp_path: Path) -> None:
    process = PythonProcess("test", write_and_sleep, (str(tmp_path / "begun"),), {"GREETING": "hello"})
    process.start()
    assert process.pid is not None
    # At once, before the child can have set its handlers.
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    wait_for(tmp_path / "begun")
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    assert (tmp_path / "begun").read_text() == "hello"
    assert "GREETING" not in os.environ
    process.join(0.05)
    assert process.is_alive()
    process.kill()
    assert ended(process) == -signal.SIGKILL


async def test_several_tasks_wait_for_its_end_and_its_last_words() -> None:
    process = PythonProcess("test", complain, ("no memory",))
    process.start()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(process.wait() for _ in range(3)))
    assert process.last_words == "no memory"
    assert process.how_it_ended() == "ended with exit code 7"
    await process.end(TIMEOUT_S)


async def test_a_child_that_does_not_end_when_it_is_asked_is_killed(tmp_path: Path) -> None:
    process = PythonProcess("test", write_and_sleep, (str(tmp_path / "begun"),), {"GREETING": "hello"})
    process.start()
    await process.end(0.1)  # it leaves SIGTERM to its parent
    assert process.how_it_ended() == "was killed by signal 9"


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from backfill.ipc.python_process import PythonProcess
from tests.ipc.functions import write_and_sleep
process = PythonProcess("test", write_and_sleep, ({begun!r},), {{"GREETING": "hello"}})
process.start()
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_its_parent_whose_folders_it_knows(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    tests = str(Path(__file__).parent.parent.parent)
    script = PARENT.format(tests=tests, begun=str(begun))
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(begun)
        parent.kill()
    wait_ended([pid])


def test_a_process_that_has_ended_does_not_run_even_before_it_was_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    assert is_running(child.pid)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(child.pid), "nobody has waited for it yet"
    child.wait()
    assert not is_running(child.pid)


def test_a_process_runs_where_proc_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_path: Path) -> bytes:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_bytes", missing)
    assert is_running(os.getpid())


async def test_children_that_are_abandoned_leave_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running, unstarted = (ChildProcess[str, str]("test", sleep_long, (), str) for _ in range(2))
    running.start()
    pid = running.pid
    assert pid is not None
    assert len(list(tmp_path.iterdir())) == 2
    abandon_children()
    assert list(tmp_path.iterdir()) == []
    async with asyncio.timeout(60):
        assert await running.receive() is None
    for child in (running, unstarted):
        child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_all_that_a_child_has_sent_is_received_before_its_end() -> None:
    child = ChildProcess[str, str]("test", say_and_end, (["a", "b", "c"],), str)
    child.start()
    async with asyncio.timeout(60):
        received = [await child.receive() for _ in range(4)]
    assert received == ["a", "b", "c", None]
    assert child.how_it_ended() == "ended with exit code 3"
    child.close()
    assert not child.send("")


async def test_a_child_that_is_given_up_is_waited_for_no_longer() -> None:
    child = ChildProcess[str, str]("test", sleep_long, (), str)
    child.start()
    receiving = asyncio.create_task(child.receive())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await child.give_up()
        assert await receiving is None
    assert child.exitcode == -signal.SIGKILL
    child.close()
