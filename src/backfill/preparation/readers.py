"""The server's side of input files, whose lines a preparation process prepares."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from backfill.blending.pool import Learned
from backfill.preparation.line_file import mark, read_names
from backfill.preparation.lines import BatchLine
from backfill.preparation.messages import (
    START,
    CloseLines,
    EndLine,
    IndexLines,
    LineSelection,
    LinesIndexed,
    LinesProgress,
    LinesTaken,
    OpenLines,
    Position,
    RunningTokens,
    TakeLines,
    TakenLine,
)
from backfill.preparation.supervisor import PreparationDied, PreparationSupervisor

# Lines of a job. A job also ends after a time; the lines to run next wait for it.
_INDEX_LINES = 256
_FEW_LINES = 64
# Until a file that could not be read is tried again.
_RETRY_S = 5.0
_MAX_OBSERVED_FILES = 64


class LineReaders:
    """Open input files. One task indexes them ahead; what waits to run is taken in the order of the pool.

    A process that is started again is told what KV its predecessor's running lines take, and what its pool
    had learned when lines were last taken. Each file is indexed
    again, without the lines that were taken. A line that ends the process is handed out as one that cannot be
    prepared, after four ends: two over a group of lines, and two over this line alone.

    A file whose prepared lines cannot be read back is indexed again too. Its lines are then held in memory.
    """

    def __init__(self, process: PreparationSupervisor) -> None:
        self.process = process
        self._ids = itertools.count()
        self._open: dict[int, PreparedLines] = {}
        self._can_index = False
        self._num_taken = 0  # lines since files that are held up were last tried
        self._learned: Learned | None = None
        # By path: lines of the latest files that the pool was given for their lengths. Batches over one file
        # share them: their lines are alike, so the lengths are as good for each.
        self._observed: dict[str, set[int]] = {}
        self._changed = asyncio.Event()  # there may be something to index
        self._more_ready = asyncio.Event()  # more lines may be taken; replaced each time

    def open(self, selection: LineSelection) -> PreparedLines:
        """Of the lines observed, those are read that the pool has not: a file is opened for each claim."""
        same = (lines.observed for lines in self._open.values() if lines.selection.path == selection.path)
        known = self._observed.get(selection.path, set()).union(*same)
        new = {number: num for number, num in selection.observed.items() if number not in known}
        selection = msgspec.structs.replace(selection, observed=new)
        lines = PreparedLines(self, next(self._ids), selection)
        self._open[lines.reader_id] = lines
        self.process.send(OpenLines(lines.reader_id, selection))
        self._changed.set()
        return lines

    def close(self, lines: PreparedLines) -> None:
        del self._open[lines.reader_id]
        self.process.send(CloseLines(lines.reader_id))
        self._try_held_up(self._open.values())
        self._note_ready()  # a read may have waited for its lines alone

    def allow(self) -> None:
        """The process knows the engine's limits, which it needs to index."""
        self._can_index = True
        self._changed.set()

    def restart(self) -> None:
        """There is a new process."""
        self._observed.clear()
        for lines in self._open.values():
            self._restart(lines)

    async def run(self) -> None:
        """Index until cancelled."""
        while True:
            lines = self._next_to_index()
            if lines is None:
                self._changed.clear()
                await self._changed.wait()
            else:
                await self._index(lines)
                self._note_ready()

    async def take(self, lines: PreparedLines, max_lines: int) -> Sequence[tuple[PreparedLines, BatchLine]]:
        """See ``PreparedLines.read``. A caller that is cancelled loses lines."""
        owner = lines.selection.owner
        while True:
            more_ready = self._more_ready
            taken = await self.process.ask(TakeLines(owner, max_lines), LinesTaken)
            if found := self._note_taken(taken):
                return found
            if lines.error is not None:
                error, lines.error = lines.error, None
                self._changed.set()  # it is tried again
                raise error
            if not any(each.is_to_index for each in self._open.values() if each.selection.owner == owner):
                return []
            await more_ready.wait()

    def _note_taken(self, taken: LinesTaken) -> list[tuple[PreparedLines, BatchLine]]:
        self._learned = taken.learned or self._learned
        found = []
        for each in taken.lines:
            lines = self._open.get(each.reader_id)
            if lines is not None:  # else it was closed meanwhile
                lines.note_taken(each)
                found.append((lines, each.line))
        self._num_taken += len(found)
        if self._num_taken >= _INDEX_LINES:
            self._num_taken = 0
            self._try_held_up(self._open.values())
        elif found:
            self._try_held_up(lines for lines, _ in found)
        self._note_unreadable(taken)
        return found

    def _note_unreadable(self, taken: LinesTaken) -> None:
        """Index a file again whose prepared lines cannot be read back."""
        lines = None if taken.unreadable is None else self._open.get(taken.unreadable)
        if lines is not None:
            lines.is_spooled = False
            self._note_observed(lines)  # the pool has these, and would count them twice
            lines.observed = {}
            self._restart(lines)

    def _note_ready(self) -> None:
        self._more_ready.set()
        self._more_ready = asyncio.Event()

    def _try_held_up(self, some: Iterable[PreparedLines]) -> None:
        """The process may have room for lines of these files."""
        for lines in some:
            lines.is_held_up = False
        self._changed.set()

    def _restart(self, lines: PreparedLines) -> None:
        lines.num_restarts += 1
        lines.position, lines.num_ahead = START, 0
        lines.is_indexed, lines.is_held_up, lines.error = False, False, None
        running = dict(lines.running)
        self.process.send(OpenLines(lines.reader_id, lines.selection_left(), running, self._learned))
        self._changed.set()

    def _next_to_index(self) -> PreparedLines | None:
        """The file with the earliest deadline; before it, those with few lines ahead, so that each begins at
        once.
        """
        if not self._can_index:
            return None
        waiting = [each for each in self._open.values() if each.is_to_index and not each.is_held_up]
        return min(waiting, key=lambda lines: lines.turn, default=None)

    async def _index(self, lines: PreparedLines) -> None:
        num_restarts, position, num_ahead = lines.num_restarts, lines.position, lines.num_ahead
        try:
            work = IndexLines(lines.reader_id, position, 1 if lines.num_single > 0 else _INDEX_LINES)
            found = await self.process.ask(work, LinesIndexed)
        except PreparationDied:
            if lines.observed:
                lines.observed = {}  # one of them may have ended the process
                if lines.reader_id in self._open:
                    self._restart(lines)
            if lines.num_single > 0:
                lines.num_single = 0
                await self._leave_out_next(lines, position)
            else:
                lines.num_single = num_ahead + _INDEX_LINES  # from the start again, up to the group's end
        except Exception as error:  # whoever reads the lines gets it
            self._note_error(lines, error)
        else:
            lines.num_ahead += found.num_lines
            lines.num_single = max(lines.num_single - found.num_lines, 0)
            # Else the file is indexed from its start again.
            if num_restarts == lines.num_restarts:
                lines.position = found.position
                lines.is_indexed = found.is_end
                lines.is_held_up = found.is_held_up
                if found.is_end and lines.reader_id in self._open:
                    self._note_observed(lines)

    def _note_observed(self, lines: PreparedLines) -> None:
        """The pool has the lengths of a file that was indexed to its end."""
        if not lines.observed:
            return
        self._observed.setdefault(lines.selection.path, set()).update(lines.observed)
        if len(self._observed) > _MAX_OBSERVED_FILES:
            del self._observed[next(iter(self._observed))]

    def _note_error(self, lines: PreparedLines, error: Exception) -> None:
        """Indexing stops for a while. Its reader may not ask for long: other lines of the owner go first."""
        lines.error = error
        asyncio.get_running_loop().call_later(_RETRY_S, self._retry, lines, error)

    def _retry(self, lines: PreparedLines, error: Exception) -> None:
        if lines.error is error and self._open.get(lines.reader_id) is lines:
            lines.error = None
            self._changed.set()

    async def _leave_out_next(self, lines: PreparedLines, position: Position) -> None:
        """The line after a position is not prepared any more."""
        try:
            names = await asyncio.to_thread(read_names, lines.selection_left(), position, 1)
        except Exception as error:
            self._note_error(lines, error)
            return
        lines.unprepared |= {line.number for line in names.lines}
        if lines.reader_id in self._open:
            self._restart(lines)


@dataclass(slots=True, eq=False)
class PreparedLines:
    """The lines of one file. Close it after use.

    Attributes:
        position: where indexing continues.
        num_ahead: lines indexed and not taken.
        is_indexed: to the end.
        is_held_up: the process holds as many lines as it may.
        num_single: next lines to be indexed one by one, because the process ended over a group of them.
        is_spooled: prepared lines wait on a disk.
        observed: as of ``LineSelection``: empty once the process ended twice while it indexed this file.
        error: why indexing stopped; the next read without a line raises it.
        running: by number: lines taken that have not ended, where their KV is forecast.
    """

    readers: LineReaders
    reader_id: int
    selection: LineSelection
    position: Position = START
    num_ahead: int = 0
    num_taken: int = 0
    num_restarts: int = 0
    is_indexed: bool = False
    is_held_up: bool = False
    num_single: int = 0
    is_spooled: bool = True
    error: Exception | None = None
    unprepared: frozenset[int] = frozenset()
    running: dict[int, RunningTokens] = field(default_factory=dict)
    observed: dict[int, int] = field(init=False)
    _done: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.observed = self.selection.observed
        self._done = bytearray(self.selection.done)

    @property
    def turn(self) -> tuple[int, float]:
        """The file with the least is indexed next."""
        complete_by_s = self.selection.complete_by_s
        return min(self.num_ahead, _FEW_LINES), math.inf if complete_by_s is None else complete_by_s

    @property
    def is_to_index(self) -> bool:
        return not self.is_indexed and self.error is None

    @property
    def num_indexed(self) -> int:
        """Lines, those that were taken included."""
        return self.num_taken + self.num_ahead

    async def read(self, max_lines: int) -> Sequence[tuple[PreparedLines, BatchLine]]:
        """The next lines of this file's owner, each with the open file that it is from.

        At least one, unless no open file of the owner has more. If this one could not be read to its end,
        the error is raised once no line of the owner is left.

        Raises: BadLine, OSError, NotReady, PreparationDied.
        """
        return await self.readers.take(self, max_lines)

    def end(self, number: int, num_output_tokens: int | None) -> None:
        """A line has ended, with so many tokens of a choice; None where it has no answer."""
        self.running.pop(number, None)
        self.readers.process.send(EndLine(self.reader_id, number, num_output_tokens))

    def note_progress(self, num_output_tokens: Mapping[int, int]) -> None:
        """Lines, by number, have generated so many tokens of a choice and run on."""
        for number, num_tokens in num_output_tokens.items():
            if (tokens := self.running.get(number)) is not None:
                self.running[number] = msgspec.structs.replace(tokens, num_output_tokens=num_tokens)
        self.readers.process.send(LinesProgress(self.reader_id, dict(num_output_tokens)))

    def close(self) -> None:
        """Lines that were read are forgotten, too."""
        self.readers.close(self)

    def note_taken(self, taken: TakenLine) -> None:
        mark(self._done, taken.line.number)
        if taken.tokens is not None:
            self.running[taken.line.number] = taken.tokens
        self.num_ahead -= 1
        self.num_taken += 1

    def selection_left(self) -> LineSelection:
        """The lines that were not taken."""
        return msgspec.structs.replace(
            self.selection,
            done=bytes(self._done),
            observed=self.observed,
            unprepared=self.unprepared,
            is_spooled=self.is_spooled,
        )
