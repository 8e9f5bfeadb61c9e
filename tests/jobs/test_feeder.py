"""Whose line is next, how many are read and held, and what their source is told."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from backfill.core.errors import EngineDead
from backfill.jobs import feeder as feeder_module
from backfill.jobs.feed import Feed, LineSource
from backfill.jobs.lines import LineResult, unanswered
from backfill.jobs.records import TokenUsage
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount
from tests.jobs.feeder_doubles import (
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
    engine.start(feed)
    await until(lambda: len(engine.in_flight) == num_read == 3)
    for _ in range(20):
        await asyncio.sleep(0)
    assert num_read == 3, "up to the bound, and one line over it"
    while not feed.finished.done():
        engine.end_lines()
        await asyncio.sleep(0.001)
    assert num_read == 20


async def test_lines_read_for_batches_that_must_wait_do_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeder_module, "MAX_BUFFERED_BYTES", 1000)
    engine = Engine(holds=True)
    engine.feeder.set_capacity(1)
    feeds: list[Feed] = []
    for number in range(10):  # each has lines in memory when a more urgent one comes
        lines = (line_of(n, 100) for n in range(10 * number, 10 * number + 10))
        feeds.append(feed_of(lines, 10, deadline_at_s=100.0 - number))
        engine.feeder.add(feeds[-1])
        async with asyncio.timeout(TIMEOUT_S):
            while not feeds[-1].running:  # lines that were read before may have to end first
                engine.end_lines()
                await asyncio.sleep(0.001)
        assert feeds[-1].has_read_lines
    engine.holds = False
    await asyncio.wait_for(asyncio.gather(*(feed.finished for feed in feeds)), TIMEOUT_S)


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
    async with asyncio.timeout(TIMEOUT_S):
        while num_running[-1] < 200:
            await asyncio.sleep(0)
            num_running.append(len(feed.running))
    assert max(after - before for before, after in itertools.pairwise(num_running)) <= 32


class SharedSource(Source):
    """A source of one of several batches of an owner: a read returns lines of any of them."""

    def __init__(self, waiting: deque[tuple[LineSource, BatchLine]], may_read: asyncio.Event) -> None:
        super().__init__()
        self.waiting = waiting
        self.may_read = may_read
        self.num_reads = 0

    async def read(self, max_lines: int) -> list[tuple[LineSource, BatchLine]]:
        self.num_reads += 1
        await asyncio.sleep(0)
        await self.may_read.wait()
        return [self.waiting.popleft() for _ in range(min(max_lines, 4, len(self.waiting)))]


def pooled(
    order: Sequence[tuple[int, int]], sinks: Sequence[Sink], may_read: asyncio.Event | None = None
) -> tuple[list[Feed], list[SharedSource]]:
    """Feeds of one owner, the last one with the earliest deadline.

    Args:
        order: batch and number of each line, in which they are read.
    """
    waiting: deque[tuple[LineSource, BatchLine]] = deque()
    if may_read is None:
        may_read = asyncio.Event()
        may_read.set()
    sources = [SharedSource(waiting, may_read) for _ in sinks]
    waiting.extend((sources[batch], line_of(number)) for batch, number in order)
    num_lines = Counter(batch for batch, _ in order)
    feeds = [
        Feed(
            f"b{batch}",
            source,
            num_lines[batch],
            sinks[batch],
            lambda results: None,
            owner="a",
            deadline_at_s=-batch,
        )
        for batch, source in enumerate(sources)
    ]
    return feeds, sources


async def test_lines_of_an_owner_run_in_the_order_of_the_pool_whichever_batch_they_are_of() -> None:
    order = [(number % 3, number) for number in range(30)]
    random.Random(1).shuffle(order)
    engine, sinks = Engine(holds=True), [Sink() for _ in range(3)]
    feeds, _ = pooled(order, sinks)
    for feed in feeds:
        engine.feeder.add(feed)
    engine.feeder.set_capacity(1)
    started: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(started) < 30:
            for number, end in engine.in_flight.items():
                if not end.done():
                    started.append(number)
                    end.set_result(None)
            await asyncio.sleep(0.001)
    assert started == [number for _, number in order]
    await asyncio.wait_for(asyncio.gather(*(feed.finished for feed in feeds)), TIMEOUT_S)
    for batch, sink in enumerate(sinks):
        assert {result.line.number % 3 for result in sink.results} == {batch}


async def test_a_batch_that_leaves_takes_its_lines_along_and_no_others() -> None:
    order = [(number % 2, number) for number in range(100)]
    engine, sinks = Engine(holds=True), [Sink(), Sink()]
    (leaving, staying), _ = pooled(order, sinks)
    engine.start(leaving, staying)
    await until(lambda: len(leaving.running) > 3 and len(staying.running) > 3)
    await engine.feeder.remove(leaving)
    engine.holds = False
    await asyncio.wait_for(staying.finished, TIMEOUT_S)
    assert sorted(result.line.number for result in sinks[1].results) == list(range(1, 100, 2))


async def test_the_source_learns_what_has_ended_and_how_long_it_was() -> None:
    class Answers(Engine):
        async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
            result = await super().run(line, count)
            if line.number == 3:
                return unanswered(line, "internal_error")
            return replace(result, usage=TokenUsage(output_tokens=line.number))

    engine = Answers(fatal={4}, survives=True)
    source = Source(lines_up_to(6))
    feed = Feed("b", source, 6, Sink(), lambda results: None)
    await engine.finish(feed)
    assert source.ended == {0: 0, 1: 1, 2: 2, 3: None, 4: None, 5: 5}, "those that were lost ended once"


async def test_a_result_that_cannot_be_encoded_fails_its_line_alone() -> None:
    class Answers(Engine):
        async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
            result = await super().run(line, count)
            return replace(result, response={"text": "\ud83d"}) if line.number == 3 else result

    engine, sink = Answers(), Sink()
    feed = Feed("b", Source(lines_up_to(6)), 6, sink, lambda results: None)
    await engine.finish(feed)
    failed = [result.line.number for result in sink.results if result.error is not None]
    assert (len(sink.results), failed) == (6, [3])


@pytest.mark.parametrize("reports", [True, False])
async def test_the_source_learns_how_far_running_lines_are(
    reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One report at a time, of the lines that have gone on; a line of two choices has their mean."""
    monkeypatch.setattr(feeder_module, "PROGRESS_PERIOD_S", 0.001)
    counts: dict[int, TokenCount | None] = {}

    class Counting(Engine):
        async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
            counts[line.number] = count
            return await super().run(line, count)

    engine = Counting(holds=True, reports_progress=reports)
    lines = [line_of(number) for number in range(3)]
    lines[2].generation = make_generation(num_choices=2)
    source = Source(iter(lines))
    feed = Feed("b", source, 3, Sink(), lambda results: None)
    engine.start(feed)
    await until(lambda: len(engine.in_flight) == 3)
    if not reports:
        assert engine.feeder._reporting is None
    else:
        for numbers in ({0: 5, 2: 6}, {1: 1}):
            for number, num_tokens in numbers.items():
                count = counts[number]
                assert count is not None
                count.num_tokens = num_tokens
            await until(
                lambda told=numbers: (
                    len(source.progress[-1:]) > 0 and source.progress[-1].keys() == told.keys()
                )
            )
    engine.holds = False
    await asyncio.wait_for(feed.finished, TIMEOUT_S)
    await until(lambda: engine.feeder._reporting is None)
    assert source.progress == ([{0: 5, 2: 3}, {1: 1}] if reports else [])


async def test_lines_beyond_those_that_were_checked_are_dropped() -> None:
    engine, sink = Engine(), Sink()
    source = Source(lines_up_to(8), group=8)
    feed = Feed("b", source, 5, sink, lambda results: None)
    await engine.finish(feed)
    assert sorted(result.line.number for result in sink.results) == list(range(5))
    assert {number for number, length in source.ended.items() if length is None} == {5, 6, 7}


async def test_one_read_at_a_time_is_enough_for_all_batches_of_an_owner() -> None:
    engine, sinks, may_read = Engine(), [Sink(), Sink()], asyncio.Event()
    feeds, sources = pooled([(number % 2, number) for number in range(10)], sinks, may_read)
    engine.start()
    for feed in feeds:  # the second is more urgent, and its lines are the first one's read's too
        engine.feeder.add(feed)
        await asyncio.sleep(0)
    await until(lambda: sources[0].num_reads == 1)
    assert sources[1].num_reads == 0
    may_read.set()
    for feed in feeds:
        await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert [len(sink.results) for sink in sinks] == [5, 5]


async def test_lines_of_others_start_while_those_of_one_owner_are_read() -> None:
    engine, sinks = Engine(holds=True), [Sink() for _ in range(3)]
    waiting: deque[tuple[LineSource, BatchLine]] = deque()
    may_read = asyncio.Event()
    source = SharedSource(waiting, may_read)
    waiting.extend((source, line_of(1000 + number)) for number in range(200))
    slow = Feed("slow", source, 200, sinks[0], lambda results: None, owner="slow", deadline_at_s=1.0)
    quick = [
        feed_of((line_of(n) for n in range(at, at + 100)), 100, sink, owner=f"quick {at}", deadline_at_s=2.0)
        for at, sink in ((0, sinks[1]), (100, sinks[2]))
    ]
    engine.feeder.set_capacity(60)
    for feed in (slow, *quick):
        engine.feeder.add(feed)
    await until(lambda: len(engine.in_flight) >= 40)
    for _ in range(20):
        await asyncio.sleep(0)
    assert [len(feed.running) for feed in quick] == [20, 20], "and leave the slow one its share"
    for _ in range(3):  # their lines end and others take their places
        engine.end_lines()
        ended = [len(sink.results) for sink in sinks]
        await until(
            lambda ended=ended: [len(sink.results) for sink in sinks[1:]] == [n + 20 for n in ended[1:]]
        )
        await until(lambda: len(engine.in_flight) == 40)
    assert source.num_reads == 1
    may_read.set()
    await until(lambda: len(engine.in_flight) == 60)
    assert [len(feed.running) for feed in (slow, *quick)] == [20, 20, 20]
    engine.holds = False
    await asyncio.wait_for(asyncio.gather(slow.finished, *(feed.finished for feed in quick)), TIMEOUT_S)
    assert [len(sink.results) for sink in sinks] == [200, 100, 100]


async def test_a_read_that_finds_its_lines_with_another_read_ends_no_batch() -> None:
    engine, sink, may_read = Engine(), Sink(), asyncio.Event()
    feed = Feed("batch", SharedSource(deque(), may_read), 1, sink, lambda results: None)
    engine.start(feed)
    await until(lambda: feed.reading is not None)
    feed.add(line_of(0), 0)  # it came with another batch's read
    may_read.set()
    await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert len(sink.results) == 1
