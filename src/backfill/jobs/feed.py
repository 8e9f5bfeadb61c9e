"""One batch in the feeder: lines to run, lines in the engine, and results that are not durable yet."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from backfill.core.errors import BackfillError
from backfill.jobs.lines import LineResult
from backfill.jobs.retry import ResultSink
from backfill.jobs.suspects import Suspects
from backfill.preparation.lines import BatchLine


class InputChanged(BackfillError):
    """The lines are not those that were checked."""


class LineSource(Protocol):
    async def read(self, max_lines: int) -> Sequence[BatchLine]:
        """The next lines, at least one unless there are no more. Any error ends their batch."""
        ...


@dataclass(slots=True)
class RunningLine:
    """A line in the engine. ``ran_with_others``: another line was there at some time."""

    line: BatchLine
    task: asyncio.Task[None]
    ran_with_others: bool


class Feed:
    """One batch in the feeder. Use it with ``Feeder.add`` and ``Feeder.remove``.

    Attributes:
        finished: done when every line's result is durable; fails with the error of a read of lines or a
            write of results.

    Args:
        name: for log lines.
        source: of the lines to run; read as the engine takes them.
        num_lines: to run.
        on_committed: called with each group of results once it is durable.
        owner: the engine is shared evenly between owners.
        deadline_at_s: an owner's batch with the earliest deadline goes first; on any clock.
        suspects: lines that were lost before.
    """

    def __init__(
        self,
        name: str,
        source: LineSource,
        num_lines: int,
        sink: ResultSink,
        on_committed: Callable[[Sequence[LineResult]], None],
        *,
        owner: str = "",
        deadline_at_s: float = math.inf,
        suspects: Suspects | None = None,
    ) -> None:
        self.name = name
        self.owner = owner
        self.deadline_at_s = deadline_at_s
        self.suspects = Suspects() if suspects is None else suspects
        self.sink = sink
        self.on_committed = on_committed
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._source = source
        self._num_unread = num_lines
        self._to_retry: list[BatchLine] = []  # lost or put back; sorted by losses, most last
        self._buffered: deque[BatchLine] = deque()  # read, not taken yet
        self.reading: asyncio.Task[None] | None = None
        self.running: dict[int, RunningLine] = {}
        self.results: list[LineResult] = []  # ended, not yet durable
        self.num_in_flight = 0  # lines taken that are not durable yet
        self.num_buffered_bytes = 0  # of lines read that are not durable yet
        self.committer: asyncio.Task[None] | None = None
        self.has_unsaved_losses = False
        self.saver: asyncio.Task[None] | None = None

    @property
    def has_lines(self) -> bool:
        return not self.finished.done() and bool(self._to_retry or self._buffered or self._num_unread)

    @property
    def has_read_lines(self) -> bool:
        return not self.finished.done() and bool(self._to_retry or self._buffered)

    @property
    def num_losses_next(self) -> int:
        """Losses of the line that ``take`` returns next."""
        if self.finished.done() or not self._to_retry:
            return 0
        return self.suspects.of(self._to_retry[-1].number).num

    def take(self) -> BatchLine | None:
        """The next line; None where one must be read first."""
        if self._to_retry:
            line = self._to_retry.pop()
        elif self._buffered:
            line = self._buffered.popleft()
        else:
            return None
        self.num_in_flight += 1
        return line

    async def read(self, max_lines: int) -> None:
        """Read lines for ``take``. The feed fails where they cannot be read."""
        try:
            lines = await self._source.read(min(max_lines, self._num_unread))
        except Exception as error:
            # It ends this batch alone, not the feeder's task that reads.
            self.fail(error)
            return
        if not lines:
            self.fail(InputChanged("The input file has fewer lines than when it was checked."))
            return
        self._num_unread -= len(lines)
        for line in lines:
            if self.suspects.of(line.number).num:
                self._put(line)
            else:
                self._buffered.append(line)
        self.num_buffered_bytes += sum(line.num_bytes for line in lines)

    def put_back(self, line: BatchLine) -> None:
        self.num_in_flight -= 1
        self._put(line)

    def note_durable(self, results: Sequence[LineResult]) -> None:
        for result in results:
            self.num_in_flight -= 1
            self.num_buffered_bytes -= result.line.num_bytes
            self.suspects.forget(result.line.number)
        if self.num_in_flight == 0 and not (self._to_retry or self._buffered or self._num_unread):
            self.finish()

    def finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)
            self.finished.exception()  # so that asyncio logs no error that nobody awaited

    def _put(self, line: BatchLine) -> None:
        self._to_retry.append(line)
        self._to_retry.sort(key=lambda line: self.suspects.of(line.number).num)
