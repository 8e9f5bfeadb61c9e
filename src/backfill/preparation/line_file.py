"""Reads an input file in groups of lines, at the engine's pace."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from backfill.core.errors import RequestError
from backfill.preparation.lines import BatchLine, InputLine, Refusal, parse_line, read_lines
from backfill.preparation.messages import LineSelection, Position
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import RequestContext
from backfill.protocol.responses import error_of

logger = logging.getLogger(__name__)

# Limits of a group's time and size, so that other readers get their turn.
_GROUP_S = 0.05
_GROUP_BYTES = 1 << 20

Prepare = Callable[[GenerationEndpoint, bytes, RequestContext], Generation]


@dataclass(slots=True, eq=False)
class LineFile:
    """The selected lines of one file, from ``position`` on. The file is closed between calls."""

    selection: LineSelection
    position: Position
    prepare: Prepare  # turns a body into a generation; raises RequestError

    def read(self, max_lines: int) -> list[BatchLine]:
        """The next lines, at least one unless the file has no more.

        Raises: BadLine, OSError; the next call reads from the same place.
        """
        selection, group = self.selection, list[BatchLine]()
        num_bytes, started_at_s = 0, time.monotonic()
        with Path(selection.path).open("rb") as file:
            file.seek(self.position.offset)
            for number, data in read_lines(file, selection.max_line_bytes, after=self.position.number):
                if not self._is_done(number):
                    try:
                        line = parse_line(number, data, selection.max_line_bytes)
                    except Exception:
                        if group:  # the next call raises it again
                            return group
                        raise
                    group.append(self._prepared(line, len(data)))
                    num_bytes += len(data)
                self.position = Position(number, file.tell())
                is_late = time.monotonic() - started_at_s > _GROUP_S
                if len(group) >= max_lines or (group and (is_late or num_bytes > _GROUP_BYTES)):
                    break
        return group

    def _prepared(self, line: InputLine, num_bytes: int) -> BatchLine:
        read = BatchLine(number=line.number, custom_id=line.custom_id, request_id=f"req_{uuid.uuid4().hex}")
        if self.selection.names_only:
            return read
        read.num_bytes = num_bytes
        context = RequestContext(
            request_id=read.request_id,
            is_batch_line=True,
            complete_by_s=self.selection.complete_by_s,
            owner=self.selection.owner,
        )
        try:
            # The check of the file has ensured that the url is one of these endpoints.
            read.generation = self.prepare(cast(GenerationEndpoint, line.url), line.body, context)
        except RequestError as error:
            read.refusal = Refusal(*error_of(error))
        except Exception:
            logger.exception("line %d could not be prepared", line.number)
        return read

    def _is_done(self, number: int) -> bool:
        byte, bit = divmod(number, 8)
        done = self.selection.done
        return byte < len(done) and bool(done[byte] >> bit & 1)
