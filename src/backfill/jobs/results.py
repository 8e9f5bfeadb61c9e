"""The result files of one batch, which are also the record of which lines are done."""

from __future__ import annotations

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


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


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

        Raises: OSError, such as a full disk; the files are then as before and the group may be tried again.
        """
        written: dict[Path, bytearray] = {}
        for result in results:
            path = self._paths[result.outcome is not LineOutcome.COMPLETED]
            written.setdefault(path, bytearray()).extend(result.encode(f"{self._prefix}{result.line.number}"))
        try:
            for path, data in written.items():
                _write_all(self._files[path], data)
            for path in written:
                os.fsync(self._files[path])
        except OSError:
            for path in written:
                os.ftruncate(self._files[path], self._sizes[path])
            raise
        for path, data in written.items():
            self._sizes[path] += len(data)
        for result in results:
            self._note(result.line.number, result.outcome is LineOutcome.COMPLETED, result.usage)

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
        """Note every whole line; the size of the file up to the last one's end."""
        size = 0
        for data in _whole_lines(path):
            size += len(data)
            number, written = self._parse(path, data)
            if self.is_done(number):
                raise ForeignResults(f"{path.name} holds line {number} twice.")
            response = written.response
            is_completed = response is not None and response.status_code == 200
            usage = response.body.usage if is_completed and response and response.body else None
            tokens = (
                TokenUsage() if usage is None else TokenUsage(usage.prompt_tokens, 0, usage.completion_tokens)
            )
            self._note(number, is_completed, tokens)
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
