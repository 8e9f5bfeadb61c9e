"""The statements of leases (leases.py), built once each.

To build one takes longer than a database near by needs for its answer, and each server asks several times in
the time of a lease. Executions give values by name: ``own``, the server; ``duration_s`` of a lease; and those
that a statement's comment names.
"""

from __future__ import annotations

import functools
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Float,
    Select,
    Subquery,
    Update,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    not_,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.orm import aliased

from backfill.jobs.records import OPEN_STATUSES, WHOLE, BatchRecord, BatchStatus, LeasedPart, ReadyServer

LEASED = (LeasedPart.batch_id, LeasedPart.part, LeasedPart.token)


def _many(name: str) -> BindParameter[Any]:
    return bindparam(name, expanding=True)


def _is_running() -> ColumnElement[bool]:
    """``running``: rows of ``LEASED``."""
    return tuple_(*LEASED).in_(_many("running"))


def _released() -> Update:
    return update(LeasedPart).values(holder=None, expires_at=0.0)


_OWN = bindparam("own", type_=LeasedPart.holder.type)
_IS_OWN = LeasedPart.holder == _OWN
_OF_BATCH = LeasedPart.batch_id == bindparam("of_batch")
_OF_LINES = _OF_BATCH & (LeasedPart.part != WHOLE)
_OF_PARTS = _OF_BATCH & LeasedPart.part.in_(_many("parts"))


class LeaseStatements:
    """``now_s``: the database's clock in seconds, evaluated anew in each statement."""

    def __init__(self, now_s: ColumnElement[float]) -> None:
        self._now_s = now_s
        end_s = now_s + bindparam("duration_s", type_=Float)
        is_own_server = ReadyServer.holder == _OWN
        self.claimable = functools.cache(self._claimable)
        self.free_parts = functools.cache(self._free_parts)
        self.now = select(now_s)
        is_ended = ReadyServer.expires_at <= now_s
        # The lines of a batch that have not ended, and those of them that this server runs. of_batch, running
        own_lines = case((_IS_OWN & _is_running(), LeasedPart.num_lines), else_=0)
        self.lines_of_batch = select(func.sum(LeasedPart.num_lines), func.sum(own_lines)).where(_OF_LINES)
        # of_batch
        self.claimed = select(BatchRecord, now_s).where(BatchRecord.id == bindparam("of_batch"))
        self.drop_lines = delete(LeasedPart).where(_OF_LINES)
        # of_batch, parts, new_token
        taken = {"holder": _OWN, "token": bindparam("new_token"), "expires_at": end_s}
        self.take = update(LeasedPart).where(_OF_PARTS).values(taken)
        # running
        renewal = update(LeasedPart).where(_IS_OWN, _is_running())
        self.renew = renewal.values(expires_at=end_s).returning(*LEASED)
        # batches
        self.statuses = select(BatchRecord.id, BatchRecord.status).where(BatchRecord.id.in_(_many("batches")))
        self.forget_ready = delete(ReadyServer).where(or_(is_own_server, is_ended))
        self.note_ready = insert(ReadyServer).values(holder=_OWN, expires_at=end_s)
        self.count_ready = select(func.count(), now_s).where(not_(is_ended))
        # of_batch, parts, of_token
        is_it = _OF_PARTS & _IS_OWN & (LeasedPart.token == bindparam("of_token"))
        self.hold = update(LeasedPart).where(is_it).values(expires_at=end_s)
        self.release = _released().where(is_it)
        self.drop = delete(LeasedPart).where(is_it)
        self.release_all = _released().where(_IS_OWN)
        self.forget = delete(ReadyServer).where(is_own_server)

    def _claimable(self, takes_over: bool, only_over: bool) -> Select[LeasedPart, str]:
        """The next row, and its owner. ``passed_over``, ``running``, ``model_names``, ``full_owners``."""
        held, other = self._lines_held(), aliased(LeasedPart)
        lines = (other.batch_id == LeasedPart.batch_id) & (other.part != WHOLE)
        runs = exists().where(lines, other.holder.is_not(None), other.expires_at > self._now_s)
        is_of_lines = LeasedPart.part != WHOLE
        is_in_progress = BatchRecord.status == BatchStatus.IN_PROGRESS
        is_over = or_(BatchRecord.status == BatchStatus.CANCELLING, BatchRecord.expires_at <= self._now_s)
        query = (
            select(LeasedPart, BatchRecord.owner)
            .join(BatchRecord, BatchRecord.id == LeasedPart.batch_id)
            .outerjoin(held, held.c.owner == BatchRecord.owner)
            .where(BatchRecord.status.in_(OPEN_STATUSES), self._is_free(takes_over))
            .where(LeasedPart.batch_id.not_in(_many("passed_over")))
            .order_by(
                func.coalesce(held.c.num_lines, 0),
                BatchRecord.expires_at,
                BatchRecord.sequence,
                LeasedPart.part,
            )
            .limit(1)
            # Servers that claim at once claim different ones.
            .with_for_update(of=LeasedPart, skip_locked=True)
        )
        if only_over:
            return query.where(is_over, not_(is_of_lines), not_(runs))
        is_of_model = or_(BatchRecord.model.is_(None), BatchRecord.model.in_(_many("model_names")))
        is_ours = or_(is_over, is_of_model & BatchRecord.owner.not_in(_many("full_owners")))
        lines_may_run = is_of_lines & is_in_progress & not_(is_over)
        is_to_end = not_(is_of_lines) & or_(not_(exists().where(lines)), is_over & not_(runs))
        return query.where(is_ours, or_(lines_may_run, is_to_end))

    def _lines_held(self) -> Subquery:
        """How many lines of each owner servers have."""
        part, batch = aliased(LeasedPart), aliased(BatchRecord)
        is_held = (part.part != WHOLE) & part.holder.is_not(None) & (part.expires_at > self._now_s)
        lines = select(batch.owner.label("owner"), func.sum(part.num_lines).label("num_lines"))
        return lines.join(part, part.batch_id == batch.id).where(is_held).group_by(batch.owner).subquery()

    def _free_parts(self, takes_over: bool) -> Select[LeasedPart]:
        """Of a batch's lines. ``of_batch``, ``running``."""
        parts = select(LeasedPart).where(_OF_LINES, self._is_free(takes_over)).order_by(LeasedPart.part)
        return parts.with_for_update(skip_locked=True)

    def _is_free(self, takes_over: bool) -> ColumnElement[bool]:
        """Of others with ``takes_over`` also where the lease has ended without a release."""
        is_free = or_(LeasedPart.holder.is_(None), _IS_OWN)
        if takes_over:
            is_free = or_(is_free, LeasedPart.expires_at <= self._now_s)
        return is_free & not_(func.coalesce(_IS_OWN & _is_running(), False))
