"""Leases: of several servers on one database exactly one runs a line, and one begins and ends a batch.

A lease is rows with their holder, a fencing token and the time at which they end, on the database's clock:
the servers' clocks decide nothing. Each claim raises the token. Every write of a holder is one transaction
that begins with ``Leases.hold``, which changes the lease's rows if the token is still theirs. So a server
that was taken for dead can record nothing more, however late it wakes, and a claim waits for a write that
has begun.

An open batch has one row, its part 0, and while its lines run one for each part of them. Whoever holds part 0
checks the batch's input and divides its lines; once the parts are gone, or the batch is to end and nobody
holds one, whoever holds part 0 ends the batch.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, insert, literal, select
from sqlalchemy.orm import Session

from backfill.core.clock import Clock, WallClock
from backfill.core.errors import BackfillError
from backfill.jobs.database import database_clock, limit_waits, lock_writes
from backfill.jobs.lease_statements import LeaseStatements
from backfill.jobs.records import OPEN_STATUSES, WHOLE, BatchRecord, BatchStatus, LeasedPart
from backfill.preparation.line_file import union

_NO_LINES: Mapping[str, int] = {}
_WALL_CLOCK = WallClock()
_RENEWAL_FRAC = 0.2  # of a lease, that a renewal may wait: it is tried again before the lease ends
_MOST_SHARES = 2


class LeaseLost(BackfillError):
    """Another server runs the batch now; nothing was written."""


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
class Claim:
    """A batch that this server is to run, or lines of one. ``now_s`` is the database's Unix time."""

    batch: BatchRecord
    lease: Lease
    now_s: float


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
        clock: of this process.
    """

    def __init__(
        self,
        engine: Engine,
        holder: str,
        duration_s: float,
        now_s: ColumnElement[float] | None = None,
        clock: Clock = _WALL_CLOCK,
    ) -> None:
        self.holder = holder
        self._engine = engine
        self._duration_s = duration_s
        now_s = database_clock(engine) if now_s is None else now_s
        self._statements = _statements(now_s)
        self._own = {"own": holder, "duration_s": duration_s}
        self._clock = clock
        self._ahead_s = 0.0  # of this process's clock, as last seen

    def read_clock(self) -> None:
        """Ask the database for its time, before the first ``now``."""
        with self._engine.connect() as connection:
            self._note_time(connection.execute(self._statements.now).scalar_one())

    def now(self) -> int:
        """Unix seconds on the database's clock, which each renewal asks for."""
        return int(self._clock.now_s() + self._ahead_s)

    def _note_time(self, now_s: float) -> None:
        self._ahead_s = now_s - self._clock.now_s()

    def claim(
        self,
        *,
        only_over: bool = False,
        takes_over: bool = True,
        model_names: Collection[str] = (),
        others_than: Collection[str] = (),
        running: Collection[Lease] = (),
        num_servers: int = 1,
        max_lines: int = sys.maxsize,
        lines_of: Mapping[str, int] = _NO_LINES,
    ) -> Claim | None:
        """Claim an open batch without a holder, or lines of one.

        First of the owner of whose lines servers have the fewest, then the one whose window ends first.
        What this server holds and does not run is free to it at once: the answer to a claim was lost, or a
        release failed.

        Args:
            only_over: only one that needs no engine: it is being cancelled, or its window has ended.
            takes_over: also one whose lease has ended without a release.
            model_names: what the server's model is called. Batches of other models are claimed only to end.
            others_than: batches not to claim.
            running: leases of what this server runs.
            num_servers: that share the lines of a batch evenly.
            max_lines: about so many lines may this server have, up to twice as many where owners come later.
                Of several owners each has its share, and what the others leave of theirs.
            lines_of: of each owner, those that it has.
        """
        values = {**self._own, "running": _rows_of(running), "model_names": list(model_names)}
        passed_over = set(others_than)
        # What an owner has beyond, from when fewer servers were there, costs other owners nothing.
        num_counted = sum(min(num, max_lines) for num in lines_of.values())
        only_over = only_over or num_counted >= _MOST_SHARES * max_lines
        num_left = max_lines - sum(lines_of.values())  # an owner may have what the others leave
        share = max_lines // max(1, len(lines_of))
        values["full_owners"] = [name for name, num in lines_of.items() if num_left <= 0 and num >= share]
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            lock_writes(session.connection())
            while True:
                values["passed_over"] = list(passed_over)
                found = session.execute(self._statements.claimable(takes_over, only_over), values).first()
                if found is None:
                    return None
                first, owner = found
                parts = [first]
                if first.part != WHOLE:
                    num_owners = len({*lines_of, owner})
                    values["of_batch"] = first.batch_id
                    most = max(1, max_lines // num_owners - lines_of.get(owner, 0), num_left)
                    parts = self._share_of(session, takes_over, values, num_servers, most)
                if parts:
                    break
                passed_over.add(first.batch_id)
            lease = self._take(session.connection(), parts)
            batch, now_s = session.execute(self._statements.claimed, {"of_batch": lease.batch_id}).one()
            return Claim(batch, lease, now_s)

    def _share_of(
        self, session: Session, takes_over: bool, values: Mapping[str, Any], num_servers: int, max_lines: int
    ) -> list[LeasedPart]:
        """Free parts of a batch, until this server has its share of the lines; none where it has it."""
        num_lines, num_own = session.execute(self._statements.lines_of_batch, values).one()
        most = min(max_lines, math.ceil(num_lines / num_servers) - num_own)
        parts, num_taken = list[LeasedPart](), 0
        for part in session.scalars(self._statements.free_parts(takes_over), values).all():
            if num_taken >= most:
                break
            parts.append(part)
            num_taken += part.num_lines
        return parts

    def _take(self, connection: Connection, parts: Sequence[LeasedPart]) -> Lease:
        batch_id, token = parts[0].batch_id, 1 + max(part.token for part in parts)
        numbers = tuple(part.part for part in parts)
        values = {**self._own, "of_batch": batch_id, "parts": numbers, "new_token": token}
        connection.execute(self._statements.take, values)
        if parts[0].part == WHOLE:
            connection.execute(self._statements.drop_lines, values)
            return Lease(batch_id, token)
        lines = functools.reduce(union, (part.lines or b"" for part in parts))
        return Lease(batch_id, token, numbers, lines)

    def renew(self, held: Collection[Lease] = (), *, is_ready: bool = True) -> Renewal:
        """Renew leases, also those that have ended while nobody else claimed what they are of.

        Args:
            is_ready: lines may run on this server.
        """
        statements = self._statements
        batches = list({lease.batch_id for lease in held})
        values = {**self._own, "running": _rows_of(held), "batches": batches}
        with self._engine.begin() as connection:
            limit_waits(connection, _RENEWAL_FRAC * self._duration_s)
            lock_writes(connection)
            rows = connection.execute(statements.renew, values)
            renewed = {tuple(row) for row in rows}
            found = connection.execute(statements.statuses, values).all()
            connection.execute(statements.forget_ready, values)  # and of servers that have ended
            if is_ready:
                connection.execute(statements.note_ready, values)
            num_servers, now_s = connection.execute(statements.count_ready).one()
        self._note_time(now_s)
        kept = [
            lease
            for lease in held
            if all((lease.batch_id, part, lease.token) in renewed for part in lease.parts)
        ]
        return Renewal(kept, {row.id: row.status for row in found}, max(1, num_servers))

    def hold(self, connection: Connection, lease: Lease) -> None:
        """Renew the lease in a transaction: until its end no other server can claim what it is of.

        Raises: LeaseLost.
        """
        if connection.execute(self._statements.hold, self._values_of(lease)).rowcount != len(lease.parts):
            raise LeaseLost(f"{lease.batch_id} is run by another server now.")

    def release(self, lease: Lease) -> None:
        """Let another server claim it at once. A lease that was lost is left as it is."""
        with self._engine.begin() as connection:
            self.release_in(connection, lease)

    def release_in(self, connection: Connection, lease: Lease) -> None:
        """As ``release``, in a transaction."""
        connection.execute(self._statements.release, self._values_of(lease))

    def end_lines(self, lease: Lease) -> None:
        """Lines have ended; those that have not are for whoever ends the batch. For a lease of lines."""
        with self._engine.begin() as connection:
            connection.execute(self._statements.drop, self._values_of(lease))

    def release_all(self, holder: str | None = None) -> None:
        """As ``release``, of all that this server holds, or that one which has ended held."""
        values = {"own": holder or self.holder}
        with self._engine.begin() as connection:
            connection.execute(self._statements.release_all, values)
            connection.execute(self._statements.forget, values)

    def _values_of(self, lease: Lease) -> dict[str, Any]:
        return {**self._own, "of_batch": lease.batch_id, "parts": lease.parts, "of_token": lease.token}


def add_lease(
    connection: Connection, batch_id: str, lines: Sequence[bytes] = (b"",), first: int = WHOLE
) -> None:
    """The row of a new batch, which nobody holds; or rows of parts of its lines, from ``first`` on."""
    free = {"batch_id": batch_id, "holder": None, "token": 0, "expires_at": 0.0}
    num_lines = [int.from_bytes(bits, "little").bit_count() for bits in lines]
    parts = zip(count(first), lines, num_lines, strict=False)
    rows = [{**free, "part": part, "lines": bits, "num_lines": num} for part, bits, num in parts]
    connection.execute(insert(LeasedPart), rows)


def add_missing_leases(connection: Connection) -> None:
    """Rows of open batches that have none: a server made them of a Backfill that knew no leases."""
    names = ["batch_id", "part", "num_lines", "token", "expires_at"]
    without = BatchRecord.id.not_in(select(LeasedPart.batch_id))
    free = select(BatchRecord.id, literal(WHOLE), literal(0), literal(0), literal(0.0))
    of_open = free.where(BatchRecord.status.in_(OPEN_STATUSES), without)
    connection.execute(insert(LeasedPart).from_select(names, of_open))


def lock_lease(connection: Connection, batch_id: str) -> None:
    """Wait for a write of the holder, whoever it is. Every transaction takes the lease's row first."""
    of_batch = (LeasedPart.batch_id == batch_id) & (LeasedPart.part == WHOLE)
    connection.execute(select(LeasedPart.token).where(of_batch).with_for_update())


def _rows_of(leases: Collection[Lease]) -> list[tuple[str, int, int]]:
    return [(lease.batch_id, part, lease.token) for lease in leases for part in lease.parts]


@functools.cache
def _statements(now_s: ColumnElement[float]) -> LeaseStatements:
    return LeaseStatements(now_s)
