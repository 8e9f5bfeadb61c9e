"""Leases on batches: of several servers on one database exactly one runs a batch's lines.

A lease is a row with its holder, a fencing token and the time at which it ends, on the database's clock:
the servers' clocks decide nothing. Each claim raises the token. Every write of a holder is one transaction
that begins with ``Leases.hold``, which changes the lease's row if the token is still the row's. So a server
that was taken for dead can record nothing more, however late it wakes, and a claim waits for a write that
has begun.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Float,
    RowMapping,
    cast,
    delete,
    extract,
    func,
    insert,
    or_,
    select,
    update,
)

from backfill.core.errors import BackfillError
from backfill.jobs.database import batches, is_shared, leases
from backfill.jobs.records import OPEN_STATUSES, BatchStatus

_OPEN = [status.value for status in OPEN_STATUSES]
_EPOCH_JULIAN_DAY = 2440587.5
_DAY_S = 86400.0


class LeaseLost(BackfillError):
    """Another server runs the batch now; nothing was written."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim of one batch. ``token`` is greater than that of every earlier claim."""

    batch_id: str
    token: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a server holds. A batch that another server has, or that has ended, has no token.

    Attributes:
        tokens: by batch, of those held.
        statuses: by batch, of those asked about.
    """

    tokens: Mapping[str, int]
    statuses: Mapping[str, BatchStatus]


class Leases:
    """The leases of one server. Blocking, and safe to call from several threads.

    Raises: SQLAlchemyError from any method when the database does not answer.

    Args:
        holder: this server; no two have the same, nor has one after its restart.
        duration_s: of a lease, from its claim and from each write and renewal.
        now_s: the database's clock in seconds, evaluated anew in each statement.
    """

    def __init__(
        self, engine: Engine, holder: str, duration_s: float, now_s: ColumnElement[float] | None = None
    ) -> None:
        self.holder = holder
        self._engine = engine
        self._duration_s = duration_s
        self._now_s = database_clock(engine) if now_s is None else now_s

    def claim(
        self,
        *,
        only_over: bool = False,
        takes_over: bool = True,
        model_names: Collection[str] = (),
        others_than: Collection[str] = (),
    ) -> tuple[Lease, RowMapping] | None:
        """Claim the open batch without a holder whose window ends first.

        Args:
            only_over: only one that needs no engine: it is being cancelled, or its window has ended.
            takes_over: also one whose lease has ended without a release.
            model_names: what the server's model is called. Batches of other models are claimed only to end.
            others_than: batches not to claim.

        Returns: the lease, and the batch's row, in which ``now_s`` is the time on the database's clock.
        """
        is_free: ColumnElement[bool] = leases.c.holder.is_(None)
        if takes_over:
            is_free = or_(is_free, leases.c.expires_at <= self._now_s)
        is_over = or_(batches.c.status == BatchStatus.CANCELLING.value, batches.c.expires_at <= self._now_s)
        query = (
            select(leases.c.batch_id)
            .join(batches, batches.c.id == leases.c.batch_id)
            .where(batches.c.status.in_(_OPEN), is_free, leases.c.batch_id.not_in(others_than))
            .order_by(batches.c.expires_at, batches.c.sequence)
            .limit(1)
            # Servers that claim at once claim different ones. SQLite, with one writer, has no such clause.
            .with_for_update(of=leases, skip_locked=True)
        )
        if only_over:
            query = query.where(is_over)
        else:
            query = query.where(or_(is_over, batches.c.model.is_(None), batches.c.model.in_(model_names)))
        with self._engine.begin() as connection:
            batch_id = connection.execute(query).scalar()
            if batch_id is None:
                return None
            taken = connection.execute(
                update(leases)
                .where(leases.c.batch_id == batch_id, is_free)
                .values(holder=self.holder, token=leases.c.token + 1, expires_at=self._end_s)
                .returning(leases.c.token)
            ).scalar()
            if taken is None:
                return None
            found = select(batches, self._now_s.label("now_s")).where(batches.c.id == batch_id)
            row = connection.execute(found).mappings().one()
        return Lease(batch_id, taken), row

    def renew(self, batch_ids: Sequence[str]) -> Renewal:
        """Renew all leases, also those that have ended while nobody else claimed their batches."""
        statement = (
            update(leases)
            .where(leases.c.holder == self.holder)
            .values(expires_at=self._end_s)
            .returning(leases.c.batch_id, leases.c.token)
        )
        found = select(batches.c.id, batches.c.status).where(batches.c.id.in_(batch_ids))
        with self._engine.begin() as connection:
            tokens = {row.batch_id: row.token for row in connection.execute(statement)}
            statuses = {row.id: BatchStatus(row.status) for row in connection.execute(found)}
        return Renewal(tokens, statuses)

    def hold(self, connection: Connection, lease: Lease) -> None:
        """Renew the lease in a transaction: until its end no other server can claim the batch.

        Raises: LeaseLost.
        """
        statement = update(leases).where(*self._is(lease)).values(expires_at=self._end_s)
        if connection.execute(statement).rowcount != 1:
            raise LeaseLost(f"{lease.batch_id} is run by another server now.")

    def release(self, lease: Lease) -> None:
        """Let another server claim the batch at once. A lease that was lost is left as it is."""
        self._release(*self._is(lease))

    def release_all(self) -> None:
        """As ``release``, of all that this server holds."""
        self._release(leases.c.holder == self.holder)

    @property
    def _end_s(self) -> ColumnElement[float]:
        return self._now_s + self._duration_s

    def _is(self, lease: Lease) -> tuple[ColumnElement[bool], ...]:
        return (
            leases.c.batch_id == lease.batch_id,
            leases.c.holder == self.holder,
            leases.c.token == lease.token,
        )

    def _release(self, *whose: ColumnElement[bool]) -> None:
        with self._engine.begin() as connection:
            connection.execute(update(leases).where(*whose).values(holder=None, expires_at=0.0))


def add_lease(connection: Connection, batch_id: str) -> None:
    """The row of a new batch, which nobody holds."""
    connection.execute(insert(leases), {"batch_id": batch_id, "holder": None, "token": 0, "expires_at": 0.0})


def add_missing_leases(connection: Connection) -> None:
    """Rows of open batches that have none: an earlier version made them."""
    without = batches.c.id.not_in(select(leases.c.batch_id))
    for batch_id in connection.execute(
        select(batches.c.id).where(batches.c.status.in_(_OPEN), without)
    ).scalars():
        add_lease(connection, batch_id)


def lock_lease(connection: Connection, batch_id: str) -> None:
    """Wait for a write of the holder, whoever it is. Every transaction takes the lease's row first."""
    connection.execute(select(leases.c.token).where(leases.c.batch_id == batch_id).with_for_update())


def delete_lease(connection: Connection, batch_id: str) -> None:
    """Of a batch that has ended."""
    connection.execute(delete(leases).where(leases.c.batch_id == batch_id))


def database_clock(engine: Engine) -> ColumnElement[Any]:
    """Seconds since 1970 on the database's clock.

    Not the time at which the transaction began: a statement may have waited for a lock.
    """
    if is_shared(engine):
        return cast(extract("epoch", func.clock_timestamp()), Float)
    return (func.julianday("now") - _EPOCH_JULIAN_DAY) * _DAY_S
