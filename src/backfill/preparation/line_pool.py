"""The prepared lines of all open batches, in the order in which they are to run."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from backfill.blending.memory_forecast import MemoryForecast, reserve_frac
from backfill.blending.pool import Learned, OfflinePool
from backfill.blending.requests import PlannedRequest, PoolRequest
from backfill.core.config import PrefixCacheScope
from backfill.preparation.line_file import LineFile
from backfill.preparation.lines import BatchLine, as_taken
from backfill.preparation.messages import (
    KVRoom,
    LineSelection,
    LinesIndexed,
    LinesTaken,
    OnlineTraffic,
    OpenLines,
    Position,
    RunningTokens,
    TakenLine,
)
from backfill.preparation.resources import as_pool_request
from backfill.preparation.spool import Span, Spool
from backfill.protocol.generation import Generation

logger = logging.getLogger(__name__)

# What the pool holds at most, all batches together: lines, and tokens of their prompts (4 bytes each).
MAX_LINES = 400_000
MAX_TOKENS = 1 << 28
# A batch beyond these limits, or whose lines the disk refuses, is held this many lines ahead.
WINDOW_LINES = 64

# Lines are planned in groups of this share of those that wait: all together, and yet each only a few times.
_GROUP_SHARE = 0.5
_LEAST_GROUP_LINES = 32
_TAKE_BYTES = 1 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[BatchLine] = msgspec.msgpack.Decoder(BatchLine)


@dataclass(slots=True, eq=False)
class _Line:
    """A line from its indexing to its end, or one that runs since before there was this process."""

    reader_id: int
    number: int
    request_id: int  # of the pool
    num_prompt_tokens: int = 0  # of the first prompt; 0: nothing is to be computed, so it is not in the pool
    num_more_tokens: int = 0  # of its other prompts
    num_choices: int = 1
    stored: Span | bytes = b""
    num_reused_tokens: int = 0  # of its prompt, by lines that wait when it is taken
    has_namespace: bool = False
    is_taken: bool = False
    tokens: RunningTokens | None = None  # once it was taken


@dataclass(slots=True, eq=False)
class _Reader:
    selection: LineSelection
    file: LineFile
    spool: Spool
    is_spooling: bool
    num_indexed: int = 0
    observed: list[PoolRequest] = field(default_factory=list)  # to be planned beside lines that wait
    num_waiting: int = 0
    lines: dict[int, _Line] = field(default_factory=dict)  # by number
    namespaces: set[tuple[str, str]] = field(default_factory=set)  # of its lines


class LinePool:
    """Lines of readers: indexed in the order of their files, taken in the order of the pool.

    To index a line is to prepare it, once, and to give its prompt to the pool. Its prepared form waits in the
    reader's spool. One thread owns the pool.

    Where there is a forecast, the pool is told what the KV has room for beside all lines that were taken and
    have not ended, also by an earlier process. The engine admits lines by the KV that is free, so nothing is
    held back: where no line fits, one is taken all the same.

    Attributes: scope: who shares cached prefixes.

    Args:
        create: the pool from ``learned``, and the KV's forecast where the order has one; at the first line.
    """

    def __init__(self, create: Callable[[Learned | None], tuple[OfflinePool, MemoryForecast | None]]) -> None:
        self.scope: PrefixCacheScope = "owner"
        self._learned: Learned | None = None  # by the pool of an earlier process
        self._create = create
        self._pool: OfflinePool | None = None
        self._forecast: MemoryForecast | None = None
        self._readers: dict[int, _Reader] = {}
        self._by_id: dict[int, _Line] = {}
        self._ids = itertools.count()
        self._namespaces: dict[tuple[str, str], int] = {}  # of open readers
        self._namespace_numbers = itertools.count()
        self._to_plan: dict[int, PoolRequest] = {}  # by id
        self._unpooled: dict[str, deque[_Line]] = {}  # by owner: lines with nothing to compute
        self._num_waiting = 0
        self._num_waiting_tokens = 0

    def open(self, opened: OpenLines, file: LineFile) -> None:
        """Begin a reader, or begin it again."""
        reader_id, selection = opened.reader_id, opened.selection
        self._learned = opened.learned or self._learned
        self.close(reader_id)
        spool = Spool(selection.spool_folder, selection.min_free_bytes)
        reader = self._readers[reader_id] = _Reader(selection, file, spool, selection.is_spooled)
        for number, tokens in opened.running.items():
            self._planner()
            line = _Line(reader_id, number, next(self._ids), is_taken=True, tokens=tokens)
            reader.lines[number] = self._by_id[line.request_id] = line
            self._hold(line, tokens)

    def close(self, reader_id: int) -> None:
        """Drop a reader and its lines. An unknown one is ignored."""
        reader = self._readers.get(reader_id)
        if reader is None:
            return
        owner = reader.selection.owner
        for line in reader.lines.values():
            del self._by_id[line.request_id]
            self._release(line)
            self._to_plan.pop(line.request_id, None)
            if not line.is_taken:
                self._count_waiting(line, -1)
        unpooled = [line for line in self._unpooled.pop(owner, ()) if line.reader_id != reader_id]
        if unpooled:
            self._unpooled[owner] = deque(unpooled)
        if self._pool is not None:
            self._pool.cancel([line.request_id for line in reader.lines.values()])
        reader.spool.close()
        del self._readers[reader_id]
        for namespace in reader.namespaces.difference(*(each.namespaces for each in self._readers.values())):
            del self._namespaces[namespace]

    def index(self, reader_id: int, position: Position, max_lines: int) -> LinesIndexed:
        """Prepare a reader's next lines after a position, and add them to the pool.

        Raises: BadLine, OSError, as ``LineFile.read``.
        """
        reader = self._readers.get(reader_id)
        if reader is None:
            return LinesIndexed(0, position, is_end=True)
        max_lines = min(max_lines, self._room(reader))
        if max_lines <= 0:
            return LinesIndexed(0, position, is_end=False, is_held_up=True)
        found = reader.file.read(position, max_lines)
        num_lines = self._add(reader_id, reader, found.lines)
        reader.num_indexed += num_lines
        if not found.lines:
            # A large file's lines are planned as one; a small file does not plan the others' again.
            self._plan(merges_all=reader.num_indexed > _GROUP_SHARE * self._num_waiting)
        return LinesIndexed(num_lines, found.position, is_end=not found.lines)

    def take(self, owner: str, max_lines: int) -> LinesTaken:
        """The next lines of an owner.

        A reader whose line cannot be read back is closed: its lines must be indexed again.
        """
        taken, num_bytes = list[TakenLine](), 0
        while len(taken) < max_lines and num_bytes < _TAKE_BYTES:
            line = self._next(owner)
            if line is None:
                break
            try:
                read = self._read_back(line)
            except OSError as error:
                logger.warning(
                    "%s: its lines are prepared again, because prepared lines cannot be read back: %s",
                    self._readers[line.reader_id].selection.path,
                    error.strerror or error,
                )
                self.close(line.reader_id)
                return LinesTaken(taken, unreadable=line.reader_id)
            taken.append(TakenLine(line.reader_id, read, line.tokens))
            num_bytes += read.num_bytes
        return LinesTaken(taken, learned=self._pool.learned if taken and self._pool is not None else None)

    def end(self, reader_id: int, number: int, num_output_tokens: int | None) -> None:
        """A taken line has ended; ``num_output_tokens`` is None where it has no answer.

        A line that is unknown is ignored.
        """
        line = self._taken(reader_id, number)
        if line is None:
            return
        del self._readers[reader_id].lines[number]
        self._by_id.pop(line.request_id, None)
        self._release(line)
        if self._pool is not None and line.num_prompt_tokens:
            if num_output_tokens is None:
                self._pool.cancel([line.request_id])
            else:
                self._pool.finish(line.request_id, num_output_tokens)

    def note_progress(self, reader_id: int, num_output_tokens: Mapping[int, int]) -> None:
        """Taken lines, by number, have generated so many tokens of a choice. Unknown ones are ignored."""
        num_known = 0
        for number, num_tokens in num_output_tokens.items():
            line = self._taken(reader_id, number)
            if line is None or self._pool is None:
                continue
            if line.num_prompt_tokens:
                num_known += 1
                self._pool.note_progress(line.request_id, num_tokens)
            if self._forecast is not None:  # a line that the pool does not know is expected to end as before
                expected = self._pool.expected_output_tokens(line.request_id)
                self._forecast.note_progress(line.request_id, num_tokens, expected)
        logger.debug("%d of %d running lines go on", num_known, len(num_output_tokens))

    def note_online(self, traffic: OnlineTraffic) -> None:
        """What online traffic takes at present. Lines are chosen that use what it leaves."""
        if self._pool is not None:
            self._pool.online = self._pool.resources.use_of(traffic.tokens_per_s, traffic.reads_per_s)
        if self._forecast is not None:
            self._forecast.online_tokens = traffic.held_tokens

    def note_room(self, room: KVRoom) -> None:
        if self._forecast is not None:
            self._forecast.kv_tokens, self._forecast.kept_tokens = room.num_tokens, room.num_online_tokens

    # ---- Adding ----

    def _room(self, reader: _Reader) -> int:
        """Lines of the reader that may be added."""
        if not reader.is_spooling or self._num_waiting_tokens >= MAX_TOKENS:
            return WINDOW_LINES - reader.num_waiting
        return max(MAX_LINES - self._num_waiting, WINDOW_LINES - reader.num_waiting)

    def _add(self, reader_id: int, reader: _Reader, found: Sequence[BatchLine]) -> int:
        """Returns: how many of the lines wait; the others have ended, and tell how long answers are."""
        reader.file.mark_done([line.number for line in found])
        lines = [line for line in found if not self._observe(reader_id, reader, line)]
        stored = self._store(reader, [_encoder.encode(line) for line in lines])
        for read, where in zip(lines, stored, strict=True):
            line = _Line(reader_id, read.number, next(self._ids), stored=where)
            reader.lines[line.number] = self._by_id[line.request_id] = line
            if read.generation is None:
                self._unpooled.setdefault(reader.selection.owner, deque()).append(line)
            else:
                self._to_plan[line.request_id] = self._request_of(line, reader.selection, read.generation)
            self._count_waiting(line, 1)
        num_planned = self._num_waiting - len(self._to_plan)
        if len(self._to_plan) >= max(_LEAST_GROUP_LINES, _GROUP_SHARE * num_planned):
            self._plan()
        return len(lines)

    def _observe(self, reader_id: int, reader: _Reader, read: BatchLine) -> bool:
        """Note what a line generated that has ended. Returns: whether it has."""
        num_tokens = reader.selection.observed.get(read.number)
        if num_tokens is not None and read.generation is not None:
            line = _Line(reader_id, read.number, next(self._ids))
            request = self._request_of(line, reader.selection, read.generation)
            if request.known_output_tokens is None:
                of_a_choice = max(1, num_tokens // request.num_choices)
                reader.observed.append(replace(request, observed_output_tokens=of_a_choice))
        return num_tokens is not None

    def _store(self, reader: _Reader, records: list[bytes]) -> Sequence[Span | bytes]:
        """On the disk, or in memory once the disk has refused."""
        if not reader.is_spooling:
            return records
        try:
            return reader.spool.append(records)
        except OSError as error:
            reason = error.strerror or error
            text = "%s: its lines run in the order of the file, because prepared lines cannot be stored: %s"
            logger.warning(text, reader.selection.path, reason)
            reader.is_spooling = False
            return records

    def _request_of(self, line: _Line, selection: LineSelection, generation: Generation) -> PoolRequest:
        request = generation.request
        number = None
        owner = request.owner if self.scope == "owner" else ""
        if owner or request.cache_salt:
            namespace = owner, request.cache_salt
            if namespace not in self._namespaces:
                self._namespaces[namespace] = next(self._namespace_numbers)
            self._readers[line.reader_id].namespaces.add(namespace)
            number = self._namespaces[namespace]
            line.has_namespace = True
        line.num_prompt_tokens = len(request.prompts[0])
        line.num_more_tokens = request.num_prompt_tokens - line.num_prompt_tokens
        line.num_choices = request.num_choices
        pooled = as_pool_request(request, line.request_id, number)
        return replace(pooled, group=selection.owner, complete_by_s=selection.complete_by_s)

    def _plan(self, *, merges_all: bool = False) -> None:
        """Give the pool the lines that it does not have."""
        if self._to_plan:
            requests, self._to_plan = list(self._to_plan.values()), {}
            for reader in self._readers.values():
                requests += reader.observed
                reader.observed.clear()
            self._planner().add(requests, merges_all=merges_all)

    def _planner(self) -> OfflinePool:
        """The pool. There is one, and a forecast, from the first call on."""
        if self._pool is None:
            self._pool, self._forecast = self._create(self._learned)
        return self._pool

    # ---- Taking ----

    def _next(self, owner: str) -> _Line | None:
        """Take an owner's next line. What needs nothing of the engine goes first."""
        if unpooled := self._unpooled.get(owner):
            line = unpooled.popleft()
            if not unpooled:
                del self._unpooled[owner]
        else:
            planned = self._next_planned(owner)
            if planned is None:
                return None
            line = self._by_id[planned.request_id]
            line.num_reused_tokens = max(0, planned.reused_tokens - line.has_namespace)
            if self._forecast is not None:
                num_own_tokens = line.num_prompt_tokens - line.num_reused_tokens + line.num_more_tokens
                line.tokens = RunningTokens(num_own_tokens, planned.expected_output_tokens, line.num_choices)
                self._hold(line, line.tokens)
        line.is_taken = True
        self._count_waiting(line, -1)
        return line

    def _next_planned(self, owner: str) -> PlannedRequest | None:
        planned = None if self._pool is None else self._take_planned(self._pool, owner)
        if planned is None and any(request.group == owner for request in self._to_plan.values()):
            self._plan()
            return self._next_planned(owner)
        return planned

    def _take_planned(self, pool: OfflinePool, owner: str) -> PlannedRequest | None:
        now_s = time.monotonic()
        if self._forecast is None:
            return pool.take(owner, now_s=now_s)
        reserved_tokens = reserve_frac(pool.compute_bound_memory_frac) * self._forecast.offline_tokens
        most_output_tokens = self._forecast.free().most_output_tokens(int(reserved_tokens))
        return pool.take(owner, now_s=now_s, most_output_tokens=most_output_tokens)

    def _hold(self, line: _Line, tokens: RunningTokens) -> None:
        """The line takes KV from here on."""
        if self._forecast is not None:
            self._forecast.add(
                line.request_id, tokens.num_prompt_tokens, tokens.expected_output_tokens, tokens.num_choices
            )
            self._forecast.note_progress(line.request_id, tokens.num_output_tokens)

    def _release(self, line: _Line) -> None:
        """The line holds no KV."""
        if self._forecast is not None:
            self._forecast.remove(line.request_id)

    def _read_back(self, line: _Line) -> BatchLine:
        """Raises: OSError."""
        stored = line.stored
        if isinstance(stored, Span):
            stored = self._readers[line.reader_id].spool.read(stored)
        read = _decoder.decode(stored)
        if read.generation is not None:
            read.generation = as_taken(read.generation, line.num_reused_tokens)
        return read

    def _taken(self, reader_id: int, number: int) -> _Line | None:
        reader = self._readers.get(reader_id)
        line = None if reader is None else reader.lines.get(number)
        return line if line is not None and line.is_taken else None

    def _count_waiting(self, line: _Line, change: int) -> None:
        self._num_waiting += change
        self._num_waiting_tokens += change * line.num_prompt_tokens
        self._readers[line.reader_id].num_waiting += change
