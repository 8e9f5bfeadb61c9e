"""Keeps the engine supplied with lines, evenly from all open batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, Protocol, TypeVar

from backfill.core.errors import EngineDead
from backfill.jobs.lines import BatchLine, LineResult, unrun

Args = ParamSpec("Args")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

MAX_ENGINE_DEATHS = 3

_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 10.0


class EngineAbsent(EngineDead):
    """No engine was there to take the line, which therefore cannot have ended one."""


class LineRunner(Protocol):
    async def run(self, line: BatchLine) -> LineResult:
        """Raises: EngineDead when the engine ended over it, EngineAbsent when it never reached one."""
        ...


class ResultSink(Protocol):
    def append(self, results: Sequence[LineResult]) -> None:
        """Make results durable, all or none; blocking. Raises: OSError."""
        ...


class Feed:
    """One batch as the feeder sees it. Use it with ``Feeder.add`` and ``Feeder.remove``.

    Args:
        name: for log lines.
        lines: those to run; read as the engine takes them.
        on_committed: told of each group once it is durable.
    """

    def __init__(
        self,
        name: str,
        lines: Iterator[BatchLine],
        sink: ResultSink,
        on_committed: Callable[[Sequence[LineResult]], None],
    ) -> None:
        self.name = name
        self.sink = sink
        self.on_committed = on_committed
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines = lines
        self._again: deque[BatchLine] = deque()
        self._next: BatchLine | None = None
        self._is_read = False
        self.running: set[asyncio.Task[None]] = set()
        self.results: list[LineResult] = []  # ended, not yet durable
        self.num_held = 0  # lines taken that are not durable yet
        self.committer: asyncio.Task[None] | None = None

    def has_line(self) -> bool:
        if self._again or self._next is not None:
            return True
        if not self._is_read:
            self._next = next(self._lines, None)
            self._is_read = self._next is None
        return self._next is not None

    def take(self) -> BatchLine:
        self.num_held += 1
        if self._again:
            return self._again.popleft()
        line, self._next = self._next, None
        assert line is not None
        return line

    def put_back(self, line: BatchLine) -> None:
        self.num_held -= 1
        self._again.append(line)

    @property
    def is_finished(self) -> bool:
        return self.num_held == 0 and not self.has_line()


class Feeder:
    """Runs lines of all feeds, at most ``capacity`` at once; results that wait for the disk count.

    The next line is of the feed with the fewest held, so open batches share evenly. One event loop owns it.
    """

    def __init__(self, runner: LineRunner) -> None:
        self._runner = runner
        self._feeds: list[Feed] = []
        self._capacity = 0

    def set_capacity(self, capacity: int) -> None:
        """0 pauses: lines that run go on, none begins."""
        self._capacity = capacity
        self._fill()

    def add(self, feed: Feed) -> None:
        self._feeds.append(feed)
        self._fill()
        self._settle(feed)

    async def remove(self, feed: Feed, *, keep_results: bool = True) -> None:
        """Stop the feed's lines at once; of those that had ended, the results are made durable first."""
        with contextlib.suppress(ValueError):
            self._feeds.remove(feed)
        running = list(feed.running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if feed.committer is not None:
            if not keep_results:
                feed.committer.cancel()
            await asyncio.gather(feed.committer, return_exceptions=True)

    def _fill(self) -> None:
        num_held = sum(feed.num_held for feed in self._feeds)
        while num_held < self._capacity:
            feed = min(
                (feed for feed in self._feeds if feed.has_line()),
                key=lambda feed: feed.num_held,
                default=None,
            )
            if feed is None:
                return
            task = asyncio.create_task(self._run(feed, feed.take()))
            feed.running.add(task)
            task.add_done_callback(feed.running.discard)
            num_held += 1

    async def _run(self, feed: Feed, line: BatchLine) -> None:
        try:
            result = await self._runner.run(line)
        except EngineAbsent:
            feed.put_back(line)
            return
        except EngineDead:
            line.num_engine_deaths += 1
            if line.num_engine_deaths < MAX_ENGINE_DEATHS:
                feed.put_back(line)
                return
            logger.error(
                "%s: the engine died %d times over line %d", feed.name, MAX_ENGINE_DEATHS, line.number
            )
            result = unrun(line, "engine_error")
        except Exception:
            logger.exception("%s: line %d failed", feed.name, line.number)
            result = unrun(line, "internal_error")
        feed.results.append(result)
        if feed.committer is None:
            feed.committer = asyncio.create_task(self._commit(feed))

    async def _commit(self, feed: Feed) -> None:
        """Make results durable, group by group: while one is written the next gathers."""
        while feed.results:
            group, feed.results = feed.results, []
            await until_durable(feed.sink, group, feed.name)
            feed.num_held -= len(group)
            feed.on_committed(group)
            self._fill()
        feed.committer = None
        self._settle(feed)

    def _settle(self, feed: Feed) -> None:
        if feed.is_finished and not feed.finished.done():
            feed.finished.set_result(None)


async def until_durable(sink: ResultSink, results: Sequence[LineResult], name: str) -> None:
    """Append, and while the disk refuses try again, ever less often."""
    delay_s = _FIRST_RETRY_S
    while True:
        try:
            return await in_thread(sink.append, results)
        except OSError as error:
            reason = error.strerror or error
            logger.error("%s: results cannot be written (%s); trying again in %g s", name, reason, delay_s)
        await asyncio.sleep(delay_s)
        delay_s = min(_LONGEST_RETRY_S, 2 * delay_s)


async def in_thread(work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """``asyncio.to_thread`` that ends only when the thread has, also when cancelled: files may close then."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
