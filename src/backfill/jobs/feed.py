"""One batch in the feeder: lines to run, lines in the engine, and results that are not durable yet."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from backfill.core.errors import BackfillError
from backfill.jobs.lines import LineResult, of_a_choice
from backfill.jobs.retry import ResultSink
from backfill.jobs.suspects import Suspects
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount


class InputChanged(BackfillError):
    """The lines are not those that were checked."""


class LineSource(Protocol):
    """The lines of one file. Outside of tests these are ``PreparedLines``, and a router's ``RoutedLines``."""

    async def read(self, max_lines: int) -> Sequence[tuple[LineSource, BatchLine]]:
        """The next lines of the batch's owner, each with the source of its own batch.

        At least one unless no open batch of the owner has more. Any error ends this batch: BadLine, OSError.
        A read is not cancelled when its batch is removed: it may give lines of others.
        """
        ...

    def end(self, number: int, num_output_tokens: int | None) -> None:
        """A line has ended, with so many tokens of a choice; None where it has no answer."""
        ...

    def note_progress(self, num_output_tokens: Mapping[int, int]) -> None:
        """Lines, by number, have generated so many tokens of a choice and run on."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class RunningLine:
    """A line in the engine.

    Attributes:
        ran_with_others: another line was there at some time.
        count: of its tokens.
        num_reported: of a choice, as the source was last told.
    """

    line: BatchLine
    task: asyncio.Task[None]
    ran_with_others: bool
    count: TokenCount = field(default_factory=TokenCount)
    num_reported: int = 0

    @property
    def has_begun(self) -> bool:
        """It has a token."""
        return self.count.num_tokens > 0


@dataclass(slots=True, eq=False)
class Feed:
    """One batch in the feeder. Use it with ``Feeder.add`` and ``Feeder.remove``."""

    name: str  # for log lines
    source: LineSource  # of the lines to run; read as the engine takes them
    num_unread: int  # lines to run that are not read yet
    sink: ResultSink
    on_committed: Callable[[Sequence[LineResult]], None]  # called with each group once it is durable
    owner: str = ""  # the engine is shared between owners by their weights
    deadline_at_s: float = math.inf  # an owner's batch with the earliest goes first; on any clock
    suspects: Suspects = field(default_factory=Suspects)  # lines that were lost before
    # Done when every line's result is durable; fails with the error of a read of lines or a write of results.
    finished: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), init=False
    )
    _to_retry: list[BatchLine] = field(default_factory=list, init=False)  # sorted by losses, most last
    # Read, not taken yet, each with its turn.
    _buffered: deque[tuple[int, BatchLine]] = field(default_factory=deque, init=False)
    reading: asyncio.Task[None] | None = None
    running: dict[int, RunningLine] = field(default_factory=dict, init=False)
    results: list[LineResult] = field(default_factory=list, init=False)  # ended, not yet durable
    num_in_flight: int = 0  # lines taken that are not durable yet
    num_buffered_bytes: int = 0  # of lines read that are not durable yet
    committer: asyncio.Task[None] | None = None
    has_unsaved_losses: bool = False
    saver: asyncio.Task[None] | None = None

    @property
    def has_lines(self) -> bool:
        return not self.finished.done() and bool(self._to_retry or self._buffered or self.num_unread)

    @property
    def has_read_lines(self) -> bool:
        return not self.finished.done() and bool(self._to_retry or self._buffered)

    @property
    def num_losses_next(self) -> int:
        """Losses of the line that ``take`` returns next."""
        if self.finished.done() or not self._to_retry:
            return 0
        return self.suspects.of(self._to_retry[-1].number).num

    @property
    def turn(self) -> float:
        """Of the line that ``take`` returns next, among those of its owner; the least goes first."""
        if self._to_retry:
            return -math.inf
        return self._buffered[0][0] if self._buffered else math.inf

    def take(self) -> BatchLine | None:
        """The next line; None where one must be read first."""
        if self._to_retry:
            line = self._to_retry.pop()
        elif self._buffered:
            _, line = self._buffered.popleft()
        else:
            return None
        self.num_in_flight += 1
        return line

    def add(self, line: BatchLine, turn: int) -> None:
        """A line was read. Lines beyond those that were checked are dropped."""
        if self.num_unread == 0:
            self.source.end(line.number, None)
            return
        self.num_unread -= 1
        self.num_buffered_bytes += line.num_bytes
        if self.suspects.of(line.number).num:
            self._put(line)
        else:
            self._buffered.append((turn, line))

    def note_ended(self, result: LineResult) -> None:
        """A line has ended; its result is to be made durable."""
        self.results.append(result)
        self.source.end(result.line.number, result.num_output_tokens)

    def report_progress(self) -> None:
        """Tell the source of the lines that have gone on."""
        found: dict[int, int] = {}
        for number, run in self.running.items():
            num_tokens = of_a_choice(run.line, run.count.num_tokens)
            if num_tokens > run.num_reported:
                found[number] = run.num_reported = num_tokens
        if found:
            self.source.note_progress(found)

    def put_back(self, line: BatchLine) -> None:
        """A line did not end. It runs again when others than before wait: what they need of it is unknown."""
        self.num_in_flight -= 1
        if line.generation is not None:
            request = dataclasses.replace(line.generation.request, num_reused_tokens=None)
            line.generation = msgspec.structs.replace(line.generation, request=request)
        self._put(line)

    def note_durable(self, results: Sequence[LineResult]) -> None:
        for result in results:
            self.num_in_flight -= 1
            self.num_buffered_bytes -= result.line.num_bytes
            self.suspects.forget(result.line.number)
        if self.num_in_flight == 0 and not (self.has_lines or self.finished.done()):
            self.finished.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)
            self.finished.exception()  # so that asyncio logs no error that nobody awaited

    def _put(self, line: BatchLine) -> None:
        self._to_retry.append(line)
        self._to_retry.sort(key=lambda line: self.suspects.of(line.number).num)
