from __future__ import annotations

import asyncio

import pytest

from backfill.engine.tasks import TaskWatch

pytestmark = pytest.mark.anyio


async def fail() -> None:
    raise OSError("disk on fire")


async def succeed() -> int:
    return 3


async def test_a_task_that_an_exception_ends_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    tasks = TaskWatch()
    started = [tasks.start(fail(), "sweeper"), tasks.start(fail(), "sweeper")]
    started.append(tasks.start(asyncio.sleep(60), "cancelled"))
    assert await tasks.start(succeed(), "fine") == 3
    started[-1].cancel()
    await asyncio.wait(started)
    assert dict(tasks.failures) == {"sweeper": 2, "cancelled": 0, "fine": 0}, "growth from 0 can be seen"
    assert "the task sweeper was ended by an exception" in caplog.text
    assert "disk on fire" in caplog.text
