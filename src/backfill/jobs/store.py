"""Files and batches in the database. Blocking: an event loop calls it in threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Engine, Select, SQLColumnExpression, delete, func, select, update
from sqlalchemy.orm import Session, sessionmaker

from backfill.jobs.database import lock_inputs
from backfill.jobs.errors import Conflict, NotFound, TooMany
from backfill.jobs.leases import Lease, Leases, add_lease, lock_lease
from backfill.jobs.records import (
    OPEN_STATUSES,
    WHOLE,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LeasedPart,
    OwnedRecord,
    Page,
    RecordedResult,
    SavedLosses,
)

Owned = TypeVar("Owned", bound=OwnedRecord)

_IS_OPEN = BatchRecord.status.in_(OPEN_STATUSES)


class JobStore:
    """Every method is one transaction, and safe to call from several threads.

    Raises: SQLAlchemyError from any method when the database does not answer; nothing has changed then.

    Args:
        leases: of this server, where several share the database; None: one server owns the records.
    """

    def __init__(self, engine: Engine, leases: Leases | None = None) -> None:
        self.leases = leases
        self._engine = engine
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def close(self) -> None:
        self._engine.dispose()

    # ---- Files ----

    def add_file(self, record: FileRecord) -> None:
        with self._sessions.begin() as session:
            session.add(record)

    def get_file(self, owner: str, file_id: str) -> FileRecord:
        """Raises: NotFound."""
        return self._get(FileRecord, owner, file_id, f"No such File object: {file_id[:80]}")

    def list_files(
        self, owner: str, *, purpose: str | None, order: str, limit: int, after: str | None
    ) -> Page[FileRecord]:
        """Raises: NotFound for an ``after`` that does not exist."""
        query = select(FileRecord).where(FileRecord.owner == owner)
        if purpose is not None:
            query = query.where(FileRecord.purpose == purpose)
        return self._page(FileRecord, query, owner, order == "asc", limit, after, "File object")

    def delete_file(self, owner: str, file_id: str) -> None:
        """Raises: NotFound, Conflict while a batch that has not ended reads it."""
        self.get_file(owner, file_id)
        if not self._delete_files(FileRecord.id == file_id):
            raise Conflict(f"The file {file_id} is the input of a batch that has not ended.")

    def delete_expired_files(self, now: int) -> list[str]:
        """Remove expired files from the database. Returns: their ids."""
        return self._delete_files(FileRecord.expires_at <= now)

    def num_bytes_of(self, owner: str) -> int:
        """Bytes of an owner's files."""
        return self._sum(FileRecord.num_bytes, FileRecord.owner == owner)

    def blob_ids(self) -> set[str]:
        """Ids of all files and of the results of open batches."""
        blobs = select(BatchRecord.output_blob, BatchRecord.error_blob).where(_IS_OPEN)
        with self._sessions() as session:
            ids = set(session.scalars(select(FileRecord.id)))
            return ids.union(*session.execute(blobs))

    # ---- Batches ----

    def add_batch(self, batch: BatchRecord, max_open: int) -> None:
        """Raises: NotFound when the input file is gone, TooMany where its owner has ``max_open`` already."""
        is_input = (FileRecord.id == batch.input_file_id, FileRecord.owner == batch.owner)
        num_open = select(func.count()).where(BatchRecord.owner == batch.owner, _IS_OPEN)
        with self._locking_inputs() as session:
            if session.scalar(select(FileRecord.id).where(*is_input)) is None:
                raise NotFound(f"No such File object: {batch.input_file_id[:80]}")
            if session.execute(num_open).scalar_one() >= max_open:
                raise TooMany(
                    f"At most {max_open} of your batches may be open at once. "
                    "Wait until some have ended, or cancel them."
                )
            session.add(batch)
            add_lease(session.connection(), batch.id)

    def get_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises: NotFound."""
        return self._get(BatchRecord, owner, batch_id, f"No batch found with id '{batch_id[:80]}'.")

    def list_batches(self, owner: str, *, limit: int, after: str | None) -> Page[BatchRecord]:
        """Newest first. Raises: NotFound for an ``after`` that does not exist."""
        query = select(BatchRecord).where(BatchRecord.owner == owner)
        return self._page(BatchRecord, query, owner, False, limit, after, "batch")

    def open_batches(self) -> list[BatchRecord]:
        """Those that have not ended, oldest first."""
        with self._sessions() as session:
            return list(session.scalars(select(BatchRecord).where(_IS_OPEN).order_by(BatchRecord.sequence)))

    def num_queued_lines(self, owner: str) -> int:
        """Unfinished lines of an owner's open batches, of which servers that share the database run some."""
        num_unfinished = BatchRecord.num_total - BatchRecord.num_completed - BatchRecord.num_failed
        return self._sum(num_unfinished, BatchRecord.owner == owner, _IS_OPEN)

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
        """Apply ``changes`` (by attribute) and add files, if the batch has one of the statuses.

        Returns: False where it has another status; nothing has changed then. True also where it has the new
        status already: an earlier attempt may have been committed without an answer.

        With ``lease`` the change is its holder's. Raises: LeaseLost. A batch that has ended has no lease, and
        its results are in its files. ``parts`` of its lines are for any server to claim, and the lease is
        released.
        """
        status: BatchStatus = changes["status"]
        is_it = BatchRecord.id == batch_id
        change = update(BatchRecord).where(is_it, BatchRecord.status.in_(only_from)).values(**changes)
        with self._sessions.begin() as session:
            connection = session.connection()
            lock_lease(connection, batch_id)
            if session.scalar(select(BatchRecord.status).where(is_it)) is status:
                return True
            if self.leases is not None and lease is not None:
                self.leases.hold(connection, lease)
            if connection.execute(change).rowcount != 1:
                return False
            # Copies: a record keeps the ``sequence`` of an attempt that was rolled back; others may have it.
            session.add_all(dataclasses.replace(file) for file in new_files)
            if status.is_final:
                for kind in (RecordedResult, SavedLosses, LeasedPart):
                    connection.execute(delete(kind).where(kind.batch_id == batch_id))
            elif parts and self.leases is not None and lease is not None:
                add_lease(connection, batch_id, parts, first=WHOLE + 1)
                self.leases.release_in(connection, lease)
        return True

    @contextmanager
    def _locking_inputs(self) -> Iterator[Session]:
        """A transaction during which no batch starts with a file that is being deleted."""
        with self._sessions.begin() as session:
            lock_inputs(session.connection())
            yield session

    def _delete_files(self, which: ColumnElement[bool]) -> list[str]:
        """Delete files, but for the inputs of open batches. Returns: their ids."""
        in_use = select(BatchRecord.input_file_id).where(_IS_OPEN)
        deletion = delete(FileRecord).where(which, FileRecord.id.not_in(in_use)).returning(FileRecord.id)
        with self._locking_inputs() as session:
            return list(session.scalars(deletion))

    def _sum(self, what: SQLColumnExpression[int], *where: ColumnElement[bool]) -> int:
        with self._sessions() as session:
            return int(session.scalar(select(func.sum(what)).where(*where)) or 0)

    def _get(self, kind: type[Owned], owner: str, record_id: str, if_missing: str) -> Owned:
        """Raises: NotFound with the message ``if_missing``."""
        with self._sessions() as session:
            found = session.scalar(select(kind).where(kind.id == record_id, kind.owner == owner))
        if found is None:
            raise NotFound(if_missing)
        return found

    def _page(
        self,
        kind: type[Owned],
        query: Select[Owned],
        owner: str,
        ascending: bool,
        limit: int,
        after: str | None,
        name: str,
    ) -> Page[Owned]:
        query = query.order_by(kind.sequence if ascending else kind.sequence.desc()).limit(limit + 1)
        with self._sessions() as session:
            if after is not None:
                mark = select(kind.sequence).where(kind.id == after, kind.owner == owner)
                sequence = session.scalar(mark)
                if sequence is None:
                    raise NotFound(f"after: no {name} found with id '{after[:80]}'.")
                query = query.where(kind.sequence > sequence if ascending else kind.sequence < sequence)
            found = session.scalars(query).all()  # the last one says that more follow
        return Page(list(found[:limit]), len(found) > limit)
