"""Lines to the engine and back: shares, deaths of the engine, and troubles of one batch among others."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from backfill.core.errors import BackfillError, EngineDead
from backfill.jobs import feeder as feeder_module
from backfill.jobs.feeder import MAX_LONE_DEATHS, Feed, Feeder, InputChanged
from backfill.jobs.lines import BatchLine, LineResult, completed
from tests.jobs.doubles import URL

pytestmark = pytest.mark.anyio

CAPACITY = 64


def line_of(number: int, body: bytes = b"{}") -> BatchLine:
    return BatchLine(number, f"r{number}", "POST", URL, body)


class Engine:
    """Holds lines until told, or answers at once; dies over fatal ones with all it holds."""

    def __init__(self, fatal: Iterable[int] = (), *, holds: bool = False) -> None:
        self.fatal = set(fatal)
        self.holds = holds
        self.feeder = Feeder(self)
        self.in_flight: dict[int, asyncio.Future[None]] = {}
        self.most_in_flight: list[int] = [0]  # in each life
        self.num_deaths = 0

    async def run(self, line: BatchLine) -> LineResult:
        end = self.in_flight[line.number] = asyncio.get_running_loop().create_future()
        self.most_in_flight[-1] = max(self.most_in_flight[-1], len(self.in_flight))
        if line.number in self.fatal:
            asyncio.get_running_loop().call_later(0.001, self.die)
        elif not self.holds:
            asyncio.get_running_loop().call_later(0.002, lambda: end.done() or end.set_result(None))
        try:
            await end
        finally:
            self.in_flight.pop(line.number, None)
        return completed(line, {}, "req")

    def start(self) -> None:
        self.feeder.set_capacity(CAPACITY)

    def die(self) -> None:
        self.num_deaths += 1
        self.most_in_flight.append(0)
        for end in self.in_flight.values():
            if not end.done():
                end.set_exception(EngineDead("killed"))
        self.feeder.set_capacity(0)
        asyncio.get_running_loop().call_later(0.003, self.start)


class Sink:
    def __init__(self) -> None:
        self.results: list[LineResult] = []

    def append(self, results: Sequence[LineResult]) -> None:
        self.results.extend(results)

    def failed(self) -> list[int]:
        return sorted(result.line.number for result in self.results if result.error is not None)


def feed_of(lines: Iterator[BatchLine], num_lines: int, sink: Any = None, name: str = "b") -> Feed:
    return Feed(name, lines, num_lines, sink or Sink(), lambda results: None)


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
        engine.die()
        await until(lambda at=num_deaths: len(engine.most_in_flight) == at + 1 and bool(engine.in_flight))
    engine.holds = False
    engine.die()
    await asyncio.wait_for(feed.finished, 10)
    assert sink.failed() == []
    assert len(sink.results) == 200


async def test_a_line_that_kills_the_engine_is_found_and_costs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, sink = Engine(fatal={7}), Sink()
    feed = feed_of(lines_up_to(200), 200, sink)
    engine.start()
    engine.feeder.add(feed)
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(feed.finished, 10)
    assert sink.failed() == [7]
    assert len({result.line.number for result in sink.results}) == 200
    # Among all, among an eighth, and then alone.
    assert engine.num_deaths == 2 + MAX_LONE_DEATHS
    assert engine.most_in_flight[0] == CAPACITY
    assert engine.most_in_flight[1] == CAPACITY // 8
    assert engine.most_in_flight[2 : 1 + MAX_LONE_DEATHS] == [1] * (MAX_LONE_DEATHS - 1)
    assert max(engine.most_in_flight[-1:]) == CAPACITY, "once it is found, all places are used again"
    assert len(caplog.records) == engine.num_deaths + 1, (
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


async def test_lines_in_memory_are_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_module, "MAX_HELD_BYTES", 1000)
    engine = Engine(holds=True)
    num_read = 0

    def long_lines() -> Iterator[BatchLine]:
        nonlocal num_read
        for number in range(20):
            num_read += 1
            yield line_of(number, b"x" * 400)

    feed = feed_of(long_lines(), 20)
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


async def test_a_removal_that_is_cancelled_waits_for_a_write_that_has_begun() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(Sink):
        def append(self, results: Sequence[LineResult]) -> None:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(10)
            super().append(results)

    engine, sink = Engine(), Slow()
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
