"""Keeps the engine supplied with lines, evenly from all open batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from backfill.core.errors import BackfillError, EngineDead
from backfill.jobs.lines import BatchLine, LineResult, unrun
from backfill.jobs.patience import ResultSink, until_done, until_durable

logger = logging.getLogger(__name__)

# A line is given up once the engine has died so often with no other line in flight.
MAX_LONE_DEATHS = 3
# Bytes of the lines read and not yet durable, above which no further line is read.
MAX_HELD_BYTES = 64 << 20

_SUSPECT_SHRINKS_BY = 8


class InputChanged(BackfillError):
    """The lines are not those that were checked."""


class EngineAbsent(EngineDead):
    """No engine was there to take the line, which therefore cannot have ended one."""


class LineRunner(Protocol):
    async def run(self, line: BatchLine) -> LineResult:
        """Raises: EngineDead when the engine ended over it, EngineAbsent when it never reached one."""
        ...


class Feed:
    """One batch as the feeder sees it. Use it with ``Feeder.add`` and ``Feeder.remove``.

    Attributes:
        finished: done when every line's result is durable; fails with what reading the lines, or writing
            their results, raised.

    Args:
        name: for log lines.
        lines: those to run; read as the engine takes them.
        num_lines: how many those are.
        on_committed: told of each group once it is durable.
    """

    def __init__(
        self,
        name: str,
        lines: Iterator[BatchLine],
        num_lines: int,
        sink: ResultSink,
        on_committed: Callable[[Sequence[LineResult]], None],
    ) -> None:
        self.name = name
        self.sink = sink
        self.on_committed = on_committed
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines = lines
        self._num_unread = num_lines
        self._again: list[BatchLine] = []  # taken before, and put back; those with most deaths last
        self.running: dict[int, tuple[BatchLine, asyncio.Task[None]]] = {}
        self.results: list[LineResult] = []  # ended, not yet durable
        self.num_held = 0  # lines taken that are not durable yet
        self.num_held_bytes = 0
        self.committer: asyncio.Task[None] | None = None

    @property
    def num_deaths_next(self) -> int:
        """Engine deaths seen by the line that ``take`` gives next; -1 where there is none."""
        if self.finished.done():
            return -1
        if self._again:
            return self._again[-1].num_engine_deaths
        return 0 if self._num_unread else -1

    def take(self) -> BatchLine | None:
        """The next line; None, and the feed has failed, where it cannot be read."""
        if self._again:
            line = self._again.pop()
        else:
            try:
                line = next(self._lines)
            except StopIteration:
                self.fail(InputChanged("The input file has fewer lines than when it was checked."))
                return None
            except Exception as error:
                # The feed's own trouble: whoever happened to have this line read must not see it.
                self.fail(error)
                return None
            self._num_unread -= 1
        self.num_held += 1
        self.num_held_bytes += len(line.body)
        return line

    def put_back(self, line: BatchLine) -> None:
        self._forget(line)
        self._again.append(line)
        self._again.sort(key=lambda line: line.num_engine_deaths)

    def note_durable(self, results: Sequence[LineResult]) -> None:
        for result in results:
            self._forget(result.line)
        if self.num_held == 0 and not self._again and not self._num_unread:
            self.finish()

    def finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)
            self.finished.exception()  # whoever removes the feed need not look

    def _forget(self, line: BatchLine) -> None:
        self.num_held -= 1
        self.num_held_bytes -= len(line.body)


class Feeder:
    """Runs lines of all feeds, at most ``capacity`` at once; results that wait for the disk count.

    The next line is of the feed with the fewest held, so open batches share evenly. One event loop owns it.

    An engine that dies takes all lines in flight with it, of which one at most is to blame. They are run
    again before others, in ever smaller company: after each death a line shares the engine with an eighth as
    many as before. Only deaths a line suffers alone are counted against it.
    """

    def __init__(self, runner: LineRunner) -> None:
        self._runner = runner
        self._feeds: list[Feed] = []
        self._capacity = 0
        self._num_at_death = 0  # lines in flight when the engine died; 0 while it lives
        self._may_have_suspects = False

    def set_capacity(self, capacity: int) -> None:
        """0 pauses: lines that run go on, none begins."""
        self._capacity = capacity
        if capacity > 0 and self._num_at_death > 0:
            most = self._most_beside(max((feed.num_deaths_next for feed in self._feeds), default=0))
            logger.warning(
                "the engine died with %d lines in flight; they run again, at first %d at once",
                self._num_at_death,
                most,
            )
            self._num_at_death = 0
        self._fill()

    def add(self, feed: Feed) -> None:
        self._feeds.append(feed)
        feed.note_durable([])  # it may have no line at all
        self._fill()

    async def remove(self, feed: Feed, *, keep_results: bool = True) -> None:
        """Stop the feed's lines at once; of those that had ended, the results are made durable first.

        Cancelled, it no longer waits for the disk, but still for a write that has begun.
        """
        ending = asyncio.ensure_future(self._remove(feed, keep_results=keep_results))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            if feed.committer is not None:
                feed.committer.cancel()
            await until_done(ending)
            raise

    async def _remove(self, feed: Feed, *, keep_results: bool) -> None:
        with contextlib.suppress(ValueError):
            self._feeds.remove(feed)
        running = [task for _, task in feed.running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if feed.committer is not None:
            if not keep_results:
                feed.committer.cancel()
            await asyncio.gather(feed.committer, return_exceptions=True)
        self._fill()  # its place is another's

    def _fill(self) -> None:
        num_held = sum(feed.num_held for feed in self._feeds)
        num_bytes = sum(feed.num_held_bytes for feed in self._feeds)
        num_running = sum(len(feed.running) for feed in self._feeds)
        most = self._capacity
        if self._may_have_suspects:
            running = [line.num_engine_deaths for feed in self._feeds for line, _ in feed.running.values()]
            waiting = [feed.num_deaths_next for feed in self._feeds]
            most = self._most_beside(max(running, default=0))
            self._may_have_suspects = max(running + waiting, default=0) > 0
        while num_held < self._capacity and num_bytes < MAX_HELD_BYTES:
            feed = min(self._feeds, key=lambda feed: (-feed.num_deaths_next, feed.num_held), default=None)
            if feed is None or feed.num_deaths_next < 0:
                return
            if self._may_have_suspects:
                most = min(most, self._most_beside(feed.num_deaths_next))
                if num_running >= most:
                    return
            line = feed.take()
            if line is None:
                continue
            task = asyncio.create_task(self._run(feed, line))
            feed.running[line.number] = (line, task)
            num_held += 1
            num_running += 1
            num_bytes += len(line.body)

    def _most_beside(self, num_deaths: int) -> int:
        """Lines that may be in flight together with one that saw so many deaths, itself included."""
        most: int = self._capacity // _SUSPECT_SHRINKS_BY ** max(0, num_deaths)
        return max(1, most)

    async def _run(self, feed: Feed, line: BatchLine) -> None:
        result = None
        try:
            result = await self._runner.run(line)
        except EngineAbsent:
            pass
        except EngineDead:
            result = self._after_death(feed, line)
        except Exception:
            logger.exception("%s: line %d failed", feed.name, line.number)
            result = unrun(line, "internal_error")
        finally:
            del feed.running[line.number]
        if result is None:
            feed.put_back(line)
            return
        feed.results.append(result)
        if feed.committer is None:
            feed.committer = asyncio.create_task(self._commit(feed))

    def _after_death(self, feed: Feed, line: BatchLine) -> LineResult | None:
        """None where the line is to be run again."""
        if self._num_at_death == 0:
            self._num_at_death = sum(len(feed.running) for feed in self._feeds)
        self._may_have_suspects = True
        line.num_engine_deaths += 1
        line.num_lone_deaths += self._num_at_death == 1
        if line.num_lone_deaths < MAX_LONE_DEATHS:
            return None
        logger.error(
            "%s: line %d is given up: the engine died %d times while it ran no other",
            feed.name,
            line.number,
            MAX_LONE_DEATHS,
        )
        return unrun(line, "engine_error")

    async def _commit(self, feed: Feed) -> None:
        """Make results durable, group by group: while one is written the next gathers."""
        try:
            while feed.results:
                group, feed.results = feed.results, []
                await until_durable(feed.sink, group, feed.name)
                feed.on_committed(group)
                feed.note_durable(group)
                self._fill()
        except Exception as error:
            feed.fail(error)
        finally:
            feed.committer = None
