"""Lines that the engine loses when it dies or a step fails: which run again, and which are given up."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from backfill.core.errors import EngineDead, StepFailed
from backfill.jobs.feeder import Feeder
from backfill.jobs.lines import LineResult, completed
from backfill.jobs.suspects import (
    MAX_BLAMED_LINES,
    MAX_LONE_LOSSES,
    MAX_ONLY_LINE_LOSSES,
    BatchPoisoned,
    LossFile,
    Suspects,
)
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount
from tests.jobs.feeder_doubles import (
    CAPACITY,
    Engine,
    NoThreads,
    Sink,
    feed_of,
    line_of,
    lines_up_to,
)
from tests.patience import TIMEOUT_S, until
from tests.protocol.builders import make_generation

pytestmark = pytest.mark.anyio


async def test_deaths_of_the_engine_fail_no_line_that_was_one_of_many() -> None:
    engine, sink = Engine(holds=True), Sink()
    feed = feed_of(lines_up_to(200), 200, sink)
    engine.start(feed)
    for num_deaths in range(1, 3):  # after two, lines of this capacity are run one by one
        await until(lambda: len(engine.in_flight) > 1)
        engine.fail()
        await until(lambda at=num_deaths: len(engine.most_in_flight) == at + 1 and bool(engine.in_flight))
    engine.holds = False
    engine.fail()
    await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert sink.failed() == []
    assert len(sink.results) == 200


@pytest.mark.parametrize("survives", [False, True], ids=["it kills the engine", "its steps fail"])
async def test_a_fatal_line_is_found_and_costs_no_other(
    caplog: pytest.LogCaptureFixture, survives: bool
) -> None:
    engine, sink = Engine(fatal={CAPACITY + 7}, survives=survives), Sink()
    feed = feed_of(lines_up_to(200), 200, sink)
    engine.start(feed)
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert sink.failed() == [CAPACITY + 7]
    assert len({result.line.number for result in sink.results}) == 200
    # With all lines, with an eighth, and then alone.
    assert engine.num_failures == 2 + MAX_LONE_LOSSES
    assert engine.most_in_flight[0] == CAPACITY
    assert engine.most_in_flight[1] == CAPACITY // 8
    assert engine.most_in_flight[2 : 1 + MAX_LONE_LOSSES] == [1] * (MAX_LONE_LOSSES - 1)
    assert max(engine.most_in_flight[-1:]) == CAPACITY, "once it is found, the full capacity is used again"
    num_deaths = 0 if survives else engine.num_failures
    assert len(caplog.records) == num_deaths + 1, "one line of the log for each death, one for the line"


async def test_several_fatal_lines_of_several_batches() -> None:
    engine, sinks = Engine(fatal={3, 90}), [Sink(), Sink()]
    halves = [(line_of(number) for number in range(start, start + 50)) for start in (0, 50)]
    feeds = [feed_of(half, 50, sink) for half, sink in zip(halves, sinks, strict=True)]
    await engine.finish(*feeds)
    assert [sink.failed() for sink in sinks] == [[3], [90]]
    assert [len(sink.results) for sink in sinks] == [50, 50]


async def test_a_batch_of_fatal_lines_fails_before_all_of_them_have_ended_the_engine() -> None:
    engine, sinks = Engine(fatal=set(range(0, 100, 2))), [Sink(), Sink()]
    halves = [(line_of(number) for number in range(start, start + 100)) for start in (0, 100)]
    feeds = [feed_of(half, 100, sink) for half, sink in zip(halves, sinks, strict=True)]
    engine.start(*feeds)
    with pytest.raises(BatchPoisoned):
        await asyncio.wait_for(feeds[0].finished, TIMEOUT_S)
    await engine.feeder.remove(feeds[0])
    await asyncio.wait_for(feeds[1].finished, TIMEOUT_S)
    assert len(sinks[0].failed()) == MAX_BLAMED_LINES and not sinks[1].failed()
    assert engine.num_failures <= 2 + MAX_BLAMED_LINES * (1 + MAX_LONE_LOSSES)


async def test_a_step_that_fails_once_loses_no_line() -> None:
    engine, sink = Engine(fatal={CAPACITY + 7}, survives=True), Sink()
    feed = feed_of(lines_up_to(200), 200, sink)
    engine.start(feed)
    await until(lambda: engine.num_failures == 1)
    engine.fatal.clear()
    await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert sink.failed() == []
    assert sorted(result.line.number for result in sink.results) == list(range(200))
    assert engine.num_failures == 1
    assert engine.most_in_flight[-1] == CAPACITY


async def test_an_online_request_that_kills_the_engine_fails_no_line_beside_it() -> None:
    engine, sink = Engine(fatal={0}, num_others=1), Sink()
    feed = feed_of(lines_up_to(1), 1, sink)
    engine.start(feed)
    await until(lambda: engine.num_failures >= MAX_LONE_LOSSES + 2)
    engine.fatal.clear()
    await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert sink.failed() == []


async def test_a_fatal_line_beside_online_requests_is_given_up_in_the_end() -> None:
    engine, sink = Engine(fatal={0}, num_others=3), Sink()
    feed = feed_of(lines_up_to(9), 9, sink)
    await engine.finish(feed)
    assert sink.failed() == [0]
    assert len(sink.results) == 9
    # With all lines, at most eight times with fewer, and then as the only line.
    assert engine.num_failures <= 2 + MAX_ONLY_LINE_LOSSES


@pytest.mark.parametrize(("num_others", "num_failed"), [(0, 1), (2, 0)])
async def test_a_line_of_several_choices_is_to_blame_where_they_are_alone(
    num_others: int, num_failed: int
) -> None:
    class Choices:
        """Loses a line of four choices, three of which have ended, beside requests that are no lines."""

        num_deaths = 0

        async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
            if self.num_deaths > MAX_LONE_LOSSES:
                return completed(line, {})
            self.num_deaths += 1
            asyncio.get_running_loop().call_soon(feeder.set_capacity, CAPACITY)
            raise EngineDead("killed", num_lost=1 + num_others, num_others=num_others)

    generation = make_generation(num_choices=4)
    feeder, sink = Feeder(Choices(), NoThreads("results", 1)), Sink()
    feed = feed_of(iter([BatchLine(number=0, custom_id="r0", generation=generation)]), 1, sink)
    feeder.add(feed)
    feeder.set_capacity(CAPACITY)
    await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert len(sink.failed()) == num_failed


@pytest.mark.parametrize(
    ("capacity", "num_losses"), [(1, 1), (8, 1), (15, 1), (16, 2), (64, 2), (127, 2), (128, 3)]
)
async def test_a_line_is_said_to_run_alone_once_its_losses_leave_no_room_beside_it(
    capacity: int, num_losses: int
) -> None:
    class Beside:
        """Loses the first line until it is to be alone. ``found`` has each time what runs beside it."""

        def __init__(self) -> None:
            self.running: set[int] = set()
            self.found: list[set[int]] = []

        async def run(self, line: BatchLine, count: TokenCount, *, is_alone: bool) -> LineResult:
            self.running.add(line.number)
            try:
                for _ in range(20):
                    await asyncio.sleep(0)
                if line.number > 0:
                    assert not is_alone, "it was never lost"
                    return completed(line, {})
                self.found.append(self.running - {0})
                if not is_alone:
                    raise StepFailed("failed", num_lost=9, num_others=8)
                return completed(line, {})
            finally:
                self.running.discard(line.number)

    runner, sink = Beside(), Sink()
    feeder, feed = Feeder(runner, NoThreads("results", 1)), feed_of(lines_up_to(300), 300, sink)
    feeder.add(feed)
    feeder.set_capacity(capacity)
    await asyncio.wait_for(feed.finished, TIMEOUT_S)
    assert len(runner.found) == num_losses + 1 and not runner.found[-1]
    assert capacity == 1 or all(runner.found[:-1]), "others run beside it before"
    assert len(sink.results) == 300 and not sink.failed()


async def test_a_line_that_never_reached_an_engine_is_not_to_blame() -> None:
    class Absent:
        num_runs = 0

        async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
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


async def test_losses_that_cannot_be_saved_are_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backfill.jobs.retry.FIRST_RETRY_S", 0.001)
    path, write, num_refused = tmp_path / "b", LossFile.write, 0

    def refuse_at_first(self: LossFile, content: bytes) -> None:
        nonlocal num_refused
        num_refused += 1
        if num_refused <= 2:
            raise OSError("no space")
        write(self, content)

    monkeypatch.setattr(LossFile, "write", refuse_at_first)
    engine, suspects = Engine(holds=True), Suspects(LossFile(path), "b")
    feed = feed_of(lines_up_to(2), 2, Sink(), suspects=suspects)
    engine.start(feed)
    await until(lambda: len(engine.in_flight) == 2)
    engine.fail()
    await until(path.exists)
    engine.holds = False
    engine.feeder.set_capacity(0)
    await engine.feeder.remove(feed)


async def test_losses_are_remembered_over_a_restart(tmp_path: Path) -> None:
    path, sink = tmp_path / "b", Sink()
    num_failures = 0
    for _ in range(20):  # a server that ends after each death
        engine, suspects = Engine(fatal={CAPACITY + 7}), Suspects(LossFile(path), "b")
        suspects.load()
        left = [n for n in range(200) if n not in {result.line.number for result in sink.results}]
        feed = feed_of((line_of(number) for number in left), len(left), sink, suspects=suspects)
        engine.start(feed)
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
