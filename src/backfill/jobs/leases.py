"""Leases: of several servers on one database exactly one runs a line, and one begins and ends a batch.

A lease is rows with their holder, a fencing token and the time at which they end, on the database's clock:
the servers' clocks decide nothing. Each claim raises the token. Every write of a holder is one transaction
that begins with ``Leases.hold``, which changes the lease's rows if the token is still theirs. So a server
that was taken for dead can record nothing more, however late it wakes, and a claim waits for a write that
has begun.

A batch has one row, its part 0, and while its lines run one for each part of them. Whoever holds part 0
checks the batch's input and divides its lines; once the parts are gone, or the batch is to end and nobody
holds one, whoever holds part 0 ends the batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Float,
    RowMapping,
    Select,
    case,
    cast,
    delete,
    exists,
    extract,
    func,
    insert,
    not_,
    or_,
    select,
    tuple_,
    update,
)

from backfill.core.errors import BackfillError
from backfill.jobs.database import batches, is_postgresql, leases, lock_writes, servers
from backfill.jobs.records import OPEN_STATUSES, BatchStatus
from backfill.preparation.line_file import union

_OPEN = [status.value for status in OPEN_STATUSES]
_EPOCH_JULIAN_DAY = 2440587.5
_DAY_S = 86400.0


class LeaseLost(BackfillError):
    """Another server runs the batch now; nothing was written."""


WHOLE = 0  # the part that stands for the batch itself


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim of one batch, or of some of its lines.

    Attributes:
        token: greater than that of every earlier claim.
        lines: a bit for each line that may run; None for the batch itself.
    """

    batch_id: str
    token: int
    parts: tuple[int, ...] = (WHOLE,)
    lines: bytes | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a server holds of what it asked about, and how many servers have an engine.

    Attributes:
        statuses: by batch.
    """

    held: Collection[Lease]
    statuses: Mapping[str, BatchStatus]
    num_servers: int


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
        num_servers: int = 1,
        max_lines: int = sys.maxsize,
    ) -> tuple[Lease, RowMapping] | None:
        """Claim the open batch without a holder whose window ends first, or lines of it.

        Args:
            only_over: only one that needs no engine: it is being cancelled, or its window has ended.
            takes_over: also one whose lease has ended without a release.
            model_names: what the server's model is called. Batches of other models are claimed only to end.
            others_than: batches not to claim.
            num_servers: that share the lines of a batch evenly.
            max_lines: about so many lines.

        Returns: the lease, and the batch's row, in which ``now_s`` is the time on the database's clock.
        """
        is_free: ColumnElement[bool] = leases.c.holder.is_(None)
        if takes_over:
            is_free = or_(is_free, leases.c.expires_at <= self._now_s)
        passed_over = set(others_than)
        with self._engine.begin() as connection:
            lock_writes(connection)
            while True:
                query = self._claimable(model_names, only_over=only_over).where(is_free)
                first = connection.execute(query.where(leases.c.batch_id.not_in(passed_over))).first()
                if first is None:
                    return None
                rows: Sequence[Any] = [first]
                if first.part != WHOLE:
                    rows = self._share_of(connection, first.batch_id, is_free, num_servers, max_lines)
                if rows:
                    break
                passed_over.add(first.batch_id)
            lease = self._take(connection, first.batch_id, rows)
            found = select(batches, self._now_s.label("now_s")).where(batches.c.id == lease.batch_id)
            return lease, connection.execute(found).mappings().one()

    def _claimable(self, model_names: Collection[str], *, only_over: bool) -> Select[Any]:
        """The next row that may be claimed if it is free."""
        other = leases.alias()
        lines = (other.c.batch_id == leases.c.batch_id) & (other.c.part != WHOLE)
        runs = exists().where(lines, other.c.holder.is_not(None), other.c.expires_at > self._now_s)
        is_of_lines = leases.c.part != WHOLE
        is_in_progress = batches.c.status == BatchStatus.IN_PROGRESS.value
        is_over = or_(batches.c.status == BatchStatus.CANCELLING.value, batches.c.expires_at <= self._now_s)
        query = (
            select(leases.c.batch_id, leases.c.part, leases.c.token)
            .join(batches, batches.c.id == leases.c.batch_id)
            .where(batches.c.status.in_(_OPEN))
            .order_by(batches.c.expires_at, batches.c.sequence, leases.c.part)
            .limit(1)
            # Servers that claim at once claim different ones.
            .with_for_update(of=leases, skip_locked=True)
        )
        if only_over:
            return query.where(is_over, not_(is_of_lines), not_(runs))
        is_ours = or_(is_over, batches.c.model.is_(None), batches.c.model.in_(model_names))
        lines_may_run = is_of_lines & is_in_progress & not_(is_over)
        is_to_end = not_(is_of_lines) & or_(not_(exists().where(lines)), is_over & not_(runs))
        return query.where(is_ours, or_(lines_may_run, is_to_end))

    def _share_of(
        self,
        connection: Connection,
        batch_id: str,
        is_free: ColumnElement[bool],
        num_servers: int,
        max_lines: int,
    ) -> Sequence[Any]:
        """Free parts of a batch, until this server has its share of the lines; none where it has it."""
        of_batch = (leases.c.batch_id == batch_id) & (leases.c.part != WHOLE)
        own_lines = case((leases.c.holder == self.holder, leases.c.num_lines), else_=0)
        sums = select(func.sum(leases.c.num_lines), func.sum(own_lines)).where(of_batch)
        num_lines, num_own = connection.execute(sums).one()
        most = min(max_lines, math.ceil(num_lines / num_servers) - num_own)
        free = (
            select(leases.c.part, leases.c.token, leases.c.num_lines)
            .where(of_batch, is_free)
            .order_by(leases.c.part)
            .with_for_update(skip_locked=True)
        )
        rows, num_taken = list[Any](), 0
        for row in connection.execute(free).all():
            if num_taken >= most:
                break
            rows.append(row)
            num_taken += row.num_lines
        return rows

    def _take(self, connection: Connection, batch_id: str, rows: Sequence[Any]) -> Lease:
        parts = tuple(row.part for row in rows)
        token = max(row.token for row in rows) + 1
        if parts == (WHOLE,):
            connection.execute(delete(leases).where(leases.c.batch_id == batch_id, leases.c.part != WHOLE))
        of_parts = (leases.c.batch_id == batch_id) & leases.c.part.in_(parts)
        end_s = self._end_s
        connection.execute(
            update(leases).where(of_parts).values(holder=self.holder, token=token, expires_at=end_s)
        )
        found = connection.execute(select(leases.c.lines).where(of_parts)).scalars()
        lines = None if parts == (WHOLE,) else reduce(union, found)
        return Lease(batch_id, token, parts, lines)

    def renew(self, held: Collection[Lease] = (), *, is_ready: bool = True) -> Renewal:
        """Renew leases, also those that have ended while nobody else claimed what they are of.

        Args:
            is_ready: lines may run on this server.
        """
        rows = [(lease.batch_id, part) for lease in held for part in lease.parts]
        columns = (leases.c.batch_id, leases.c.part, leases.c.token)
        statement = (
            update(leases)
            .where(leases.c.holder == self.holder, tuple_(*columns[:2]).in_(rows))
            .values(expires_at=self._end_s)
            .returning(*columns)
        )
        of_held = batches.c.id.in_({lease.batch_id for lease in held})
        with self._engine.begin() as connection:
            lock_writes(connection)
            renewed = {tuple(row) for row in connection.execute(statement)}
            found = connection.execute(select(batches.c.id, batches.c.status).where(of_held)).all()
            self._note_ready(connection, is_ready)
            count = select(func.count()).where(servers.c.expires_at > self._now_s)
            num_servers = connection.execute(count).scalar_one()
        kept = [
            lease
            for lease in held
            if all((lease.batch_id, part, lease.token) in renewed for part in lease.parts)
        ]
        return Renewal(kept, {row.id: BatchStatus(row.status) for row in found}, max(1, num_servers))

    def _note_ready(self, connection: Connection, is_ready: bool) -> None:
        """Also forgets servers that have ended."""
        is_gone = or_(servers.c.holder == self.holder, servers.c.expires_at <= self._now_s)
        connection.execute(delete(servers).where(is_gone))
        if is_ready:
            connection.execute(insert(servers).values(holder=self.holder, expires_at=self._end_s))

    def hold(self, connection: Connection, lease: Lease) -> None:
        """Renew the lease in a transaction: until its end no other server can claim what it is of.

        Raises: LeaseLost.
        """
        statement = update(leases).where(*self._is(lease)).values(expires_at=self._end_s)
        if connection.execute(statement).rowcount != len(lease.parts):
            raise LeaseLost(f"{lease.batch_id} is run by another server now.")

    def release(self, lease: Lease) -> None:
        """Let another server claim it at once. A lease that was lost is left as it is."""
        with self._engine.begin() as connection:
            self.release_in(connection, lease)

    def release_in(self, connection: Connection, lease: Lease) -> None:
        """As ``release``, in a transaction."""
        self._release(connection, *self._is(lease))

    def end_lines(self, lease: Lease) -> None:
        """Lines have ended; those that have not are for whoever ends the batch. For a lease of lines."""
        with self._engine.begin() as connection:
            connection.execute(delete(leases).where(*self._is(lease)))

    def release_all(self, holder: str | None = None) -> None:
        """As ``release``, of all that this server holds, or that one which has ended held."""
        gone = holder or self.holder
        with self._engine.begin() as connection:
            self._release(connection, leases.c.holder == gone)
            connection.execute(delete(servers).where(servers.c.holder == gone))

    @property
    def _end_s(self) -> ColumnElement[float]:
        return self._now_s + self._duration_s

    def _is(self, lease: Lease) -> tuple[ColumnElement[bool], ...]:
        return (
            leases.c.batch_id == lease.batch_id,
            leases.c.part.in_(lease.parts),
            leases.c.holder == self.holder,
            leases.c.token == lease.token,
        )

    def _release(self, connection: Connection, *whose: ColumnElement[bool]) -> None:
        connection.execute(update(leases).where(*whose).values(holder=None, expires_at=0.0))


def add_lease(
    connection: Connection, batch_id: str, lines: Sequence[bytes] = (b"",), first: int = WHOLE
) -> None:
    """The row of a new batch, which nobody holds; or rows of parts of its lines, from ``first`` on."""
    row = {"batch_id": batch_id, "holder": None, "token": 0, "expires_at": 0.0}
    for part, bits in enumerate(lines, start=first):
        num_lines = int.from_bytes(bits, "little").bit_count()
        connection.execute(insert(leases), {**row, "part": part, "lines": bits, "num_lines": num_lines})


def add_missing_leases(connection: Connection) -> None:
    """Rows of open batches that have none: an earlier version made them."""
    without = batches.c.id.not_in(select(leases.c.batch_id))
    for batch_id in connection.execute(
        select(batches.c.id).where(batches.c.status.in_(_OPEN), without)
    ).scalars():
        add_lease(connection, batch_id)


def lock_lease(connection: Connection, batch_id: str) -> None:
    """Wait for a write of the holder, whoever it is. Every transaction takes the lease's row first."""
    of_batch = (leases.c.batch_id == batch_id) & (leases.c.part == WHOLE)
    connection.execute(select(leases.c.token).where(of_batch).with_for_update())


def delete_lease(connection: Connection, batch_id: str) -> None:
    """Of a batch that has ended."""
    connection.execute(delete(leases).where(leases.c.batch_id == batch_id))


def database_clock(engine: Engine) -> ColumnElement[Any]:
    """Seconds since 1970 on the database's clock.

    Not the time at which the transaction began: a statement may have waited for a lock.
    """
    if is_postgresql(engine):
        return cast(extract("epoch", func.clock_timestamp()), Float)
    return (func.julianday("now") - _EPOCH_JULIAN_DAY) * _DAY_S
