"""The result files of one batch, which are also the record of which lines are done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from backfill.core.durable_files import sync, write_all
from backfill.core.errors import BackfillError
from backfill.jobs.lines import LineResult, Usage
from backfill.jobs.private_files import FILE_MODE
from backfill.jobs.records import LineOutcome, RequestCounts, TokenUsage
from backfill.preparation.line_file import is_marked, mark

MAX_OBSERVED = 512
"""Lines whose lengths are kept for the estimates of others: to read as many takes some tenths of a second."""


class ForeignResults(BackfillError):
    """A result file holds results of another input, or lines that are not results."""


class ResultsLost(BackfillError):
    """A result file was removed, replaced or cut while results were written to it."""


class _Error(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Body(msgspec.Struct):
    usage: Usage | None = None
    error: _Error | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body | None = None


class _Written(msgspec.Struct):
    id: str
    response: _Response | None = None
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Written)


@dataclass(frozen=True, slots=True)
class _Identity:
    """A file's device and inode, and its size in bytes when it was last closed."""

    device: int
    inode: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Identity:
        return cls(status.st_dev, status.st_ino, status.st_size)

    def is_same_file(self, other: _Identity) -> bool:
        return (self.device, self.inode) == (other.device, other.inode)

    def grown_by(self, num_bytes: int) -> _Identity:
        return replace(self, size=self.size + num_bytes)


class ResultTally:
    """Which lines of an input are done, and the counts of their results.

    Attributes:
        observed: output tokens of lines, by number: of at most ``MAX_OBSERVED``, at random.

    Args:
        name: distinguishes this input's lines: the ids of results are ``batch_req_NAME_NUMBER``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._prefix = f"batch_req_{name}_"
        self._forget()

    def _forget(self) -> None:
        self._done = bytearray()
        self.num_completed = 0
        self.num_failed = 0
        self.usage = TokenUsage()
        self.observed: dict[int, int] = {}
        self._observed_below = 1 << 32

    def line_id(self, number: int) -> str:
        """Of a line's result."""
        return f"{self._prefix}{number}"

    def is_done(self, number: int) -> bool:
        return is_marked(self._done, number)

    @property
    def done(self) -> bytes:
        """A bit for each line that has a result: that of line i is bit i % 8 of byte i // 8."""
        return bytes(self._done)

    def num_undone(self, lines: bytes) -> int:
        """Of these lines, which are a bit each."""
        return (int.from_bytes(lines, "little") & ~int.from_bytes(self._done, "little")).bit_count()

    def counts(self, total: int) -> RequestCounts:
        return RequestCounts(total, self.num_completed, self.num_failed)

    def _note(self, number: int, is_completed: bool, usage: TokenUsage, *, is_observed: bool = True) -> None:
        mark(self._done, number)
        if is_completed:
            self.num_completed += 1
            self.usage += usage
            if is_observed and usage.output_tokens and _hash(number) < self._observed_below:
                self._observe(number, usage.output_tokens)
        else:
            self.num_failed += 1

    def _observe(self, number: int, num_output_tokens: int) -> None:
        self.observed[number] = num_output_tokens
        while len(self.observed) > MAX_OBSERVED:
            self._observed_below //= 2
            kept = {each: num for each, num in self.observed.items() if _hash(each) < self._observed_below}
            self.observed = kept


def _hash(number: int) -> int:
    """From 0 to 2**32 (Knuth's multiplicative one): neighbours are far apart."""
    return number * 2654435761 % (1 << 32)


class ResultLog(ResultTally):
    """Appends results in groups; a group is durable when ``append`` returns.

    Results are never rewritten. A result's id holds its line's number, so the files tell which lines are
    done; counts elsewhere are copies. Between calls no file is open: open batches use no descriptors.

    Args:
        name: as of ``ResultTally``.
        output, errors: where completed and failed lines go; may be the same file.
    """

    def __init__(self, name: str, output: Path, errors: Path) -> None:
        super().__init__(name)
        self._paths = (output, errors)
        self._files: dict[Path, _Identity] = {}
        self._is_torn = False  # a write failed, and part of it may still be in the files

    def open(self) -> None:
        """Create the files, or read them and cut off a line that a crash left unfinished. Once is enough.

        Raises: ForeignResults, OSError.
        """
        if self._files:
            return
        self._forget()  # what an attempt that failed has read
        files = {}
        for path in dict.fromkeys(self._paths):
            with _opened(path, os.O_CREAT) as file:
                size = self._read_back(path)
                os.ftruncate(file, size)
                files[path] = _Identity.of(os.fstat(file))
        for folder in {path.parent for path in self._paths}:
            sync(folder)
        self._files = files

    def check_intact(self) -> None:
        """Raise ResultsLost unless every result is still in its file."""
        with contextlib.ExitStack() as stack:
            self._open_files(stack)

    def append(self, results: Sequence[LineResult]) -> None:
        """Write and sync a group, whole or not at all.

        Raises: OSError, such as a full disk; the group may then be tried again. ResultsLost.
        """
        if self._is_torn:
            with contextlib.ExitStack() as stack:
                self._cut(self._open_files(stack))
        written: dict[Path, bytearray] = {}
        for result in results:
            path = self._paths[result.outcome is not LineOutcome.COMPLETED]
            written.setdefault(path, bytearray()).extend(result.encode(self.line_id(result.line.number)))
        with contextlib.ExitStack() as stack:
            # All files: no result may count beside results that are lost.
            files = self._open_files(stack)
            self._is_torn = True
            try:
                for path, data in written.items():
                    write_all(files[path], data)
                for path in written:
                    os.fsync(files[path])
            except OSError:
                with contextlib.suppress(OSError):  # else the next attempt cuts first
                    self._cut(files)
                raise
        self._is_torn = False
        for path, data in written.items():
            self._files[path] = self._files[path].grown_by(len(data))
        for result in results:
            self._note(result.line.number, result.outcome is LineOutcome.COMPLETED, result.usage)

    def _open_files(self, stack: contextlib.ExitStack) -> dict[Path, int]:
        """Raises: ResultsLost where a file is not as it was left."""
        files = {}
        for path in self._files:
            try:
                files[path] = stack.enter_context(_opened(path))
            except FileNotFoundError:
                raise ResultsLost(f"The result file {path.name} was removed while it was written.") from None
            found = _Identity.of(os.fstat(files[path]))
            if not found.is_same_file(self._files[path]):
                raise ResultsLost(f"The result file {path.name} was replaced while it was written.")
            excess = found.size - self._files[path].size
            if excess < 0 or (excess > 0 and not self._is_torn):
                raise ResultsLost(f"The result file {path.name} was changed while it was written.")
        return files

    def _cut(self, files: Mapping[Path, int]) -> None:
        for path, file in files.items():
            os.ftruncate(file, self._files[path].size)
        self._is_torn = False

    def _read_back(self, path: Path) -> int:
        """Note every whole line. Returns: bytes up to the end of the last one.

        A power loss may leave zeros in place of unsynced data. Nothing after them was counted.
        """
        size = 0
        with path.open("rb") as file:
            for row, data in enumerate(file, 1):
                if b"\0" in data or not data.endswith(b"\n"):  # JSON has no zeros
                    break
                size += len(data)
                number, written = self._parse(f"{path.name}, line {row},", data)
                if self.is_done(number):
                    raise ForeignResults(f"{path.name}, line {row}, is the second result of line {number}.")
                response = written.response
                is_completed = response is not None and response.status_code == 200
                usage = response.body.usage if is_completed and response and response.body else None
                self._note(number, is_completed, TokenUsage() if usage is None else usage.tokens())
        return size

    def _parse(self, where: str, data: bytes) -> tuple[int, _Written]:
        try:
            written = _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ForeignResults(f"{where} is no result of a batch.") from error
        number = written.id.removeprefix(self._prefix)
        if number == written.id or not (number.isascii() and number.isdigit()):
            raise ForeignResults(f"{where} is a result of another input, or of another part of it.")
        return int(number), written


def failures_in(path: Path) -> dict[str, list[int]]:
    """Numbers of the lines that failed, by the code of their errors or else the message, most lines first.

    Raises: OSError.
    """
    found: dict[str, list[int]] = {}
    with path.open("rb") as file:
        for data in file:
            written = _decoder.decode(data)
            error = written.error
            if written.response is not None and written.response.body is not None:
                error = written.response.body.error
            if error is not None:
                found.setdefault(error.code or error.message, []).append(int(written.id.rpartition("_")[2]))
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


@contextlib.contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, FILE_MODE)
    try:
        yield file
    finally:
        os.close(file)
