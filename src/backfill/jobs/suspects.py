"""Lines that were in the engine when it died or a step failed, remembered over a restart."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from backfill.core.durable_files import write_durably
from backfill.core.errors import BackfillError
from backfill.preparation.line_file import is_marked

logger = logging.getLogger(__name__)

# A line is given up after this many losses with no other request in the engine or in the failed step.
MAX_LONE_LOSSES = 3
# Or after this many with no other line, beside any online requests: on a server that is never idle it would
# else be retried without end.
MAX_ONLY_LINE_LOSSES = 20


MAX_BLAMED_LINES = 8
"""A batch with so many lines to blame, of those that run together, fails.

Each costs three losses of an engine that others use too.
"""


class BatchPoisoned(BackfillError):
    """Too many lines of the batch are to blame for losses."""


class Losses(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Losses of one line: all, as the only request, and as the only line beside online requests."""

    num: int
    num_lone: int
    num_only_line: int

    @property
    def is_to_blame(self) -> bool:
        return self.num_lone >= MAX_LONE_LOSSES or self.num_only_line >= MAX_ONLY_LINE_LOSSES


class _Saved(msgspec.Struct):
    name: str
    lines: dict[int, Losses]
    num_blamed: int = 0


class LossStore(Protocol):
    """Where the losses of one batch are saved, as one piece. Blocking. Raises: OSError from any method."""

    def read(self) -> bytes | None:
        """What was written last; None if nothing was."""
        ...

    def write(self, content: bytes) -> None:
        """Durably."""
        ...


@dataclass(frozen=True, slots=True)
class LossFile:
    """The ``LossStore`` of a run."""

    path: Path

    def read(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, content: bytes) -> None:
        write_durably(self.path, content)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(slots=True, eq=False)
class Suspects:
    """The lines of one batch that were lost, by number.

    Attributes:
        num_blamed: lines that were given up, those of other servers as last read.
    """

    store: LossStore | None = None  # None keeps losses in memory only
    name: str = ""  # of the batch; what was saved of another is not read
    num_blamed: int = field(default=0, init=False)
    _losses: dict[int, Losses] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._losses)

    def of(self, number: int) -> Losses:
        return self._losses.get(number, Losses(0, 0, 0))

    def note_lost(self, number: int, *, is_lone: bool, is_only_line: bool) -> Losses:
        """Count a loss. Returns: the losses of the line, this one included."""
        before = self.of(number)
        self._losses[number] = losses = Losses(
            before.num + 1, before.num_lone + is_lone, before.num_only_line + is_only_line
        )
        return losses

    def forget(self, number: int) -> None:
        self._losses.pop(number, None)

    def check(self) -> None:
        """Raises: BatchPoisoned."""
        if self.num_blamed >= MAX_BLAMED_LINES:
            raise BatchPoisoned(
                f"{self.num_blamed} lines were given up since the engine was lost whenever they ran alone."
            )

    def encode(self) -> bytes:
        """The content for ``save``."""
        return msgspec.json.encode(_Saved(self.name, self._losses, self.num_blamed))

    # ---- Blocking: run in threads ----

    def load(self) -> None:
        """Read saved losses. What cannot be decoded is ignored. Raises: OSError."""
        content = None if self.store is None else self.store.read()
        if content is None:
            return
        try:
            saved = msgspec.json.decode(content, type=_Saved)
        except msgspec.DecodeError as error:
            logger.warning("saved losses of %s cannot be decoded and are ignored: %s", self.name, error)
            return
        if saved.name == self.name:
            self._losses, self.num_blamed = saved.lines, saved.num_blamed

    def save(self, content: bytes) -> None:
        """Make it durable. Raises: OSError."""
        if self.store is not None:
            self.store.write(content)


def merged(saved: bytes | None, content: bytes, lines: bytes) -> bytes:
    """``content``, with what was saved of other lines than ``lines``, which has a bit for each line."""
    own = msgspec.json.decode(content, type=_Saved)
    before = _Saved(own.name, {}) if saved is None else msgspec.json.decode(saved, type=_Saved)
    others = {number: losses for number, losses in before.lines.items() if not is_marked(lines, number)}
    found = {number: losses for number, losses in own.lines.items() if is_marked(lines, number)}
    num_blamed = max(before.num_blamed, own.num_blamed)
    return msgspec.json.encode(_Saved(own.name, others | found, num_blamed))
