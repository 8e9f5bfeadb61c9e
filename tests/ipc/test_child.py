from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from backfill.ipc.channel import open_channel
from backfill.ipc.child import ChildProcess, abandon_children

pytestmark = pytest.mark.anyio


def sleep_long(*_: str) -> None:
    time.sleep(600)


def say_and_end(words: list[str], commands_url: str, reports_url: str) -> None:
    with open_channel("test", str, commands_url, reports_url) as channel:
        for word in words:
            channel.send(word)
    raise SystemExit(3)


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
