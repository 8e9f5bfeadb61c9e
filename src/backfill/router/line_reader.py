"""Input files of batches, checked and read without a tokenizer, in threads of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec

from backfill.blending.pool import OfflinePool
from backfill.blending.requests import PLANNED_BY_LENGTH, OrderName
from backfill.blending.resources import ResourceModel
from backfill.core.clock import Clock, WallClock
from backfill.jobs.feed import InputChanged, LineSource
from backfill.preparation.division import MAX_PLANNED_BYTES, Division, pool_request
from backfill.preparation.line_file import is_marked, named
from backfill.preparation.lines import BatchLine, parse_line, read_lines
from backfill.preparation.messages import InputLimits, InputReport, LineSelection
from backfill.preparation.validation import InputCheck
from backfill.protocol.body_check import BodyCheck

# Of an 8B model in bfloat16 on an A100. The order depends on their ratio alone.
_RESOURCES = ResourceModel(token_s=5.1e-5, prompt_pair_s=1.7e-9, cached_token_s=6.4e-8)
_KV_TOKENS = 100_000
_WALL_CLOCK = WallClock()


class RoutedLine(BatchLine, kw_only=True):
    """A line with its body, for an engine to prepare.

    Attributes:
        path: of the API, as the line's url names it.
        body: JSON.
        owner: of its batch.
    """

    path: str = ""
    body: bytes = b""
    owner: str = ""

    def offline_body(self) -> bytes:
        """The body of an offline request. The file's check has refused streams."""
        body = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        body.pop("stream", None)
        body.pop("stream_options", None)
        return msgspec.json.encode(body | {"service_tier": "flex"})


class PlannedBytes:
    """Bytes of prompts in the pools of all leases together. Threads may call it."""

    def __init__(self, most: int = MAX_PLANNED_BYTES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._of: dict[RoutedLines, int] = {}

    def open(self, lines: RoutedLines) -> None:
        with self._lock:
            self._of[lines] = 0

    def take(self, lines: RoutedLines, num_bytes: int) -> bool:
        """Whether ``lines``, unless they are closed, may have so many more."""
        with self._lock:
            if lines not in self._of or sum(self._of.values()) + num_bytes > self._most:
                return False
            self._of[lines] += num_bytes
            return True

    def free(self, lines: RoutedLines, num_bytes: int) -> None:
        """``lines`` have so many less, unless they are closed."""
        with self._lock:
            if lines in self._of:
                self._of[lines] -= num_bytes

    def close(self, lines: RoutedLines) -> None:
        with self._lock:
            self._of.pop(lines, None)


class RoutedReader:
    """An ``InputReader``. ``order``: of the lines of a lease."""

    def __init__(self, order: OrderName, clock: Clock = _WALL_CLOCK) -> None:
        self._order = order
        self._clock = clock
        self._planned = PlannedBytes()

    async def check_input(self, path: str, limits: InputLimits) -> InputReport:
        """Raises: OSError."""
        division = Division(self._order, _RESOURCES) if limits.divides else None
        with closing(InputCheck(Path(path), limits, BodyCheck(), division)) as check:
            while not await asyncio.to_thread(check.advance):
                pass
            return await asyncio.to_thread(lambda: check.report)

    def open_lines(self, selection: LineSelection) -> RoutedLines:
        return RoutedLines(selection, self._order, self._planned, self._clock)


class RoutedLines:
    """A ``LineSource``: lines in the order of a pool, or of the file where they are too many to plan.

    Args:
        planned: of all leases.
    """

    def __init__(
        self, selection: LineSelection, order: OrderName, planned: PlannedBytes, clock: Clock
    ) -> None:
        self._selection = selection
        self._order = order
        self._clock = clock
        self._planned = planned
        planned.open(self)
        self._offsets: dict[int, int] | None = None  # of the lines that are not read yet
        self._planned_bytes: dict[int, int] = {}  # of lines in the pool
        self._num_choices: dict[int, int] = {}  # of those that have several
        self._pool = OfflinePool(order, _RESOURCES, kv_tokens=_KV_TOKENS)

    async def read(self, max_lines: int) -> Sequence[tuple[LineSource, BatchLine]]:
        """Raises: BadLine, InputChanged, OSError."""
        if self._offsets is None:
            self._offsets = await asyncio.to_thread(self._plan)
        chosen = list[tuple[int, int]]()
        while self._offsets and len(chosen) < max_lines:
            planned = self._pool.take(now_s=self._clock.now_s())
            number = next(iter(self._offsets)) if planned is None else planned.request_id
            chosen.append((number, self._offsets.pop(number)))
        lines = await asyncio.to_thread(self._read, chosen)
        return [(self, line) for line in lines]

    def end(self, number: int, num_output_tokens: int | None) -> None:
        """A line has ended, with so many tokens of all its choices: they are not known where it ran."""
        num_choices = self._num_choices.pop(number, 1)
        self._planned.free(self, self._planned_bytes.pop(number, 0))
        if num_output_tokens is None:
            self._pool.cancel([number])
        else:
            self._pool.finish(number, num_output_tokens // num_choices)

    def note_progress(self, num_output_tokens: object) -> None:
        """Answers of engines come whole."""

    def close(self) -> None:
        self._offsets = {}
        self._planned.close(self)

    def _plan(self) -> dict[int, int]:
        """Where the selected lines are. Raises: BadLine, OSError."""
        selection, offsets, requests = self._selection, dict[int, int](), []
        is_planned = self._order != "fcfs"
        observed = selection.observed if self._order in PLANNED_BY_LENGTH else {}
        with Path(selection.path).open("rb") as file:
            offset = 0
            for number, data in read_lines(file, selection.max_line_bytes):
                num_tokens = observed.get(number)
                if num_tokens is not None and is_planned:
                    request = pool_request(parse_line(number, data, selection.max_line_bytes))
                    of_a_choice = max(1, num_tokens // request.num_choices)
                    requests.append(replace(request, observed_output_tokens=of_a_choice))
                elif not is_marked(selection.done, number):
                    offsets[number] = offset
                    is_planned = is_planned and self._planned.take(self, len(data))
                    if is_planned:
                        self._planned_bytes[number] = len(data)
                        line = parse_line(number, data, selection.max_line_bytes)
                        requests.append(pool_request(line, selection.complete_by_s))
                        if requests[-1].num_choices > 1:
                            self._num_choices[number] = requests[-1].num_choices
                offset = file.tell()
        if is_planned:
            self._pool.add(requests)
        else:
            self._planned_bytes.clear()
            self._planned.close(self)
        return offsets

    def _read(self, chosen: Sequence[tuple[int, int]]) -> list[RoutedLine]:
        selection, lines = self._selection, []
        with Path(selection.path).open("rb") as file:
            for number, offset in chosen:
                file.seek(offset)
                # ``after`` is 0 for the first line alone, which may begin with a byte order mark.
                found = next(read_lines(file, selection.max_line_bytes, after=number - 1), None)
                if found is None:
                    raise InputChanged("The input file has fewer lines than when it was checked.")
                line = parse_line(number, found[1], selection.max_line_bytes)
                lines.append(
                    RoutedLine(
                        number=number,
                        custom_id=line.custom_id,
                        num_bytes=len(found[1]),
                        request_id=named(line).request_id,
                        path=line.url,
                        body=line.body,
                        owner=selection.owner,
                    )
                )
        return lines
