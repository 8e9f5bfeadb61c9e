"""An engine that runs a feeder's lines in steps, and feeds for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from backfill.core.errors import EngineDead, StepFailed
from backfill.engine.tasks import TaskWatch
from backfill.jobs.feed import Feed, LineSource
from backfill.jobs.feeder import Feeder
from backfill.jobs.lines import LineResult, completed
from backfill.jobs.threads import ThreadPool
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount
from tests.patience import TIMEOUT_S

CAPACITY = 64

Args = ParamSpec("Args")
Result = TypeVar("Result")


def line_of(number: int, num_bytes: int = 2) -> BatchLine:
    return BatchLine(number=number, custom_id=f"r{number}", num_bytes=num_bytes)


class Source:
    """Lines of an iterator, in groups.

    Attributes:
        ended: output tokens of lines that have ended.
        progress: as it was told.
    """

    def __init__(self, lines: Iterable[BatchLine] = (), group: int = 5) -> None:
        self._lines = iter(lines)
        self._group = group
        self.ended: dict[int, int | None] = {}
        self.progress: list[dict[int, int]] = []

    async def read(self, max_lines: int) -> list[tuple[LineSource, BatchLine]]:
        await asyncio.sleep(0)
        return [(self, line) for line in itertools.islice(self._lines, min(max_lines, self._group))]

    def end(self, number: int, num_output_tokens: int | None) -> None:
        assert number not in self.ended, "each line ends once"
        self.ended[number] = num_output_tokens

    def note_progress(self, num_output_tokens: Mapping[int, int]) -> None:
        assert not self.ended.keys() & num_output_tokens.keys(), "only of lines that run"
        self.progress.append(dict(num_output_tokens))

    def close(self) -> None: ...


class NoThreads(ThreadPool):
    """Calls run at once."""

    async def run(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        await asyncio.sleep(0)
        return work(*args, **kwargs)


class Engine:
    """Runs all lines in flight in one step, once no more come. A step with a fatal line kills it.

    Args:
        fatal: lines whose steps kill it, or with ``survives`` fail.
        holds: no step runs until this is False.
        num_others: other requests in every step.
        threads: for results; by default results are written at once, without threads.
        reports_progress: of the feeder.
    """

    def __init__(
        self,
        fatal: Iterable[int] = (),
        *,
        holds: bool = False,
        survives: bool = False,
        num_others: int = 0,
        threads: ThreadPool | None = None,
        reports_progress: bool = False,
    ) -> None:
        self.fatal = set(fatal)
        self.holds = holds
        self.survives = survives
        self.num_others = num_others
        self.tasks = TaskWatch()
        self.feeder = Feeder(
            self, threads or NoThreads("results", 1), self.tasks, reports_progress=reports_progress
        )
        self.in_flight: dict[int, asyncio.Future[None]] = {}
        self.most_in_flight: list[int] = [0]  # between two failures
        self.num_failures = 0
        self._stepping: asyncio.Task[None] | None = None

    async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
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
        self.end_lines()

    def start(self, *feeds: Feed) -> None:
        """Add feeds, and run lines."""
        for feed in feeds:
            self.feeder.add(feed)
        self.feeder.set_capacity(CAPACITY)

    async def finish(self, *feeds: Feed) -> None:
        """Run feeds to their ends."""
        self.start(*feeds)
        await asyncio.wait_for(asyncio.gather(*(feed.finished for feed in feeds)), TIMEOUT_S)

    def end_lines(self) -> None:
        """Those in flight."""
        for end in self.in_flight.values():
            if not end.done():
                end.set_result(None)

    def fail(self) -> None:
        """Lose all lines in flight."""
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
