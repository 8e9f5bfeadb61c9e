"""Lines that are put back, lost or removed, and errors of one batch among others."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest

from backfill.core.errors import BackfillError
from backfill.jobs import feeder as feeder_module
from backfill.jobs.feed import Feed, InputChanged, LineSource
from backfill.jobs.lines import LineResult
from backfill.jobs.suspects import Suspects
from backfill.jobs.threads import ThreadPool
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount
from tests.jobs.feeder_doubles import (
    CAPACITY,
    Engine,
    Sink,
    Source,
    feed_of,
    line_of,
    lines_up_to,
)
from tests.patience import TIMEOUT_S, until
from tests.protocol.builders import make_generation

pytestmark = pytest.mark.anyio


async def test_places_of_a_removed_batch_go_to_others() -> None:
    engine = Engine(holds=True)
    greedy, other = feed_of(lines_up_to(200), 200), feed_of((line_of(n) for n in range(500, 510)), 10)
    engine.start(greedy)
    await until(lambda: len(engine.in_flight) == CAPACITY)
    engine.feeder.add(other)
    await engine.feeder.remove(greedy)
    await until(lambda: len(engine.in_flight) == 10)


class HalfBegins(Engine):
    """Lines of even numbers get a token, the others none before they end."""

    async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
        if count is not None:
            count.num_tokens = 1 - line.number % 2
        return await super().run(line, count)


async def test_a_drain_begins_no_line_and_waits_for_results() -> None:
    engine, sink, num_begun = HalfBegins(holds=True), Sink(), CAPACITY // 2
    feed = feed_of(lines_up_to(200), 200, sink)
    engine.start(feed)
    await until(lambda: len(engine.in_flight) == CAPACITY)
    assert engine.feeder.num_begun == num_begun
    assert await engine.feeder.drain(0.01) == num_begun
    assert len(engine.in_flight) == feed.num_in_flight == num_begun, "the time was too short"
    engine.holds = False
    assert await asyncio.wait_for(engine.feeder.drain(TIMEOUT_S), TIMEOUT_S) == num_begun
    assert {result.line.number for result in sink.results} == set(range(0, CAPACITY, 2))
    assert feed.num_in_flight == 0
    assert not feed.finished.done()
    engine.start()  # what was put back runs with the rest
    await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert {result.line.number for result in sink.results} == set(range(200))


async def test_a_drain_puts_lines_back_that_have_not_run_at_all() -> None:
    engine, sink = Engine(holds=True), Sink()
    feed = feed_of(lines_up_to(40), 40, sink)
    engine.feeder.add(feed)
    engine.feeder.set_capacity(1)
    await until(lambda: len(engine.in_flight) == 1)
    engine.start()
    assert len(feed.running) > len(engine.in_flight)
    assert await engine.feeder.drain(TIMEOUT_S) == 0
    assert not feed.running
    engine.holds = False
    engine.start()
    await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert len(sink.results) == 40


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad sector"), None])
async def test_lines_that_cannot_be_read_end_their_own_batch_only(error: OSError | None) -> None:
    def broken() -> Iterator[BatchLine]:
        yield line_of(1)
        if error is not None:
            raise error

    engine, sinks = Engine(), [Sink(), Sink()]
    bad = feed_of(broken(), 5, sinks[0])
    good = feed_of((line_of(number) for number in range(100, 300)), 200, sinks[1])
    engine.start(good, bad)
    await asyncio.wait_for(good.finished, TIMEOUT_S)
    assert len(sinks[1].results) == 200
    with pytest.raises(OSError if error else InputChanged):
        await bad.finished


async def test_results_that_cannot_be_written_end_their_own_batch_only() -> None:
    class Broken(Sink):
        def append(self, results: Sequence[LineResult]) -> None:
            raise BackfillError("the file is gone")

    engine, sink = Engine(), Sink()
    bad = feed_of(lines_up_to(50), 50, Broken())
    good = feed_of((line_of(number) for number in range(100, 300)), 200, sink)
    engine.start(bad, good)
    with pytest.raises(BackfillError, match="gone"):
        await asyncio.wait_for(bad.finished, TIMEOUT_S)
    await engine.feeder.remove(bad)
    await asyncio.wait_for(good.finished, TIMEOUT_S)
    assert len(sink.results) == 200


async def test_an_unexpected_error_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unbound(Suspects):
        def save(self, content: bytes) -> None:
            raise ValueError("a bug")

    engine, sink = Engine(fatal={0}), Sink()
    feed = feed_of(lines_up_to(1), 1, sink, suspects=Unbound())
    await engine.finish(feed)
    await until(lambda: engine.tasks.failures["feeder-save"] > 0)
    assert "a bug" in caplog.text


async def test_a_batch_removed_during_a_read_and_a_write_blocks_no_other() -> None:
    class Hanging(Source):
        """Gives two lines, and then no more."""

        is_read_again = False

        async def read(self, max_lines: int) -> list[tuple[LineSource, BatchLine]]:
            if self.is_read_again:
                await asyncio.Event().wait()
            self.is_read_again = True
            return [(self, line_of(0)), (self, line_of(1))]

    class Refusing(Sink):
        def append(self, results: Sequence[LineResult]) -> None:
            raise OSError(errno.ENOSPC, "full")

    engine, sink = Engine(), Sink()
    leaving = Feed("a", Hanging(), 100, Refusing(), lambda results: None, deadline_at_s=1.0)
    staying = feed_of((line_of(n) for n in range(500, 510)), 10, sink)
    engine.start(leaving)
    await until(lambda: leaving.committer is not None and leaving.reading is not None)
    engine.feeder.add(staying)
    removal = asyncio.create_task(engine.feeder.remove(leaving))
    await asyncio.wait_for(staying.finished, TIMEOUT_S)
    assert not removal.done()
    removal.cancel()
    await asyncio.wait([removal])


async def test_lines_read_for_a_batch_that_was_removed_are_those_of_others() -> None:
    may_read = asyncio.Event()

    class Waiting(Source):
        """The first read is of both batches; there is no other."""

        async def read(self, max_lines: int) -> list[tuple[LineSource, BatchLine]]:
            if self is not leaving.source:
                await asyncio.Event().wait()
            await may_read.wait()
            return [(self, line_of(0)), *((staying.source, line_of(n)) for n in (1, 2))]

    engine, sink = Engine(), Sink()
    leaving = Feed("a", Waiting(), 1, Sink(), lambda results: None, deadline_at_s=1.0)
    staying = Feed("b", Waiting(), 2, sink, lambda results: None)
    engine.start(leaving, staying)
    await until(lambda: leaving.reading is not None)
    await engine.feeder.remove(leaving)
    may_read.set()
    await asyncio.wait_for(staying.finished, TIMEOUT_S)
    assert sorted(result.line.number for result in sink.results) == [1, 2]
    assert not leaving.finished.done()


async def test_a_removal_that_is_cancelled_waits_for_a_write_that_has_begun() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(Sink):
        def append(self, results: Sequence[LineResult]) -> None:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(TIMEOUT_S)
            super().append(results)

    engine, sink = Engine(threads=ThreadPool("results", 1)), Slow()
    feed = feed_of(lines_up_to(3), 3, sink)
    engine.start(feed)
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


async def test_lines_cancelled_before_they_began_leave_their_places() -> None:
    engine = Engine(holds=True)
    first, second = feed_of(lines_up_to(200), 200), feed_of((line_of(n) for n in range(500, 510)), 10)
    engine.start(first)
    await until(lambda: len(first.running) > 0)
    await engine.feeder.remove(first)
    engine.feeder.add(second)
    engine.holds = False
    await asyncio.wait_for(second.finished, TIMEOUT_S)


async def test_a_line_that_was_lost_counts_from_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_module, "PROGRESS_PERIOD_S", 0.001)
    counts: list[TokenCount] = []

    class Counting(Engine):
        async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
            assert count is not None
            counts.append(count)
            return await super().run(line, count)

    engine = Counting(holds=True, survives=True, reports_progress=True)
    source = Source(lines_up_to(1))
    feed = Feed("b", source, 1, Sink(), lambda results: None)
    engine.start(feed)
    for num_tokens in (9, 4):
        await until(lambda: len(engine.in_flight) == 1)
        counts[-1].num_tokens = num_tokens
        await until(lambda at=num_tokens: source.progress[-1:] == [{0: at}])
        if num_tokens == 9:
            engine.fail()
            await until(lambda: len(counts) == 2)
    engine.holds = False
    await asyncio.wait_for(feed.finished, TIMEOUT_S)


async def test_a_lost_line_runs_again_without_what_waiting_lines_needed_of_it() -> None:
    class Told(Engine):
        """Remembers what it was told of prompts that waiting lines share."""

        def __init__(self) -> None:
            super().__init__(fatal={0}, survives=True)
            self.told: list[int | None] = []

        async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
            assert line.generation is not None
            self.told.append(line.generation.request.num_reused_tokens)
            return await super().run(line, count)

    generation = make_generation()
    request = replace(generation.request, num_reused_tokens=3)
    line = line_of(0)
    line.generation = msgspec.structs.replace(generation, request=request)
    engine = Told()
    feed = feed_of(iter([line]), 1)
    await engine.finish(feed)
    assert engine.told == [3, None, None]
