"""Lines to the engine and back: shares, deaths of the engine, and troubles of one batch among others."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from backfill.core.errors import BackfillError, EngineDead, StepFailed
from backfill.engine.tasks import TaskWatch
from backfill.jobs import feeder as feeder_module
from backfill.jobs.feed import Feed, InputChanged
from backfill.jobs.feeder import Feeder
from backfill.jobs.lines import LineResult, completed
from backfill.jobs.suspects import MAX_LONE_LOSSES, MAX_ONLY_LINE_LOSSES, Suspects
from backfill.jobs.threads import ThreadPool
from backfill.preparation.lines import BatchLine

pytestmark = pytest.mark.anyio

CAPACITY = 64

Args = ParamSpec("Args")
Result = TypeVar("Result")


def line_of(number: int, num_bytes: int = 2) -> BatchLine:
    return BatchLine(number=number, custom_id=f"r{number}", num_bytes=num_bytes)


class Source:
    """Lines of an iterator, so many at once."""

    def __init__(self, lines: Iterator[BatchLine], group: int = 5) -> None:
        self._lines = lines
        self._group = group

    async def read(self, max_lines: int) -> list[BatchLine]:
        await asyncio.sleep(0)
        return list(itertools.islice(self._lines, min(max_lines, self._group)))


class NoThreads(ThreadPool):
    """Calls run at once."""

    async def run(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        await asyncio.sleep(0)
        return work(*args, **kwargs)


class Engine:
    """Runs all lines it holds in one step, once no more come; dies over fatal ones with all it holds.

    Args:
        fatal: lines in whose steps it dies; or fails, with ``survives``.
        holds: no step runs until this is False.
        num_others: requests that are not the feeder's, in every step.
        threads: for results; by default none, so that nothing depends on how long they take.
    """

    def __init__(
        self,
        fatal: Iterable[int] = (),
        *,
        holds: bool = False,
        survives: bool = False,
        num_others: int = 0,
        threads: ThreadPool | None = None,
    ) -> None:
        self.fatal = set(fatal)
        self.holds = holds
        self.survives = survives
        self.num_others = num_others
        self.tasks = TaskWatch()
        self.feeder = Feeder(self, threads or NoThreads("results", 1), self.tasks)
        self.in_flight: dict[int, asyncio.Future[None]] = {}
        self.most_in_flight: list[int] = [0]  # between two faults
        self.num_failures = 0
        self._stepping: asyncio.Task[None] | None = None

    async def run(self, line: BatchLine) -> LineResult:
        end = self.in_flight[line.number] = asyncio.get_running_loop().create_future()
        self.most_in_flight[-1] = max(self.most_in_flight[-1], len(self.in_flight))
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step())
        try:
            await end
        finally:
            self.in_flight.pop(line.number, None)
        return completed(line, {})

    async def _step(self) -> None:
        held, num_quiet = -1, 0
        while num_quiet < 20 or self.holds:
            num_quiet = num_quiet + 1 if held == len(self.in_flight) else 0
            held = len(self.in_flight)
            await asyncio.sleep(0.001 if self.holds else 0)
        self._stepping = None
        if self.fatal & set(self.in_flight):
            self.fail()
            return
        for end in self.in_flight.values():
            if not end.done():
                end.set_result(None)

    def start(self) -> None:
        self.feeder.set_capacity(CAPACITY)

    def fail(self) -> None:
        """As the lines in flight see it."""
        self.num_failures += 1
        self.most_in_flight.append(0)
        num_lost = len(self.in_flight) + self.num_others
        kind = StepFailed if self.survives else EngineDead
        for end in self.in_flight.values():
            if not end.done():
                end.set_exception(kind("killed", num_lost=num_lost, num_others=num_lost - 1))
        if not self.survives:
            self.feeder.set_capacity(0)
            asyncio.get_running_loop().call_later(0.001, self.start)


class Sink:
    def __init__(self) -> None:
        self.results: list[LineResult] = []

    def append(self, results: Sequence[LineResult]) -> None:
        self.results.extend(results)

    def failed(self) -> list[int]:
        return sorted(result.line.number for result in self.results if result.error is not None)


def feed_of(
    lines: Iterator[BatchLine],
    num_lines: int,
    sink: Any = None,
    *,
    group: int = 5,
    **options: Any,
) -> Feed:
    return Feed("b", Source(lines, group), num_lines, sink or Sink(), lambda results: None, **options)


def lines_up_to(count: int) -> Iterator[BatchLine]:
    return (line_of(number) for number in range(count))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_deaths_of_the_engine_fail_no_line_that_was_one_of_many() -> None:
    engine, sink = Engine(holds=True), Sink()
    feed = feed_of(lines_up_to(200), 200, sink)
    engine.start()
    engine.feeder.add(feed)
    for num_deaths in range(1, 3):  # after two, lines of this capacity are run one by one
        await until(lambda: len(engine.in_flight) > 1)
        engine.fail()
        await until(lambda at=num_deaths: len(engine.most_in_flight) == at + 1 and bool(engine.in_flight))
    engine.holds = False
    engine.fail()
    await asyncio.wait_for(feed.finished, 10)
    assert sink.failed() == []
    assert len(sink.results) == 200


async def test_a_line_that_kills_the_engine_is_found_and_costs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, sink = Engine(fatal={CAPACITY + 7}), Sink()
    feed = feed_of(lines_up_to(200), 200, sink)
    engine.start()
    engine.feeder.add(feed)
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(feed.finished, 10)
    assert sink.failed() == [CAPACITY + 7]
    assert len({result.line.number for result in sink.results}) == 200
    # Among all, among an eighth, and then alone.
    assert engine.num_failures == 2 + MAX_LONE_LOSSES
    assert engine.most_in_flight[0] == CAPACITY
    assert engine.most_in_flight[1] == CAPACITY // 8
    assert engine.most_in_flight[2 : 1 + MAX_LONE_LOSSES] == [1] * (MAX_LONE_LOSSES - 1)
    assert max(engine.most_in_flight[-1:]) == CAPACITY, "once it is found, all places are used again"
    assert len(caplog.records) == engine.num_failures + 1, (
        "one line of the log for each death, one for the line"
    )


async def test_several_fatal_lines_of_several_batches() -> None:
    engine, sinks = Engine(fatal={3, 90}), [Sink(), Sink()]
    halves = [(line_of(number) for number in range(start, start + 50)) for start in (0, 50)]
    feeds = [feed_of(half, 50, sink) for half, sink in zip(halves, sinks, strict=True)]
    engine.start()
    for feed in feeds:
        engine.feeder.add(feed)
    await asyncio.wait_for(asyncio.gather(*(feed.finished for feed in feeds)), 10)
    assert [sink.failed() for sink in sinks] == [[3], [90]]
    assert [len(sink.results) for sink in sinks] == [50, 50]


async def test_places_of_a_batch_that_leaves_are_given_to_others() -> None:
    engine = Engine(holds=True)
    greedy, other = feed_of(lines_up_to(200), 200), feed_of((line_of(n) for n in range(500, 510)), 10)
    engine.start()
    engine.feeder.add(greedy)
    await until(lambda: len(engine.in_flight) == CAPACITY)
    engine.feeder.add(other)
    await engine.feeder.remove(greedy)
    await until(lambda: len(engine.in_flight) == 10)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad sector"), None])
async def test_lines_that_cannot_be_read_end_their_own_batch_only(error: OSError | None) -> None:
    def broken() -> Iterator[BatchLine]:
        yield line_of(1)
        if error is not None:
            raise error

    engine, sinks = Engine(), [Sink(), Sink()]
    bad = feed_of(broken(), 5, sinks[0])
    good = feed_of((line_of(number) for number in range(100, 300)), 200, sinks[1])
    engine.start()
    engine.feeder.add(good)
    engine.feeder.add(bad)
    await asyncio.wait_for(good.finished, 10)
    assert len(sinks[1].results) == 200
    with pytest.raises(OSError if error else InputChanged):
        await bad.finished


async def test_results_that_cannot_be_kept_end_their_own_batch_only() -> None:
    class Broken(Sink):
        def append(self, results: Sequence[LineResult]) -> None:
            raise BackfillError("the file is gone")

    engine, sink = Engine(), Sink()
    bad = feed_of(lines_up_to(50), 50, Broken())
    good = feed_of((line_of(number) for number in range(100, 300)), 200, sink)
    engine.start()
    engine.feeder.add(bad)
    engine.feeder.add(good)
    with pytest.raises(BackfillError, match="gone"):
        await asyncio.wait_for(bad.finished, 10)
    await engine.feeder.remove(bad)
    await asyncio.wait_for(good.finished, 10)
    assert len(sink.results) == 200


async def test_an_unexpected_error_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unbound(Suspects):
        def save(self, content: bytes) -> None:
            raise ValueError("a bug")

    engine, sink = Engine(fatal={0}), Sink()
    feed = feed_of(lines_up_to(1), 1, sink, suspects=Unbound())
    engine.start()
    engine.feeder.add(feed)
    await asyncio.wait_for(feed.finished, 10)
    await until(lambda: engine.tasks.failures["feeder-save"] > 0)
    assert "a bug" in caplog.text


async def test_lines_in_memory_are_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_module, "MAX_BUFFERED_BYTES", 1000)
    engine = Engine(holds=True)
    num_read = 0

    def long_lines() -> Iterator[BatchLine]:
        nonlocal num_read
        for number in range(20):
            num_read += 1
            yield line_of(number, 400)

    feed = feed_of(long_lines(), 20, group=1)
    engine.start()
    engine.feeder.add(feed)
    await asyncio.sleep(0.01)
    assert num_read == 3, "up to the bound, and one line over it"
    while not feed.finished.done():
        for end in engine.in_flight.values():
            if not end.done():
                end.set_result(None)
        await asyncio.sleep(0.001)
    assert num_read == 20


async def test_lines_read_for_batches_that_must_wait_do_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeder_module, "MAX_BUFFERED_BYTES", 1000)
    engine = Engine(holds=True)
    engine.feeder.set_capacity(1)
    feeds: list[Feed] = []
    for number in range(10):  # each has begun, with lines read ahead, when a more urgent one comes
        lines = (line_of(n, 100) for n in range(10 * number, 10 * number + 10))
        feeds.append(feed_of(lines, 10, deadline_at_s=100.0 - number))
        engine.feeder.add(feeds[-1])
        async with asyncio.timeout(10):
            while not feeds[-1].running:  # lines that were read before it may have to make room
                for end in engine.in_flight.values():
                    if not end.done():
                        end.set_result(None)
                await asyncio.sleep(0.001)
        assert feeds[-1].has_read_lines
    engine.holds = False
    await asyncio.wait_for(asyncio.gather(*(feed.finished for feed in feeds)), 10)


async def test_a_batch_that_leaves_while_it_is_read_and_written_holds_up_no_other() -> None:
    class Hanging:
        """Gives two lines, and then no more."""

        is_read_again = False

        async def read(self, max_lines: int) -> list[BatchLine]:
            if self.is_read_again:
                await asyncio.Event().wait()
            self.is_read_again = True
            return [line_of(0), line_of(1)]

    class Refusing(Sink):
        def append(self, results: Sequence[LineResult]) -> None:
            raise OSError(errno.ENOSPC, "full")

    engine, sink = Engine(), Sink()
    leaving = Feed("a", Hanging(), 100, Refusing(), lambda results: None, deadline_at_s=1.0)
    staying = feed_of((line_of(n) for n in range(500, 510)), 10, sink)
    engine.start()
    engine.feeder.add(leaving)
    await until(lambda: leaving.committer is not None and leaving.reading is not None)
    engine.feeder.add(staying)
    removal = asyncio.create_task(engine.feeder.remove(leaving))
    await asyncio.wait_for(staying.finished, 10)
    assert not removal.done()
    removal.cancel()
    await asyncio.wait([removal])


async def test_a_removal_that_is_cancelled_waits_for_a_write_that_has_begun() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(Sink):
        def append(self, results: Sequence[LineResult]) -> None:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(10)
            super().append(results)

    engine, sink = Engine(threads=ThreadPool("results", 1)), Slow()
    feed = feed_of(lines_up_to(3), 3, sink)
    engine.start()
    engine.feeder.add(feed)
    await begun.wait()
    removal = asyncio.create_task(engine.feeder.remove(feed))
    for _ in range(3):
        await asyncio.sleep(0.01)
        removal.cancel()
    await asyncio.sleep(0.01)
    assert not removal.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await removal
    assert sink.results


async def test_a_step_that_fails_once_loses_no_line() -> None:
    engine, sink = Engine(fatal={CAPACITY + 7}, survives=True), Sink()
    feed = feed_of(lines_up_to(200), 200, sink)
    engine.start()
    engine.feeder.add(feed)
    await until(lambda: engine.num_failures == 1)
    engine.fatal.clear()
    await asyncio.wait_for(feed.finished, 10)
    assert sink.failed() == []
    assert sorted(result.line.number for result in sink.results) == list(range(200))
    assert engine.num_failures == 1
    assert engine.most_in_flight[-1] == CAPACITY


async def test_a_line_that_fails_its_steps_is_found_and_costs_no_other() -> None:
    engine, sink = Engine(fatal={CAPACITY + 7}, survives=True), Sink()
    feed = feed_of(lines_up_to(200), 200, sink)
    engine.start()
    engine.feeder.add(feed)
    await asyncio.wait_for(feed.finished, 10)
    assert sink.failed() == [CAPACITY + 7]
    assert len({result.line.number for result in sink.results}) == 200
    assert engine.num_failures == 2 + MAX_LONE_LOSSES
    assert engine.most_in_flight[1] == CAPACITY // 8
    assert engine.most_in_flight[2 : 1 + MAX_LONE_LOSSES] == [1] * (MAX_LONE_LOSSES - 1)


async def test_an_online_request_that_kills_the_engine_fails_no_line_beside_it() -> None:
    engine, sink = Engine(fatal={0}, num_others=1), Sink()
    feed = feed_of(lines_up_to(1), 1, sink)
    engine.start()
    engine.feeder.add(feed)
    await until(lambda: engine.num_failures >= MAX_LONE_LOSSES + 2)
    engine.fatal.clear()
    await asyncio.wait_for(feed.finished, 10)
    assert sink.failed() == []


async def test_a_fatal_line_beside_online_requests_is_given_up_in_the_end() -> None:
    engine, sink = Engine(fatal={0}, num_others=3), Sink()
    feed = feed_of(lines_up_to(9), 9, sink)
    engine.start()
    engine.feeder.add(feed)
    await asyncio.wait_for(feed.finished, 10)
    assert sink.failed() == [0]
    assert len(sink.results) == 9
    # Among all, at most eight times among fewer, and then the only line.
    assert engine.num_failures <= 2 + MAX_ONLY_LINE_LOSSES


@pytest.mark.parametrize(("num_others", "num_failed"), [(0, 1), (2, 0)])
async def test_a_line_of_several_choices_is_to_blame_where_they_are_alone(
    num_others: int, num_failed: int
) -> None:
    class Choices:
        """Loses a line of four choices, of which three have ended, beside requests that are no lines."""

        num_deaths = 0

        async def run(self, line: BatchLine) -> LineResult:
            if self.num_deaths > MAX_LONE_LOSSES:
                return completed(line, {})
            self.num_deaths += 1
            asyncio.get_running_loop().call_soon(feeder.set_capacity, CAPACITY)
            raise EngineDead("killed", num_lost=1 + num_others, num_others=num_others)

    generation: Any = type("Choices", (), {"samplings": [None] * 4})
    feeder, sink = Feeder(Choices(), NoThreads("results", 1)), Sink()
    feed = feed_of(iter([BatchLine(number=0, custom_id="r0", generation=generation)]), 1, sink)
    feeder.add(feed)
    feeder.set_capacity(CAPACITY)
    await asyncio.wait_for(feed.finished, 10)
    assert len(sink.failed()) == num_failed


async def test_a_line_that_never_reached_an_engine_is_not_to_blame() -> None:
    class Absent:
        num_runs = 0

        async def run(self, line: BatchLine) -> LineResult:
            self.num_runs += 1
            raise EngineDead("not running")

    runner = Absent()
    feeder, feed = Feeder(runner, NoThreads("results", 1)), feed_of(lines_up_to(1), 1)
    feeder.add(feed)
    for attempt in range(1, 2 * MAX_LONE_LOSSES):
        feeder.set_capacity(CAPACITY)
        await until(lambda at=attempt: runner.num_runs == at)
        feeder.set_capacity(0)
        await asyncio.sleep(0.002)
    assert not feed.finished.done()
    assert len(feed.suspects) == 0


async def test_losses_are_remembered_over_a_restart(tmp_path: Path) -> None:
    path, sink = tmp_path / "suspects" / "b", Sink()
    num_failures = 0
    for _ in range(20):  # a server that ends after each death
        engine, suspects = Engine(fatal={CAPACITY + 7}), Suspects(path, "b")
        suspects.load()
        left = [n for n in range(200) if n not in {result.line.number for result in sink.results}]
        feed = feed_of((line_of(number) for number in left), len(left), sink, suspects=suspects)
        engine.start()
        engine.feeder.add(feed)
        await until(lambda engine=engine, feed=feed: engine.num_failures > 0 or feed.finished.done())
        num_failures += engine.num_failures
        if feed.finished.done():
            break
        await until(path.exists)
        engine.feeder.set_capacity(0)
        await engine.feeder.remove(feed)
    assert sink.failed() == [CAPACITY + 7]
    assert len(sink.results) == 200
    assert num_failures == 2 + MAX_LONE_LOSSES


async def test_owners_share_evenly_and_the_earlier_deadline_goes_first() -> None:
    engine, sinks = Engine(holds=True), [Sink() for _ in range(4)]
    feeds = [
        feed_of(
            (line_of(n) for n in range(at, at + 100)), 100, sink, owner=owner, deadline_at_s=deadline_at_s
        )
        for at, sink, owner, deadline_at_s in (
            (0, sinks[0], "a", 30.0),
            (100, sinks[1], "a", 10.0),
            (200, sinks[2], "a", 20.0),
            (300, sinks[3], "b", 99.0),
        )
    ]
    for feed in feeds:
        engine.feeder.add(feed)
    engine.start()
    await until(lambda: len(engine.in_flight) == CAPACITY)
    assert [len(feed.running) for feed in feeds] == [0, CAPACITY // 2, 0, CAPACITY // 2]
    engine.holds = False
    await asyncio.wait_for(asyncio.gather(*(feed.finished for feed in feeds)), 10)
    assert [len(sink.results) for sink in sinks] == [100] * 4


async def test_lines_start_a_few_at_a_time_so_that_others_get_their_turn() -> None:
    engine = Engine(holds=True)
    feed = feed_of(lines_up_to(200), 200)
    engine.feeder.add(feed)
    engine.feeder.set_capacity(200)
    await until(lambda: len(engine.in_flight) == 200)
    engine.feeder.set_capacity(0)
    for end in engine.in_flight.values():  # all are to run again
        end.set_exception(EngineDead("not running"))
    await until(lambda: not feed.running)
    engine.feeder.set_capacity(200)
    num_running = [0, len(feed.running)]
    async with asyncio.timeout(10):
        while num_running[-1] < 200:
            await asyncio.sleep(0)
            num_running.append(len(feed.running))
    assert max(after - before for before, after in itertools.pairwise(num_running)) <= 32


async def test_lines_cancelled_before_they_began_leave_their_places() -> None:
    engine = Engine(holds=True)
    first, second = feed_of(lines_up_to(200), 200), feed_of((line_of(n) for n in range(500, 510)), 10)
    engine.start()
    engine.feeder.add(first)
    await until(lambda: len(first.running) > 0)
    await engine.feeder.remove(first)
    engine.feeder.add(second)
    engine.holds = False
    await asyncio.wait_for(second.finished, 10)
