"""The files of a run without a server: its input, and results that only it may write."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backfill.core.errors import ConfigError
from backfill.jobs.leases import Lease
from backfill.jobs.records import BatchRecord
from backfill.jobs.results import ForeignResults, ResultLog
from backfill.jobs.suspects import LossFile

_SLICE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of a run, which has one of ``num_shards`` parts of the input.

    Attributes:
        errors: where failed lines go; may be ``output``.
        shard: from 0 on.
    """

    input: Path
    output: Path
    errors: Path
    num_shards: int = 1
    shard: int = 0

    @property
    def losses(self) -> LossFile:
        return LossFile(self.output.with_name(self.output.name + ".suspects"))

    def open_results(self, stack: contextlib.ExitStack) -> ResultLog:
        """The results there are. ``stack`` holds their files' locks.

        Raises: ConfigError for files that cannot be used, ForeignResults where one belongs to another input.
        """
        for option, path in (("-i", self.input), ("-o", self.output)):
            if str(path) == "-":
                raise ConfigError(f"{option} - is no file: an interrupted run resumes from files.")
        try:
            name = digest_of(self.input)
            if self.num_shards > 1:
                name = f"{name}-part-{self.shard}-of-{self.num_shards}"
            for path in dict.fromkeys((self.output, self.errors)):
                if path.exists() and path.samefile(self.input):
                    raise ConfigError(f"{path} is the input file.")
                stack.enter_context(locked(path))
                check_tail(path, f'{{"id":"batch_req_{name}_'.encode())
            log = ResultLog(name, self.output, self.errors)
            log.open()
        except OSError as error:
            raise self.unusable(error) from error
        except ForeignResults as error:
            message = f"{error} The file is left as it is; give another -o, or delete it to start over."
            raise ForeignResults(message) from None
        return log

    def unusable(self, error: OSError) -> ConfigError:
        """The error with the option and path of the file."""
        return ConfigError(f"{self._named(error.filename)}: {error.strerror or error}.")

    def _named(self, filename: str | bytes | int | None) -> str:
        options = (("-i", self.input), ("-o", self.output), ("--error-file", self.errors))
        named = (f"{option} {path}" for option, path in options if str(path) == str(filename))
        return next(named, str(filename or "A file"))


@dataclass(slots=True, eq=False)
class RunResults:
    """The ``ResultStore`` of a run: results go into its own files, and stay there."""

    log: ResultLog
    losses: LossFile

    def log_of(self, batch: BatchRecord, lease: Lease | None) -> ResultLog:
        return self.log

    def losses_of(self, batch: BatchRecord, lease: Lease | None) -> LossFile:
        return self.losses

    def publish(self, batch: BatchRecord) -> dict[str, tuple[str, int]]:
        self.losses.delete()
        return {}


def digest_of(path: Path) -> str:
    """A digest of the contents up to the last line that is not blank."""
    digest = hashlib.sha256()
    blank = b""
    with path.open("rb") as file:
        while block := file.read(_SLICE_BYTES):
            content = block.rstrip()
            if content:
                digest.update(blank)
                digest.update(content)
                blank = b""
            blank += block[len(content) :]
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file for this process. Raises: ConfigError when another process has the lock.

    The lock is on the result file itself; filelock's would be on a second file beside it. A file that was
    made here, and is still empty where the block raises, is removed.
    """
    is_new = not path.exists()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path} is being written by another run-batch.") from None
        try:
            yield
        except BaseException:
            if is_new and os.fstat(file).st_size == 0:
                path.unlink(missing_ok=True)
            raise
    finally:
        os.close(file)


def check_tail(path: Path, head: bytes) -> None:
    """Raise ForeignResults where the last line is neither whole nor a torn result: it would be cut off."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = end
        while start > 0:
            block_start = max(0, start - _SLICE_BYTES)
            file.seek(block_start)
            newline = file.read(start - block_start).rfind(b"\n")
            if newline >= 0:
                start = block_start + newline + 1
                break
            start = block_start
        file.seek(start)
        tail = file.read(len(head))
    # A power loss may leave zeros in place of data.
    if not (head.startswith(tail) or not tail.strip(b"\0")):
        raise ForeignResults(f"{path.name} holds a line that is no result of a batch.")
