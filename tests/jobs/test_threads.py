"""Pools of threads: how many, in which order, and calls that never end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from backfill.jobs.threads import JobThreads, ThreadPool
from tests.patience import TIMEOUT_S, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


async def test_results_and_errors_come_back() -> None:
    pool = ThreadPool("p", 2)
    assert await pool.run(divmod, 7, 2) == (3, 1)
    assert await pool.run(int, "11", base=2) == 3
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)
    assert pool.close() == 0


async def test_no_more_threads_than_allowed(gate: threading.Event) -> None:
    pool = ThreadPool("p", 3)
    running, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(TIMEOUT_S)
        with lock:
            running -= 1

    calls = [asyncio.create_task(pool.run(work)) for _ in range(10)]
    await until(lambda: running >= 3)
    gate.set()
    await asyncio.gather(*calls)
    assert most == 3
    assert pool.close() == 0


async def test_a_cancelled_call_that_runs_ends_with_its_thread(gate: threading.Event) -> None:
    pool = ThreadPool("p", 1)
    begun = threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(TIMEOUT_S)

    call = asyncio.create_task(pool.run(work))
    await until(begun.is_set)
    waiting = asyncio.create_task(pool.run(begun.clear))
    await asyncio.sleep(0)
    for task in (call, waiting):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.01)
    assert not call.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pool.run(begun.is_set), "the call that had not begun was cancelled"


async def test_the_error_of_a_cancelled_call_is_no_error_of_the_loop(gate: threading.Event) -> None:
    pool, begun, unhandled = ThreadPool("p", 1), threading.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    def work() -> None:
        begun.set()
        gate.wait(TIMEOUT_S)
        raise ValueError

    call = asyncio.create_task(pool.run(work))
    await until(begun.is_set)
    call.cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait([call])
    del call
    gc.collect()
    assert unhandled == []


async def test_a_call_that_hangs_does_not_delay_the_close(gate: threading.Event) -> None:
    pool = ThreadPool("p", 1)
    begun = threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(TIMEOUT_S)

    calls = [asyncio.create_task(pool.run(work)) for _ in range(3)]
    await until(begun.is_set)
    await pool.wait_idle(0.01)
    assert pool.close() == 1
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call
    with pytest.raises(asyncio.CancelledError):
        await pool.run(work)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("p-"))


async def test_one_pool_does_not_wait_for_another(gate: threading.Event) -> None:
    threads = JobThreads()
    hung = [asyncio.create_task(threads.uploads.run(gate.wait, TIMEOUT_S)) for _ in range(20)]
    await asyncio.sleep(0.01)
    for pool in (threads.database, threads.results, threads.downloads):
        assert await pool.run(divmod, 7, 2) == (3, 1)
    gate.set()
    assert all(await asyncio.gather(*hung))
    await threads.wait_idle(TIMEOUT_S)
    assert threads.close() == 0
