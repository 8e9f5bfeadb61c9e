"""Files and batches in the database. Blocking: an event loop calls it in threads."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping, Table, delete, func, insert, select, update

from backfill.jobs.database import batches, files, lock_inputs, results, suspects
from backfill.jobs.errors import Conflict, NotFound, TooMany
from backfill.jobs.leases import WHOLE, Lease, Leases, add_lease, delete_lease, lock_lease
from backfill.jobs.records import (
    OPEN_STATUSES,
    BatchRecord,
    BatchStatus,
    FileRecord,
    Page,
    RequestCounts,
    TokenUsage,
)
from backfill.preparation.lines import LineError

_OPEN = [status.value for status in OPEN_STATUSES]


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A batch that this server is to run, or lines of one. ``now_s`` is the database's Unix time."""

    batch: BatchRecord
    lease: Lease
    now_s: float


class JobStore:
    """Every method is one transaction, and safe to call from several threads.

    Raises: SQLAlchemyError from any method when the database does not answer; nothing has changed then.

    Args:
        leases: of this server, where several share the database; None: one server owns the records.
    """

    def __init__(self, engine: Engine, leases: Leases | None = None) -> None:
        self.leases = leases
        self._engine = engine
        # Among the threads of this server. ``lock_inputs`` is for several servers.
        self._input_lock = threading.Lock()

    def close(self) -> None:
        self._engine.dispose()

    # ---- Files ----

    def add_file(self, record: FileRecord) -> None:
        with self._engine.begin() as connection:
            connection.execute(insert(files), dataclasses.asdict(record))

    def get_file(self, owner: str, file_id: str) -> FileRecord:
        """Raises: NotFound."""
        return _file(self._row(files, owner, file_id, f"No such File object: {file_id[:80]}"))

    def list_files(
        self, owner: str, *, purpose: str | None, order: str, limit: int, after: str | None
    ) -> Page[FileRecord]:
        """Raises: NotFound for an ``after`` that does not exist."""
        query = select(files).where(files.c.owner == owner)
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        rows = self._page(files, query, owner, order == "asc", limit, after, "File object")
        return Page([_file(row) for row in rows[:limit]], len(rows) > limit)

    def delete_file(self, owner: str, file_id: str) -> None:
        """Raises: NotFound, Conflict while a batch that has not ended reads it."""
        self.get_file(owner, file_id)
        statement = delete(files).where(files.c.id == file_id, files.c.id.not_in(_inputs_in_use()))
        with self._locking_inputs() as connection:
            is_deleted = connection.execute(statement).rowcount == 1
        if not is_deleted:
            raise Conflict(f"The file {file_id} is the input of a batch that has not ended.")

    def delete_expired_files(self, now: int) -> list[str]:
        """Remove expired files from the database. Returns: their ids."""
        expired = (files.c.expires_at <= now, files.c.id.not_in(_inputs_in_use()))
        with self._locking_inputs() as connection:
            ids = list(connection.execute(select(files.c.id).where(*expired)).scalars())
            for file_id in ids:
                connection.execute(delete(files).where(files.c.id == file_id, *expired))
        return ids

    def num_bytes_of(self, owner: str) -> int:
        """Bytes of an owner's files."""
        query = select(func.coalesce(func.sum(files.c.num_bytes), 0)).where(files.c.owner == owner)
        with self._engine.connect() as connection:
            return int(connection.execute(query).scalar_one())

    def blob_ids(self) -> set[str]:
        """Ids of all files and of the results of open batches."""
        with self._engine.connect() as connection:
            ids = set(connection.execute(select(files.c.id)).scalars())
            query = select(batches.c.output_blob, batches.c.error_blob).where(batches.c.status.in_(_OPEN))
            for row in connection.execute(query):
                ids.update(row)
        return ids

    # ---- Batches ----

    def add_batch(self, batch: BatchRecord, max_open: int) -> None:
        """Raises: NotFound when the input file is gone, TooMany where its owner has ``max_open`` already."""
        num_open = select(func.count()).where(batches.c.owner == batch.owner, batches.c.status.in_(_OPEN))
        with self._locking_inputs() as connection:
            found = connection.execute(
                select(files.c.id).where(files.c.id == batch.input_file_id, files.c.owner == batch.owner)
            ).first()
            if found is None:
                raise NotFound(f"No such File object: {batch.input_file_id[:80]}")
            if connection.execute(num_open).scalar_one() >= max_open:
                raise TooMany(
                    f"At most {max_open} of your batches may be open at once. "
                    "Wait until some have ended, or cancel them."
                )
            connection.execute(insert(batches), _batch_row(batch))
            if self.leases is not None:
                add_lease(connection, batch.id)

    def get_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises: NotFound."""
        return _batch(self._row(batches, owner, batch_id, f"No batch found with id '{batch_id[:80]}'."))

    def list_batches(self, owner: str, *, limit: int, after: str | None) -> Page[BatchRecord]:
        """Newest first. Raises: NotFound for an ``after`` that does not exist."""
        query = select(batches).where(batches.c.owner == owner)
        rows = self._page(batches, query, owner, False, limit, after, "batch")
        return Page([_batch(row) for row in rows[:limit]], len(rows) > limit)

    def open_batches(self) -> list[BatchRecord]:
        """Those that have not ended, oldest first."""
        query = select(batches).where(batches.c.status.in_(_OPEN)).order_by(batches.c.sequence)
        with self._engine.connect() as connection:
            return [_batch(row) for row in connection.execute(query).mappings()]

    def claim_batch(self, **options: Any) -> Claim | None:
        """Claim an open batch that no server holds, or lines of one. ``options`` of ``Leases.claim``."""
        assert self.leases is not None
        claimed = self.leases.claim(**options)
        if claimed is None:
            return None
        lease, row = claimed
        return Claim(_batch(row), lease, row["now_s"])

    def end_lines(self, lease: Lease) -> None:
        """A lease of lines has ended; those without a result are for whoever ends the batch."""
        assert self.leases is not None
        self.leases.end_lines(lease)

    def num_queued_lines(self, owner: str) -> int:
        """Unfinished lines of an owner's open batches, of which servers that share the database run some."""
        lines = func.sum(batches.c.num_total - batches.c.num_completed - batches.c.num_failed)
        query = select(func.coalesce(lines, 0)).where(batches.c.owner == owner, batches.c.status.in_(_OPEN))
        with self._engine.connect() as connection:
            return int(connection.execute(query).scalar_one())

    def change_batch(
        self,
        batch_id: str,
        changes: Mapping[str, Any],
        *,
        only_from: Collection[BatchStatus],
        new_files: Sequence[FileRecord] = (),
        lease: Lease | None = None,
        parts: Sequence[bytes] = (),
    ) -> bool:
        """Apply ``changes`` (column values) and add files, if the batch has one of the statuses.

        Returns: False where it has another status; nothing has changed then. True also where it has the new
        status already: an earlier attempt may have been committed without an answer.

        With ``lease`` the change is its holder's. Raises: LeaseLost. A batch that has ended has no lease, and
        its results are in its files. ``parts`` of its lines are for any server to claim, and the lease is
        released.
        """
        current = select(batches.c.status).where(batches.c.id == batch_id)
        statement = (
            update(batches)
            .where(batches.c.id == batch_id, batches.c.status.in_([status.value for status in only_from]))
            .values(**changes)
        )
        with self._engine.begin() as connection:
            if self.leases is not None:
                lock_lease(connection, batch_id)
            if connection.execute(current).scalar() == changes["status"]:
                return True
            if self.leases is not None and lease is not None:
                self.leases.hold(connection, lease)
            for record in new_files:
                connection.execute(insert(files), dataclasses.asdict(record))
            if connection.execute(statement).rowcount == 1:
                if BatchStatus(changes["status"]).is_final:
                    for table in (results, suspects):
                        connection.execute(delete(table).where(table.c.batch_id == batch_id))
                    delete_lease(connection, batch_id)
                elif parts and self.leases is not None and lease is not None:
                    add_lease(connection, batch_id, parts, first=WHOLE + 1)
                    self.leases.release_in(connection, lease)
                return True
            connection.rollback()
            return False

    @contextmanager
    def _locking_inputs(self) -> Iterator[Connection]:
        """A transaction during which no batch starts with a file that is being deleted."""
        with self._input_lock, self._engine.begin() as connection:
            lock_inputs(connection)
            yield connection

    def _row(self, table: Table, owner: str, record_id: str, if_missing: str) -> RowMapping:
        """Raises: NotFound with the message ``if_missing``."""
        query = select(table).where(table.c.id == record_id, table.c.owner == owner)
        with self._engine.connect() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFound(if_missing)
        return row

    def _page(
        self,
        table: Table,
        query: Any,
        owner: str,
        ascending: bool,
        limit: int,
        after: str | None,
        kind: str,
    ) -> Sequence[RowMapping]:
        """Up to ``limit`` + 1 rows; the last one tells that more follow."""
        query = query.order_by(table.c.sequence if ascending else table.c.sequence.desc()).limit(limit + 1)
        with self._engine.connect() as connection:
            if after is not None:
                mark = select(table.c.sequence).where(table.c.id == after, table.c.owner == owner)
                sequence = connection.execute(mark).scalar()
                if sequence is None:
                    raise NotFound(f"after: no {kind} found with id '{after[:80]}'.")
                query = query.where(table.c.sequence > sequence if ascending else table.c.sequence < sequence)
            return connection.execute(query).mappings().all()


def counts_changes(counts: RequestCounts, usage: TokenUsage) -> dict[str, Any]:
    """Column values for ``JobStore.change_batch``."""
    return {
        "num_total": counts.total,
        "num_completed": counts.completed,
        "num_failed": counts.failed,
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def _inputs_in_use() -> Any:
    return select(batches.c.input_file_id).where(batches.c.status.in_(_OPEN))


def _file(row: RowMapping) -> FileRecord:
    return FileRecord(**{name: row[name] for name in FileRecord.__slots__})


def _batch(row: RowMapping) -> BatchRecord:
    fields = {name: row[name] for name in BatchRecord.__slots__ if name in row}
    fields["status"] = BatchStatus(row["status"])
    fields["errors"] = [LineError(**error) for error in row["errors"]]
    fields["request_counts"] = RequestCounts(row["num_total"], row["num_completed"], row["num_failed"])
    fields["usage"] = TokenUsage(row["input_tokens"], row["cached_tokens"], row["output_tokens"])
    return BatchRecord(**fields)


def _batch_row(batch: BatchRecord) -> dict[str, Any]:
    row = dataclasses.asdict(batch)
    row["status"] = batch.status.value
    del row["request_counts"], row["usage"]
    return row | counts_changes(batch.request_counts, batch.usage)
