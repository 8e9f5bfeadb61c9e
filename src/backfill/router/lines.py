"""The lines of batches, without tokens: read from the input file, and divided among engines.

A prompt's text, four bytes at a time, stands for its tokens: prompts that begin alike have equal numbers at
their beginning, and a number is about a token. So BlendServe's tree (``blending``) is built without a
tokenizer. ``split_requests`` divides a batch among the engines that are up when it is read (section 6.1), and
each engine's part is a pool in the order asked for. What is left of an engine's part once others are done, or
once it is lost, the others take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from backfill.blending.pool import OfflinePool
from backfill.blending.requests import TOKEN_BYTES, OrderName, PoolRequest
from backfill.blending.resources import ResourceModel
from backfill.blending.split import split_requests
from backfill.jobs.feed import InputChanged, LineSource
from backfill.preparation.line_file import LineFile, is_marked, named
from backfill.preparation.lines import BatchLine, InputLine, parse_line, read_lines
from backfill.preparation.messages import START, InputLimits, InputReport, LineSelection
from backfill.preparation.validation import InputCheck
from backfill.protocol.body_check import BodyCheck
from backfill.protocol.generation import Generation
from backfill.router.policy import RoutedRequest
from backfill.router.requests import peek

logger = logging.getLogger(__name__)

MAX_PLANNED_BYTES = 256 << 20
"""Of a batch's prompts. A batch with more runs in the order of its file."""

_UNKNOWN_OUTPUT_TOKENS = 256  # of a line that names no limit


class RoutedLine(BatchLine, kw_only=True):
    """A line with its body, for an engine to prepare.

    Attributes:
        path: of the API, as the line's url names it.
        body: JSON.
        owner: of its batch.
        shard: the engine that it is meant for, by URL; empty for any.
        num_losses: engines that were lost while they ran it.
    """

    path: str = ""
    body: bytes = b""
    owner: str = ""
    shard: str = ""
    num_losses: int = 0

    @property
    def request(self) -> RoutedRequest:
        return peek(self.body, {}, self.owner).request


class _Lengths(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_lengths_decoder = msgspec.json.Decoder(_Lengths)


@dataclass(frozen=True, slots=True)
class LinesSetup:
    """What readers need to know of the engines.

    Attributes:
        shards: URLs of the engines that are up.
        resources: what a request costs on one of them.
        kv_tokens: of one of them.
    """

    shards: Sequence[str]
    resources: ResourceModel
    kv_tokens: int


class RoutedReader:
    """An ``InputReader`` in threads of this process.

    Args:
        order: of the lines of each engine's part.
        setup: of the engines now.
        backlog: lines that wait for a place on each engine, by URL.
    """

    def __init__(
        self, order: OrderName, setup: Callable[[], LinesSetup], backlog: Callable[[], Counter[str]]
    ) -> None:
        self._order = order
        self._setup = setup
        self._backlog = backlog

    async def check_input(self, path: str, limits: InputLimits) -> InputReport:
        """Raises: OSError."""
        with closing(InputCheck(Path(path), limits, BodyCheck())) as check:
            while not await asyncio.to_thread(check.advance):
                pass
            return check.report

    def open_lines(self, selection: LineSelection) -> RoutedLines:
        return RoutedLines(selection, self._order, self._setup, self._backlog)

    def open_names(self, selection: LineSelection) -> RoutedNames:
        return RoutedNames(selection)


class RoutedNames:
    """A ``NameReader``."""

    def __init__(self, selection: LineSelection) -> None:
        self._file = LineFile(selection, _prepare_nothing)
        self._position = START

    async def read(self, max_lines: int) -> Sequence[BatchLine]:
        found = await asyncio.to_thread(self._file.read_names, self._position, max_lines)
        self._position = found.position
        return found.lines


@dataclass(slots=True)
class _Part:
    """What is left of one engine's part: lines in the order of the file, or a pool."""

    numbers: deque[int]
    pool: OfflinePool | None = None
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = len(self.numbers)

    def take(self) -> int:
        self.num_left -= 1
        if self.pool is None:
            return self.numbers.popleft()
        planned = self.pool.take(now_s=time.monotonic())
        assert planned is not None, "as many wait as are left"
        return planned.request_id


@dataclass(slots=True)
class _Plan:
    offsets: dict[int, int]  # of each line that is to run
    parts: dict[str, _Part]  # by engine; with an empty key for lines that are meant for none
    pools: dict[int, OfflinePool] = field(default_factory=dict)  # of each line that was taken


class RoutedLines:
    """A ``LineReader`` of one batch."""

    def __init__(
        self,
        selection: LineSelection,
        order: OrderName,
        setup: Callable[[], LinesSetup],
        backlog: Callable[[], Counter[str]],
    ) -> None:
        self._selection = selection
        self._order = order
        self._setup = setup
        self._backlog = backlog
        self._plan: _Plan | None = None

    async def read(self, max_lines: int) -> Sequence[tuple[LineSource, BatchLine]]:
        """The next lines, first of the parts of which the fewest wait.

        Raises: BadLine, InputChanged, OSError.
        """
        if self._plan is None:
            self._plan = await asyncio.to_thread(self._planned, self._setup())
        chosen = self._choose(self._plan, max_lines)
        lines = await asyncio.to_thread(self._read, chosen)
        return [(self, line) for line in lines]

    def end(self, number: int, num_output_tokens: int | None) -> None:
        pool = None if self._plan is None else self._plan.pools.pop(number, None)
        if pool is None:
            return
        if num_output_tokens is None:
            pool.cancel([number])
        else:
            pool.finish(number, num_output_tokens)

    def note_progress(self, num_output_tokens: object) -> None:
        """Answers of engines come whole."""

    def close(self) -> None:
        self._plan = None

    def _choose(self, plan: _Plan, max_lines: int) -> list[tuple[int, str]]:
        """Numbers of lines, each with the engine that it is meant for."""
        backlog, chosen = self._backlog(), list[tuple[int, str]]()
        while len(chosen) < max_lines:
            left = [shard for shard, part in plan.parts.items() if part.num_left]
            if not left:
                break
            shard = min(left, key=lambda shard: (backlog[shard], shard))
            part = plan.parts[shard]
            number = part.take()
            if part.pool is not None:
                plan.pools[number] = part.pool
            backlog[shard] += 1
            chosen.append((number, shard))
        return chosen

    def _read(self, chosen: Sequence[tuple[int, str]]) -> list[RoutedLine]:
        assert self._plan is not None
        selection, lines = self._selection, []
        with Path(selection.path).open("rb") as file:
            for number, shard in chosen:
                file.seek(self._plan.offsets[number])
                # ``after`` is 0 for the first line alone, which may begin with a byte order mark.
                found = next(read_lines(file, selection.max_line_bytes, after=number - 1), None)
                if found is None:
                    raise InputChanged("The input file has fewer lines than when it was checked.")
                _, data = found
                read = parse_line(number, data, selection.max_line_bytes)
                request_id = named(read).request_id
                lines.append(
                    RoutedLine(
                        number=number,
                        custom_id=read.custom_id,
                        num_bytes=len(data),
                        request_id=request_id,
                        path=read.url,
                        body=read.body,
                        owner=selection.owner,
                        shard=shard,
                    )
                )
        return lines

    def _planned(self, setup: LinesSetup) -> _Plan:
        """Read the file, and divide its lines. Raises: BadLine, OSError."""
        selection = self._selection
        offsets: dict[int, int] = {}
        requests: list[PoolRequest] = []
        num_bytes = 0
        with Path(selection.path).open("rb") as file:
            offset = 0
            for number, data in read_lines(file, selection.max_line_bytes):
                if not is_marked(selection.done, number):
                    offsets[number] = offset
                    if self._order != "fcfs" and num_bytes <= MAX_PLANNED_BYTES:
                        line = parse_line(number, data, selection.max_line_bytes)
                        requests.append(_pool_request(line, selection))
                        num_bytes += len(data)
                offset = file.tell()
        if self._order == "fcfs" or num_bytes > MAX_PLANNED_BYTES or not setup.shards:
            return _Plan(offsets, {"": _Part(deque(offsets))})
        shares = split_requests(requests, len(setup.shards), setup.resources)
        by_number = {request.request_id: request for request in requests}
        parts = {}
        for shard, numbers in zip(setup.shards, shares, strict=True):
            pool = OfflinePool(self._order, setup.resources, kv_tokens=setup.kv_tokens)
            pool.add([by_number[number] for number in numbers])
            parts[shard] = _Part(deque(numbers), pool)
        return _Plan(offsets, parts)


def _pool_request(line: InputLine, selection: LineSelection) -> PoolRequest:
    try:
        lengths = _lengths_decoder.decode(line.body)
    except (msgspec.MsgspecError, RecursionError):
        lengths = _Lengths()
    prompt = bytes(lengths.messages) or bytes(lengths.prompt) or b"    "
    asked = lengths.max_completion_tokens or lengths.max_tokens or _UNKNOWN_OUTPUT_TOKENS
    return PoolRequest(
        request_id=line.number,
        prompt_token_ids=prompt + b" " * (-len(prompt) % TOKEN_BYTES),
        max_output_tokens=max(1, asked),
        complete_by_s=selection.complete_by_s,
    )


def _prepare_nothing(*_: object) -> Generation:
    raise AssertionError("names alone are read")
