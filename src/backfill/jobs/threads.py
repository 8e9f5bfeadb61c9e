"""Threads for calls that block on a disk or a database, in pools that do not wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")


class ThreadPool:
    """Runs blocking calls for one event loop, in threads that start as they are needed.

    The threads are daemons: a thread that a hung disk blocks delays neither ``close`` nor the end of the
    process. A ``ThreadPoolExecutor`` would wait for it.

    Args:
        max_threads: calls that run at once; more wait in the order they came.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self.name = name
        self._max_threads = max_threads
        self._num_threads = 0
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._open: dict[asyncio.Future[Any], Future[Any]] = {}
        self._is_closed = False

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until no call runs or waits."""
        if self._open:
            await asyncio.wait(list(self._open), timeout=timeout_s)

    async def run(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """Run ``work`` in a thread.

        When cancelled, it still waits for a call that has begun: only then may a file be closed.
        Raises: CancelledError also when the pool is closed.
        """
        if self._is_closed:
            raise asyncio.CancelledError(f"the {self.name} threads are closed")
        call: Future[Result] = Future()
        done = asyncio.wrap_future(call)
        self._open[done] = call
        done.add_done_callback(self._open.pop)
        self._submit(partial(_perform, call, partial(work, *args, **kwargs)))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not call.cancel():
                await until_done(done)
                if not done.cancelled():
                    done.exception()  # so that asyncio logs no error that nobody awaits
            raise

    def close(self) -> int:
        """End the threads and cancel every ``run``. Returns: the number of calls that still run."""
        self._is_closed = True
        num_left = 0
        for done, call in list(self._open.items()):
            call.cancel()
            num_left += call.running()
            done.cancel()
        for _ in range(self._num_threads):
            self._calls.put(None)
        return num_left

    def _submit(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        if self._num_threads < min(self._max_threads, len(self._open)):
            self._num_threads += 1
            threading.Thread(target=self._serve, name=f"{self.name}-{self._num_threads}", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # frees its arguments before the wait for the next call


class JobThreads:
    """The pools of the Batch API. None waits for another.

    Attributes:
        database: queries; the database may be on another machine.
        leases: their renewals, which wait for no other query. SQLAlchemy's pool has a connection for each
            thread of ``database``, ``leases`` and ``results``.
        results: writes of results, and the end of a batch.
        uploads: writes of uploads.
        downloads: reads for clients, which may be slow.
    """

    def __init__(self, pool: Callable[[str, int], ThreadPool] = ThreadPool) -> None:
        self.database = pool("database", 4)
        self.leases = pool("leases", 1)
        self.results = pool("results", 8)
        self.uploads = pool("uploads", 4)
        self.downloads = pool("downloads", 8)

    async def wait_idle(self, timeout_s: float) -> None:
        """As ``ThreadPool.wait_idle``, for all."""
        await asyncio.gather(*(pool.wait_idle(timeout_s) for pool in self._pools))

    def close(self) -> int:
        """As ``ThreadPool.close``, for all."""
        return sum(pool.close() for pool in self._pools)

    @property
    def _pools(self) -> tuple[ThreadPool, ...]:
        return self.database, self.leases, self.results, self.uploads, self.downloads


async def until_done(task: asyncio.Future[Any]) -> None:
    """Wait for the task, also when the wait is cancelled."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])


def _perform(call: Future[Result], work: Callable[[], Result]) -> None:
    if not call.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        call.set_exception(error)
    else:
        call.set_result(result)
