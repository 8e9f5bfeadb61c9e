"""Gives the engine lines of all open batches, fairly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from backfill.core.errors import EngineDead, RequestLost, StepFailed
from backfill.engine.tasks import TaskWatch
from backfill.jobs.feed import Feed, InputChanged, LineSource, RunningLine
from backfill.jobs.lines import LineResult, unanswered
from backfill.jobs.order import FairOrder
from backfill.jobs.retry import append_with_retries, with_retries
from backfill.jobs.suspects import BatchPoisoned
from backfill.jobs.threads import ThreadPool, until_done
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount

logger = logging.getLogger(__name__)

# While the lines in memory have this many bytes, no further line is read.
MAX_BUFFERED_BYTES = 64 << 20

# Lines per read: enough to spread its cost, few enough that other batches get their turn.
_GROUP_LINES = 32
_READ_BYTES = 1 << 20  # of a read's lines, if they are more than one
# Lines started in one turn of the event loop. Streams wait for it.
_TURN_LINES = 32
# Each loss of a line divides the lines in flight beside it by this.
_SHRINK_FACTOR = 8
PROGRESS_PERIOD_S = 1.0
_DRAIN_POLL_S = 0.05


class LineRunner(Protocol):
    async def run(self, line: BatchLine, count: TokenCount, *, is_alone: bool) -> LineResult:
        """Run a line and count its tokens as they come. ``is_alone``: no other is to run beside it.

        Raises: RequestLost, whose ``num_lost`` is 0 where the line never reached an engine.
        """
        ...


class Feeder:
    """Runs lines of all feeds, at most ``capacity`` at once. A line counts until its result is durable.

    ``FairOrder`` chooses the owner of the next line. Lines of one owner run in the order in which they are
    read, whichever feed they are of: that order is the source's. While lines of one owner are read, those of
    others start, up to the owner's share of the capacity each. One event loop owns the feeder.

    When the engine dies or a step fails, all its lines are lost, and at most one is to blame. Lost lines run
    again before others. Each loss divides the lines in flight by eight, until a line runs alone. Only losses
    of a line that ran alone count against it (``Losses.is_to_blame``), and a feed with many such lines fails
    (``Suspects.check``). ``threads`` write results to the disk.

    With ``reports_progress``, sources are told every second how many tokens their running lines have.
    """

    def __init__(
        self,
        runner: LineRunner,
        threads: ThreadPool,
        tasks: TaskWatch | None = None,
        *,
        reports_progress: bool = False,
        weight_of: Callable[[str], float] = lambda owner: 1.0,
    ) -> None:
        self._runner, self.weight_of = runner, weight_of
        self._reports_progress = reports_progress
        self._reporting: asyncio.TimerHandle | None = None  # only while lines run
        self._threads = threads
        self._tasks = tasks or TaskWatch()
        self._order = FairOrder(weight_of)
        self._feeds: list[Feed] = []
        self._reads: dict[str, Feed] = {}  # by owner: the feed that reads
        self._turns = itertools.count()
        self.capacity = 0  # lines that may be in flight
        self.num_running = 0  # lines with the runner
        self.num_durable = 0  # results that this loop knows of; the thread that writes them counts sooner
        self._num_lost = 0  # lines since the engine died; 0 while it lives
        self._may_have_suspects = False
        self._fills_soon = False

    @property
    def num_in_flight(self) -> int:
        """Lines with the runner, or whose results are not durable yet."""
        return self._order.num_in_flight

    @property
    def has_waiting(self) -> bool:
        """Lines that are not in flight."""
        return self._order.has_waiting

    @property
    def num_begun(self) -> int:
        """Lines in flight without those of which no token has come."""
        waiting = (not run.has_begun for feed in self._feeds for run in feed.running.values())
        return self.num_in_flight - sum(waiting)

    def set_capacity(self, capacity: int) -> None:
        """At 0 no line starts; lines that run go on."""
        self.capacity = capacity
        if capacity > 0 and self._num_lost > 0:
            logger.warning(
                "the engine died with %d lines in flight; they run again, at first %d at once",
                self._num_lost,
                self._max_in_flight_with(max((feed.num_losses_next for feed in self._feeds), default=0)),
            )
            self._num_lost = 0
        self._fill()

    def add(self, feed: Feed) -> None:
        self._feeds.append(feed)
        feed.note_durable([])  # it may have no line at all
        self._order.add(feed)
        self._fill()

    async def drain(self, timeout_s: float) -> int:
        """Start no more lines, and wait until those that have begun have durable results.

        A line has begun once it has a token. The others, which wait in the engine, are put back at once. It
        waits no longer than ``timeout_s``, and not for a feed that has failed.

        Returns: how many lines had begun, those included whose results were not durable yet.
        """
        self.set_capacity(0)
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + timeout_s
        num_begun = self.num_in_flight
        for feed in list(self._feeds):
            num_begun -= await self._put_back_waiting(feed)
        while loop.time() < ends_at_s and any(
            feed.num_in_flight and not feed.finished.done() for feed in self._feeds
        ):
            await asyncio.sleep(_DRAIN_POLL_S)
        return num_begun

    async def _put_back_waiting(self, feed: Feed) -> int:
        """Abort lines that have not begun. Returns: how many."""
        waiting = [run for run in feed.running.values() if not run.has_begun]
        for run in waiting:
            run.task.cancel()
        await asyncio.gather(*(run.task for run in waiting), return_exceptions=True)
        aborted = [run.line for run in waiting if run.task.cancelled()]
        for line in aborted:
            if feed.running.pop(line.number, None) is not None:  # cancelled before it ran at all
                self.num_running -= 1
            feed.put_back(line)
            self._order.note_ended(feed)
        return len(aborted)

    async def remove(self, feed: Feed, *, keep_results: bool = True) -> None:
        """Stop the feed's lines at once, and make the results of ended lines durable.

        When cancelled, it waits only for a write that has begun.
        """
        ending = asyncio.ensure_future(self._remove(feed, keep_results=keep_results))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            for task in (feed.committer, feed.saver):
                if task is not None:
                    task.cancel()
            await until_done(ending)
            raise

    async def _remove(self, feed: Feed, *, keep_results: bool) -> None:
        with contextlib.suppress(ValueError):
            self._feeds.remove(feed)
        self._order.remove(feed)
        running = [run.task for run in feed.running.values()]
        self._end_read(feed)
        for task in running:
            task.cancel()
        self._fill()  # other feeds take its places; they may have waited for its read
        await asyncio.gather(*running, return_exceptions=True)
        self.num_running -= len(feed.running)  # tasks that were cancelled before they began
        feed.running.clear()
        self._fill()  # its suspects no longer limit the lines in flight
        if feed.committer is not None:
            if not keep_results:
                feed.committer.cancel()
            await asyncio.gather(feed.committer, return_exceptions=True)
        if feed.saver is not None:
            if feed.finished.done() or not keep_results:  # no line will run again here
                feed.saver.cancel()
            await asyncio.gather(feed.saver, return_exceptions=True)

    def _fill(self) -> None:
        most = self.capacity
        if self._may_have_suspects:
            running = [feed.suspects.of(number).num for feed in self._feeds for number in feed.running]
            waiting = [feed.num_losses_next for feed in self._feeds]
            most = self._max_in_flight_with(max(running, default=0))
            self._may_have_suspects = max(running + waiting, default=0) > 0
        num_started = 0
        while self._order.num_in_flight < self.capacity:
            if num_started == _TURN_LINES:
                self._fill_soon()
                return
            feed = self._next_feed()
            if feed is None:
                return
            if self._may_have_suspects:
                most = min(most, self._max_in_flight_with(feed.num_losses_next))
                if self.num_running >= most:
                    return
            line = feed.take()
            if line is None:
                # It is of all the owner's lines, so one at a time is enough.
                self._reads[feed.owner] = feed
                feed.reading = self._tasks.start(self._read(feed), "feeder-read")
                continue
            self._start(feed, line)
            num_started += 1

    def _fill_soon(self) -> None:
        """``_fill`` in the next turn of the event loop."""
        if not self._fills_soon:
            self._fills_soon = True
            asyncio.get_running_loop().call_soon(self._fill_now)

    def _fill_now(self) -> None:
        self._fills_soon = False
        self._fill()

    def _next_feed(self) -> Feed | None:
        """The feed whose line is next; where memory is full, a feed with lines in memory."""
        if self._may_have_suspects:
            feed = max(self._feeds, key=lambda feed: feed.num_losses_next, default=None)
            if feed is not None and feed.num_losses_next > 0:
                return feed
        feed = self._order.next()
        if feed is not None and feed.owner in self._reads and not feed.has_read_lines:
            feed = self._next_beside_reads()
        if feed is None or feed.has_read_lines:
            return feed
        num_bytes = sum(other.num_buffered_bytes for other in self._feeds)
        if num_bytes + _READ_BYTES * len(self._reads) < MAX_BUFFERED_BYTES:
            return feed
        ready = self._order.next(lambda feed: feed.has_read_lines)
        # With no line in flight or on its way nothing would free memory.
        is_stuck = ready is None and self._order.num_in_flight == 0 and not self._reads
        return feed if is_stuck else ready

    def _next_beside_reads(self) -> Feed | None:
        """The feed whose line is next of owners that need not wait for a read of theirs.

        An owner whose lines are read keeps its share: others would have it for as long as their lines run.
        """
        feed = self._order.next(lambda feed: feed.has_read_lines or feed.owner not in self._reads)
        return None if feed is None or self._order.has_share(feed.owner, self.capacity) else feed

    def _start(self, feed: Feed, line: BatchLine) -> None:
        ran_with_others = self.num_running > 0
        if self.num_running == 1:  # that line was alone until now
            for other in self._feeds:
                for run in other.running.values():
                    run.ran_with_others = True
        num_losses = feed.suspects.of(line.number).num
        is_alone = num_losses > 0 and self._max_in_flight_with(num_losses) == 1
        count = TokenCount()
        task = self._tasks.start(self._run(feed, line, count, is_alone=is_alone), "feeder-line")
        feed.running[line.number] = RunningLine(line, task, ran_with_others, count)
        self.num_running += 1
        if self._reports_progress and self._reporting is None:
            self._report_soon()
        self._order.note_taken(feed)

    async def _read(self, feed: Feed) -> None:
        """Read lines of the feed's owner. If the feed is removed meanwhile, they are for the others."""
        lines: Sequence[tuple[LineSource, BatchLine]] = []
        try:
            lines = await feed.source.read(_GROUP_LINES)
            if not lines and feed.num_unread:  # else another read of the owner has got this one's lines
                raise InputChanged("The input file has fewer lines than when it was checked.")
        except Exception as error:
            if feed in self._feeds:
                feed.fail(error)
        finally:
            self._end_read(feed)
        feeds = {id(each.source): each for each in self._feeds}
        self._order.note_waiting(feed)  # it may have failed
        for source, line in lines:
            of_line = feeds.get(id(source))
            if of_line is not None:  # else it was removed meanwhile
                of_line.add(line, next(self._turns))
                self._order.note_waiting(of_line)
                self._may_have_suspects |= of_line.num_losses_next > 0
        self._fill()

    def _end_read(self, feed: Feed) -> None:
        feed.reading = None
        if self._reads.get(feed.owner) is feed:
            del self._reads[feed.owner]

    def _max_in_flight_with(self, num_losses: int) -> int:
        """Lines that may be in flight, one with ``num_losses`` among them."""
        most: int = self.capacity // _SHRINK_FACTOR**num_losses
        return max(1, most)

    def _report_soon(self) -> None:
        self._reporting = asyncio.get_running_loop().call_later(PROGRESS_PERIOD_S, self._report)

    def _report(self) -> None:
        self._reporting = None
        if self.num_running > 0:
            self._report_soon()
        for feed in self._feeds:
            feed.report_progress()

    async def _run(self, feed: Feed, line: BatchLine, count: TokenCount, *, is_alone: bool) -> None:
        result, goes_on = None, False
        try:
            result = await self._runner.run(line, count, is_alone=is_alone)
            result.encode("")  # here, as what cannot be encoded would fail the lines that are written with it
        except RequestLost as error:
            if error.num_lost > 0:
                goes_on = isinstance(error, StepFailed)
                result = self._after_loss(feed, line, error)
        except Exception:
            logger.exception("%s: line %d failed", feed.name, line.number)
            result = unanswered(line, "internal_error")
        finally:
            del feed.running[line.number]
            self.num_running -= 1
        if result is None:
            feed.put_back(line)
            self._order.note_ended(feed)
            if goes_on:
                self._fill()
            return
        feed.note_ended(result)
        if feed.committer is None:
            feed.committer = self._tasks.start(self._commit(feed), "feeder-commit")

    def _after_loss(self, feed: Feed, line: BatchLine, error: RequestLost) -> LineResult | None:
        """The result of a line that is given up; None where it runs again."""
        self._num_lost += isinstance(error, EngineDead)
        self._may_have_suspects = True
        losses = feed.suspects.note_lost(
            line.number,
            is_lone=error.num_others == 0,
            is_only_line=not feed.running[line.number].ran_with_others,
        )
        feed.has_unsaved_losses = True
        if feed.saver is None:
            feed.saver = self._tasks.start(self._save(feed), "feeder-save")
        if not losses.is_to_blame:
            return None
        logger.error(
            "%s: line %d is given up: the engine lost it %d times, %d times with no other request, "
            "%d times with no other line",
            feed.name,
            line.number,
            losses.num,
            losses.num_lone,
            losses.num_only_line,
        )
        feed.suspects.num_blamed += 1
        try:
            feed.suspects.check()
        except BatchPoisoned as poisoned:
            feed.fail(poisoned)
        return unanswered(line, "engine_error")

    async def _save(self, feed: Feed) -> None:
        """Make losses durable. Losses during one write go into the next."""
        try:
            while feed.has_unsaved_losses:
                feed.has_unsaved_losses = False
                save = partial(feed.suspects.save, feed.suspects.encode())
                await with_retries(self._threads, save, f"{feed.name}: lost lines cannot be saved")
        finally:
            feed.saver = None

    async def _commit(self, feed: Feed) -> None:
        """Make results durable, group by group. Results during one write form the next group."""
        try:
            while feed.results:
                group, feed.results = feed.results, []
                await append_with_retries(self._threads, feed.sink, group, feed.name)
                feed.on_committed(group)
                self.num_durable += len(group)
                feed.note_durable(group)
                self._order.note_ended(feed, len(group))
                self._fill()
        except Exception as error:
            feed.fail(error)
            self._order.note_waiting(feed)
        finally:
            feed.committer = None
