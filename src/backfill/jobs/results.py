"""The result files of one batch, which are also the record of which lines are done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from backfill.core.errors import BackfillError
from backfill.jobs.blobs import sync_folder
from backfill.jobs.lines import LineResult
from backfill.jobs.records import LineOutcome, RequestCounts, TokenUsage


class ForeignResults(BackfillError):
    """A result file holds lines of another input, or something that is no result."""


class ResultsLost(BackfillError):
    """A result file was removed, replaced or cut while results were written to it."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def tokens(self) -> TokenUsage:
        details = self.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        return TokenUsage(self.prompt_tokens, cached or 0, self.completion_tokens)


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body | None = None


class _Written(msgspec.Struct):
    id: str
    response: _Response | None = None


_decoder = msgspec.json.Decoder(_Written)


class ResultLog:
    """Appends results in groups; a group is durable when ``append`` returns.

    Nothing is ever rewritten. A line's id holds its number, so reading the files back tells what is done;
    counts kept elsewhere follow these files.

    Args:
        name: distinguishes this input's lines: their ids are ``batch_req_NAME_NUMBER``.
        output, errors: where completed and failed lines go; may be the same file.
    """

    def __init__(self, name: str, output: Path, errors: Path) -> None:
        self._prefix = f"batch_req_{name}_"
        self._paths = (output, errors)
        self._files: dict[Path, int] = {}
        self._sizes: dict[Path, int] = {}
        self._is_torn = False  # a write failed, and part of it may still be in the files
        self._done = bytearray()
        self.num_completed = 0
        self.num_failed = 0
        self.usage = TokenUsage()

    def open(self) -> None:
        """Create the files, or read what they hold, cutting off a line that a crash left unfinished.

        Raises: ForeignResults, OSError.
        """
        for path in dict.fromkeys(self._paths):
            self._files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._sizes[path] = self._read_back(path)
            os.ftruncate(self._files[path], self._sizes[path])
        for folder in {path.parent for path in self._paths}:
            sync_folder(folder)

    def check_intact(self) -> None:
        """Raise ResultsLost unless every result noted is where it was written."""
        for path, file in self._files.items():
            ours = os.fstat(file)
            try:
                named = os.stat(path)
            except FileNotFoundError:
                raise ResultsLost(f"The result file {path.name} was removed while it was written.") from None
            if not os.path.samestat(ours, named):
                raise ResultsLost(f"The result file {path.name} was replaced while it was written.")
            if ours.st_size != self._sizes[path]:
                raise ResultsLost(f"The result file {path.name} was changed while it was written.")

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def is_done(self, number: int) -> bool:
        byte, bit = divmod(number, 8)
        return byte < len(self._done) and bool(self._done[byte] >> bit & 1)

    def counts(self, total: int) -> RequestCounts:
        return RequestCounts(total, self.num_completed, self.num_failed)

    def append(self, results: Sequence[LineResult]) -> None:
        """Write and sync a group, whole or not at all.

        Raises: OSError, such as a full disk; the group may then be tried again. ResultsLost.
        """
        if self._is_torn:
            self._cut()
        # Before anything is counted on top of what may be gone.
        self.check_intact()
        written: dict[Path, bytearray] = {}
        for result in results:
            path = self._paths[result.outcome is not LineOutcome.COMPLETED]
            written.setdefault(path, bytearray()).extend(result.encode(f"{self._prefix}{result.line.number}"))
        self._is_torn = True
        try:
            for path, data in written.items():
                _write_all(self._files[path], data)
            for path in written:
                os.fsync(self._files[path])
        except OSError:
            with contextlib.suppress(OSError):  # else the next attempt begins with it
                self._cut()
            raise
        self._is_torn = False
        for path, data in written.items():
            self._sizes[path] += len(data)
        for result in results:
            self._note(result.line.number, result.outcome is LineOutcome.COMPLETED, result.usage)

    def _cut(self) -> None:
        for path, file in self._files.items():
            os.ftruncate(file, self._sizes[path])
        self._is_torn = False

    def _note(self, number: int, is_completed: bool, usage: TokenUsage) -> None:
        byte, bit = divmod(number, 8)
        if byte >= len(self._done):
            self._done.extend(bytes(byte + 1 - len(self._done)))
        self._done[byte] |= 1 << bit
        if is_completed:
            self.num_completed += 1
            self.usage += usage
        else:
            self.num_failed += 1

    def _read_back(self, path: Path) -> int:
        """Note every whole line; the size of the file up to the last one's end.

        A machine that loses power may leave zeros where unsynced data was to come. Nothing from there on
        was counted.
        """
        size = 0
        for data in _whole_lines(path):
            if b"\0" in data:  # JSON has none
                break
            size += len(data)
            number, written = self._parse(path, data)
            if self.is_done(number):
                raise ForeignResults(f"{path.name} holds line {number} twice.")
            response = written.response
            is_completed = response is not None and response.status_code == 200
            usage = response.body.usage if is_completed and response and response.body else None
            self._note(number, is_completed, TokenUsage() if usage is None else usage.tokens())
        return size

    def _parse(self, path: Path, data: bytes) -> tuple[int, _Written]:
        try:
            written = _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ForeignResults(f"{path.name} holds a line that is no result of a batch.") from error
        number = written.id.removeprefix(self._prefix)
        if number == written.id or not (number.isascii() and number.isdigit()):
            raise ForeignResults(f"{path.name} holds results of another input.")
        return int(number), written


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for data in file:
            if data.endswith(b"\n"):
                yield data


def _write_all(file: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
