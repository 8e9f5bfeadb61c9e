"""Reads an input file in groups of lines."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from backfill.core.errors import RequestError
from backfill.preparation.lines import BatchLine, InputLine, parse_line, read_lines
from backfill.preparation.messages import LineSelection, Position
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import RequestContext
from backfill.protocol.responses import error_of

logger = logging.getLogger(__name__)

# Limits of a group's time and size, so that other readers get their turn.
_GROUP_S = 0.05
_GROUP_BYTES = 1 << 20

Prepare = Callable[[GenerationEndpoint, bytes, RequestContext], Generation]


@dataclass(frozen=True, slots=True)
class LinesAt:
    """Lines in the order of their file, and where reading continues."""

    lines: list[BatchLine]
    position: Position


@dataclass(slots=True, eq=False)
class LineFile:
    """The selected lines of one file, and those observed. The file is closed between calls.

    Args:
        prepare: turns a body into a generation; raises RequestError.
    """

    selection: LineSelection
    prepare: Prepare
    _done: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self._done = bytearray(self.selection.done)
        for number in self.selection.observed:
            unmark(self._done, number)

    def mark_done(self, numbers: Collection[int]) -> None:
        """Leave out these lines from now on."""
        for number in numbers:
            mark(self._done, number)

    def read(self, position: Position, max_lines: int) -> LinesAt:
        """The next lines after a position, prepared; at least one unless the file has no more.

        Raises: BadLine for a line that is no request, with none before it; OSError.
        """
        return _read(self.selection, self._done, position, max_lines, self._prepared)

    def _prepared(self, line: InputLine, num_bytes: int) -> BatchLine:
        read = named(line)
        read.num_bytes = num_bytes
        if line.number in self.selection.unprepared:
            return read
        context = RequestContext(
            request_id=read.request_id,
            is_batch_line=True,
            complete_by_s=self.selection.complete_by_s,
            owner=self.selection.owner,
            owner_weight=self.selection.owner_weight,
        )
        try:
            # The check of the file has ensured that the url is one of these endpoints.
            read.generation = self.prepare(cast(GenerationEndpoint, line.url), line.body, context)
        except RequestError as error:
            read.refusal = error_of(error)
        except Exception:
            logger.exception("line %d could not be prepared", line.number)
        return read


def read_names(selection: LineSelection, position: Position, max_lines: int) -> LinesAt:
    """As ``LineFile.read``, without the lines' bodies."""
    return _read(selection, selection.done, position, max_lines, named)


def _read(
    selection: LineSelection,
    done: bytes | bytearray,
    position: Position,
    max_lines: int,
    convert: Callable[[InputLine, int], BatchLine],
) -> LinesAt:
    group = list[BatchLine]()
    num_bytes, started_at_s = 0, time.monotonic()
    with Path(selection.path).open("rb") as file:
        file.seek(position.offset)
        for number, data in read_lines(file, selection.max_line_bytes, after=position.number):
            if not is_marked(done, number):
                try:
                    line = parse_line(number, data, selection.max_line_bytes)
                except Exception:
                    if group:  # the next call raises it again
                        break
                    raise
                group.append(convert(line, len(data)))
                num_bytes += len(data)
            position = Position(number, file.tell())
            is_late = time.monotonic() - started_at_s > _GROUP_S
            if len(group) >= max_lines or (group and (is_late or num_bytes > _GROUP_BYTES)):
                break
    return LinesAt(group, position)


def named(line: InputLine, num_bytes: int = 0) -> BatchLine:
    """The line without its body."""
    return BatchLine(number=line.number, custom_id=line.custom_id, request_id=f"req_{uuid.uuid4().hex}")


def is_marked(bits: bytes | bytearray, number: int) -> bool:
    """The bit of a line: that of line i is bit i % 8 of byte i // 8."""
    byte, bit = divmod(number, 8)
    return byte < len(bits) and bool(bits[byte] >> bit & 1)


def mark(bits: bytearray, number: int) -> None:
    """Set the bit of a line."""
    byte, bit = divmod(number, 8)
    if byte >= len(bits):
        bits.extend(bytes(byte + 1 - len(bits)))
    bits[byte] |= 1 << bit


def unmark(bits: bytearray, number: int) -> None:
    """Clear the bit of a line."""
    byte, bit = divmod(number, 8)
    if byte < len(bits):
        bits[byte] &= ~(1 << bit)


def complement(lines: bytes) -> bytes:
    """The bits of all other lines, as far as ``lines`` goes."""
    return bytes(byte ^ 0xFF for byte in lines)


def union(some: bytes, others: bytes) -> bytes:
    """The bits of lines in either."""
    num_bytes = max(len(some), len(others))
    united = int.from_bytes(some, "little") | int.from_bytes(others, "little")
    return united.to_bytes(num_bytes, "little")
