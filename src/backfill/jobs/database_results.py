"""Results in the database, until their batch ends: for servers that share it, and stores without append.

A log file cannot tell a server that lost its lease from the one that has it, and an object store has no
append. So each group of results is one transaction of the database: it holds the batch's lease, adds a row a
line, and brings the batch's counts up to date. All of it is durable, or none. The rows' key is the batch and
the number of the line, so a line has one result, whoever recorded it. When the batch ends the rows are
written to result files under new ids, and the transaction that ends it names the files and deletes the rows.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, bindparam, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from backfill.core.durable_files import write_all
from backfill.jobs.blobs import FileStore
from backfill.jobs.leases import Lease, LeaseLost, Leases, lock_lease
from backfill.jobs.lines import LineResult
from backfill.jobs.records import (
    BatchRecord,
    LeasedPart,
    LineOutcome,
    RecordedResult,
    SavedLosses,
    TokenUsage,
    new_file_id,
)
from backfill.jobs.results import ResultLog, ResultsLost, ResultTally
from backfill.jobs.retry import as_os_errors
from backfill.jobs.suspects import LossStore, merged
from backfill.preparation.line_file import is_marked, union

logger = logging.getLogger(__name__)

_ROWS_PER_READ = 200
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens")
_COUNTS = ("num_completed", "num_failed", *_TOKENS)
# Built once: each group of results executes them.
_ADD = {
    module.dialect.name: module.insert(RecordedResult)
    .on_conflict_do_nothing()
    .returning(RecordedResult.number)
    for module in (postgresql, sqlite)
}
_COUNT = (
    update(BatchRecord)
    .where(BatchRecord.id == bindparam("of_batch"))
    .values({name: getattr(BatchRecord, name) + bindparam(f"more_{name}") for name in _COUNTS})
)

# By column of the batch: the id of the file, and its bytes.
Published = dict[str, tuple[str, int]]


class ResultStore(Protocol):
    """Where the results of open batches are. Blocking, but for ``log_of``."""

    def log_of(self, batch: BatchRecord, lease: Lease | None) -> BatchLog:
        """The batch's results, not opened yet."""
        ...

    def losses_of(self, batch: BatchRecord, lease: Lease | None) -> LossStore:
        """Where it is saved which of the batch's lines were lost."""
        ...

    def publish(self, batch: BatchRecord) -> Published:
        """Make files of a batch's results, durably. Files without lines are left out. Raises: OSError.

        The batch ends now, so its losses need not be kept.
        """
        ...


@dataclass(frozen=True, slots=True)
class DatabaseResults:
    """In rows of the database. Without leases one server has all batches."""

    engine: Engine
    files: FileStore
    leases: Leases | None

    def log_of(self, batch: BatchRecord, lease: Lease | None) -> BatchLog:
        return DatabaseResultLog(self.engine, batch.id, _name_of(batch), partial(self._hold, lease))

    def losses_of(self, batch: BatchRecord, lease: Lease | None) -> LossRow:
        lines = None if lease is None else lease.lines
        return LossRow(self.engine, batch.id, lines, partial(self._hold, lease))

    def _hold(self, lease: Lease | None, connection: Connection) -> None:
        if self.leases is not None and lease is not None:
            self.leases.hold(connection, lease)

    def publish(self, batch: BatchRecord) -> Published:
        """Under new ids: a server that lost the batch meanwhile can replace no file that another one made."""
        found: Published = {}
        for column, is_completed in (("output_file_id", True), ("error_file_id", False)):
            file_id = new_file_id()
            file = self.files.create(file_id)
            try:
                num_bytes = self._copy(batch.id, is_completed, file.fileno())
            except BaseException:
                self.files.discard(file_id, file)
                raise
            if num_bytes:
                self.files.commit(file_id, file)
                found[column] = file_id, num_bytes
            else:
                self.files.discard(file_id, file)
        return found

    def _copy(self, batch_id: str, is_completed: bool, file: int) -> int:
        """Write the lines of one file. Returns: their bytes."""
        query = (
            select(RecordedResult.line)
            .where(RecordedResult.batch_id == batch_id, RecordedResult.is_completed.is_(is_completed))
            .order_by(RecordedResult.number)
            .execution_options(yield_per=_ROWS_PER_READ)
        )
        num_bytes = 0
        with as_os_errors(), self.engine.connect() as connection:
            for lines in connection.scalars(query).partitions():
                data = b"".join(lines)
                write_all(file, data)
                num_bytes += len(data)
        return num_bytes


@dataclass(frozen=True, slots=True)
class FileResults(DatabaseResults):
    """In files that one server appends to. Only which lines were lost is in the database."""

    def log_of(self, batch: BatchRecord, lease: Lease | None) -> BatchLog:
        paths = self.files.path(batch.output_blob), self.files.path(batch.error_blob)
        return ResultLog(_name_of(batch), *paths)

    def publish(self, batch: BatchRecord) -> Published:
        blobs = {"output_file_id": batch.output_blob, "error_file_id": batch.error_blob}
        found = {column: (blob, self.files.size_or_delete(blob)) for column, blob in blobs.items()}
        return {column: (blob, num_bytes) for column, (blob, num_bytes) in found.items() if num_bytes}


class DatabaseResultLog(ResultTally):
    """The results of one batch in the database.

    Args:
        name: as of ``ResultLog``.
        hold: begins a transaction that may write results. Raises: LeaseLost.
    """

    def __init__(self, engine: Engine, batch_id: str, name: str, hold: Callable[[Connection], None]) -> None:
        super().__init__(name)
        self._engine = engine
        self._batch_id = batch_id
        self._hold = hold

    def open(self) -> None:
        """Read which lines are done, and the lengths of those in parts that have ended: short ones end first.

        Raises: LeaseLost, OSError where the database does not answer.
        """
        tokens = RecordedResult.input_tokens, RecordedResult.cached_tokens, RecordedResult.output_tokens
        query = select(RecordedResult.number, RecordedResult.is_completed, *tokens)
        query = query.where(RecordedResult.batch_id == self._batch_id)
        parts = select(LeasedPart.lines).where(LeasedPart.batch_id == self._batch_id)
        with as_os_errors(), self._engine.begin() as connection:
            self._hold(connection)  # waits for a write of an earlier holder
            running = functools.reduce(union, (lines or b"" for lines in connection.scalars(parts)), b"")
            for number, is_completed, *usage in connection.execute(query):
                is_observed = not is_marked(running, number)
                self._note(number, is_completed, TokenUsage(*usage), is_observed=is_observed)

    def append(self, results_of_lines: Sequence[LineResult]) -> None:
        """Record a group, whole or not at all.

        Raises: LeaseLost; OSError where the database does not answer, and the group may be tried again. A
        line whose row is there already, as after a commit whose answer was lost, is left as it is.
        """
        rows = [self._row(result) for result in results_of_lines]
        more = Counter[str]()
        with as_os_errors(), self._engine.begin() as connection:
            self._hold(connection)
            added = set(connection.scalars(_ADD[self._engine.dialect.name], rows))
            for row in rows:
                if row["number"] in added:
                    more["num_completed" if row["is_completed"] else "num_failed"] += 1
                    more.update({name: row[name] for name in _TOKENS})
            if more:
                values = {f"more_{name}": more[name] for name in _COUNTS}
                connection.execute(_COUNT, {"of_batch": self._batch_id, **values})
        for result in results_of_lines:
            self._note(result.line.number, result.outcome is LineOutcome.COMPLETED, result.usage)

    def check_intact(self) -> None:
        """Raise ResultsLost unless every result is still in the database."""
        query = select(func.count()).where(RecordedResult.batch_id == self._batch_id)
        with as_os_errors(), self._engine.begin() as connection:
            self._hold(connection)
            num_found = connection.execute(query).scalar_one()
        if num_found != self.num_completed + self.num_failed:
            raise ResultsLost(
                f"The database has {num_found} results of {self._batch_id}, not those recorded."
            )

    def _row(self, result: LineResult) -> dict[str, Any]:
        is_completed = result.outcome is LineOutcome.COMPLETED
        return {
            "batch_id": self._batch_id,
            "number": result.line.number,
            "is_completed": is_completed,
            **asdict(result.usage if is_completed else TokenUsage()),
            "line": result.encode(self.line_id(result.line.number)),
        }


@dataclass(frozen=True, slots=True)
class LossRow:
    """Which lines of one batch were lost, for whichever server runs it. A ``LossStore``.

    Attributes:
        lines: those that it may write of, a bit for each; None for all.
        hold: as of ``DatabaseResultLog``.
    """

    engine: Engine
    batch_id: str
    lines: bytes | None
    hold: Callable[[Connection], None]

    def read(self) -> bytes | None:
        with as_os_errors(), Session(self.engine) as session:
            return self._saved(session)

    def write(self, content: bytes) -> None:
        """Another server that has the batch now counts losses of its own: nothing is written then."""
        try:
            with as_os_errors(), Session(self.engine) as session, session.begin():
                lock_lease(session.connection(), self.batch_id)  # other servers may write of other lines
                self.hold(session.connection())
                if self.lines is not None:
                    content = merged(self._saved(session), content, self.lines)
                session.merge(SavedLosses(batch_id=self.batch_id, losses=content))
        except LeaseLost as error:
            logger.warning("lost lines are not saved: %s", error)

    def _saved(self, session: Session) -> bytes | None:
        return session.scalar(select(SavedLosses.losses).where(SavedLosses.batch_id == self.batch_id))


BatchLog = ResultLog | DatabaseResultLog


def _name_of(batch: BatchRecord) -> str:
    return batch.id.removeprefix("batch_")
