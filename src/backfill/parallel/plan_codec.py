"""Plans as MessagePack: the same bytes for all ranks, and nothing twice that they know already.

Encoder and decoder remember the block tables of requests and the slices of the last step. Of a table only its
new end is sent. In most steps the same requests decode one more token each: then of the slices only their
starts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec

from backfill.core.block import BlockCopy, BlockMove, BlockRef, SlotCopy
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    CopyDirections,
    DeviceMemory,
    Resume,
    Safepoints,
    SampledToken,
    ScheduledSlice,
    StepPlan,
    WaitForCopies,
    Work,
)
from backfill.core.request import RequestId

Table: TypeAlias = Sequence[BlockRef]

_new_slice = partial(tuple.__new__, ScheduledSlice)


class _Columns(NamedTuple):
    """The slices of a step by column."""

    request_ids: tuple[RequestId, ...] = ()
    starts: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    tables: tuple[Table, ...] = ()
    samples: tuple[bool, ...] = ()
    preemptible: tuple[bool, ...] = ()


class _TableChange(NamedTuple):
    """Blocks of a request, which ``extend`` its table or replace it."""

    request_id: RequestId
    extend: bool
    blocks: Table


class _Slices(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """Columns that are None are as in the last step."""

    starts: tuple[int, ...]
    tables: tuple[_TableChange, ...] = ()
    num_tokens: tuple[int, ...] | None = None
    samples: tuple[bool, ...] | None = None
    preemptible: tuple[bool, ...] | None = None
    request_ids: tuple[RequestId, ...] | None = None


class _Copies(msgspec.Struct, array_like=True, frozen=True):
    """BlockCopies, with a number for its flag."""

    checkpoint: tuple[BlockCopy, ...]
    restore: tuple[BlockCopy, ...]
    blocking: int
    slot_checkpoint: tuple[SlotCopy, ...]
    slot_restore: tuple[SlotCopy, ...]


class _Plan(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """A StepPlan: with ``num_layers`` its work is Resume, without slices WaitForCopies, else Compute.

    Attributes:
        token_ids: sampled in steps before it.
        sampled_ids: whose they are; None if they are the requests of the last step that had slices.
    """

    step: int
    token_ids: tuple[int, ...]
    sampled_ids: tuple[RequestId, ...] | None
    slices: _Slices | None
    predicted_s: float
    safepoints: Safepoints | None = None
    keeps_suspended: bool = False
    num_layers: int | None = None
    admitted: tuple[AdmittedRequest, ...] = ()
    released: tuple[RequestId, ...] = ()
    copies: _Copies | None = None
    offload_interval: int | None = None
    memory: DeviceMemory | None = None
    moves: tuple[BlockMove, ...] = ()


class PlanEncoder:
    """Encodes plans for decoders that get all of them, in the same order."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._tables: dict[RequestId, Table] = {}
        self._last = _Columns()

    def encode(self, plan: StepPlan, sampled: Sequence[SampledToken]) -> bytes:
        """``sampled``: tokens of steps before it that are not sent yet. Their log probabilities are not."""
        work, copies = plan.work, plan.copies
        if plan.released:
            self._last = self._last._replace(tables=())  # some of them are not known any more
            for request_id in plan.released:
                self._tables.pop(request_id, None)
        sampled_ids, token_ids, _ = zip(*sampled, strict=True) if sampled else ((), (), ())
        return self._encoder.encode(
            _Plan(
                plan.step,
                token_ids,
                None if sampled_ids == self._last.request_ids else sampled_ids,
                None if isinstance(work, WaitForCopies) else self._slices(work.slices),
                plan.predicted_s,
                plan.safepoints,
                not isinstance(work, Resume) and work.keeps_suspended,
                work.num_layers if isinstance(work, Resume) else None,
                plan.admitted,
                plan.released,
                _encoded_copies(copies) if copies or copies.blocking else None,
                plan.offload_interval,
                plan.memory,
                plan.moves,
            )
        )

    def _slices(self, slices: tuple[ScheduledSlice, ...]) -> _Slices:
        last, columns = self._last, _Columns(*zip(*slices, strict=True))
        self._last = columns
        changes = self._changed_tables(columns, last)
        return _Slices(
            columns.starts,
            changes,
            None if columns.num_tokens == last.num_tokens else columns.num_tokens,
            None if columns.samples == last.samples else columns.samples,
            None if columns.preemptible == last.preemptible else columns.preemptible,
            None if columns.request_ids == last.request_ids else columns.request_ids,
        )

    def _changed_tables(self, columns: _Columns, last: _Columns) -> tuple[_TableChange, ...]:
        request_ids, known, changes = columns.request_ids, self._tables, []
        is_as_before = last.tables and request_ids == last.request_ids
        before_of = last.tables if is_as_before else map(known.get, request_ids)
        for request_id, table, before in zip(request_ids, columns.tables, before_of, strict=True):
            if before is table:  # a table that has not changed is the same object
                continue
            extend = before is not None and table[: len(before)] == before
            new_blocks = table[len(before) :] if before is not None and extend else table
            changes.append(_TableChange(request_id, extend, new_blocks))
            known[request_id] = table
        return tuple(changes)


class PlanDecoder:
    """Decodes what a ``PlanEncoder`` has encoded, all of it and in the same order."""

    def __init__(self) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Plan] = msgspec.msgpack.Decoder(_Plan)
        self._tables: dict[RequestId, list[BlockRef]] = {}
        self._last = _Columns()

    def decode(self, data: bytes) -> tuple[StepPlan, list[tuple[RequestId, int]]]:
        """The plan, and the requests and tokens that were sampled in steps before it."""
        wire = self._decoder.decode(data)
        if wire.released:
            self._last = self._last._replace(tables=())
            for request_id in wire.released:
                self._tables.pop(request_id, None)
        sampled_ids = self._last.request_ids if wire.sampled_ids is None else wire.sampled_ids
        plan = StepPlan(
            wire.step,
            self._work(wire),
            wire.admitted,
            wire.released,
            BlockCopies() if wire.copies is None else _decoded_copies(wire.copies),
            wire.offload_interval,
            wire.memory,
            wire.moves,
        )
        return plan, list(zip(sampled_ids, wire.token_ids, strict=True))

    def _work(self, wire: _Plan) -> Work:
        if wire.slices is None:
            return WaitForCopies(wire.keeps_suspended)
        slices = self._rows(wire.slices)
        if wire.num_layers is None:
            return Compute(slices, wire.predicted_s, wire.safepoints, wire.keeps_suspended)
        assert wire.safepoints is not None
        return Resume(slices, wire.num_layers, wire.predicted_s, wire.safepoints)

    def _rows(self, wire: _Slices) -> tuple[ScheduledSlice, ...]:
        last, known = self._last, self._tables
        request_ids = last.request_ids if wire.request_ids is None else wire.request_ids
        is_as_before = bool(last.tables) and wire.request_ids is None
        for request_id, extend, blocks in wire.tables:
            if extend:
                known[request_id] += blocks  # in place: copying a long table costs more than all else here
            else:
                known[request_id] = list(blocks)
                is_as_before = False
        columns = self._last = _Columns(
            request_ids,
            wire.starts,
            last.num_tokens if wire.num_tokens is None else wire.num_tokens,
            last.tables if is_as_before else tuple(map(known.__getitem__, request_ids)),
            last.samples if wire.samples is None else wire.samples,
            last.preemptible if wire.preemptible is None else wire.preemptible,
        )
        return tuple(map(_new_slice, zip(*columns, strict=True)))


def _encoded_copies(copies: BlockCopies) -> _Copies:
    return _Copies(
        copies.checkpoint,
        copies.restore,
        copies.blocking.value,
        copies.slot_checkpoint,
        copies.slot_restore,
    )


def _decoded_copies(wire: _Copies) -> BlockCopies:
    return BlockCopies(
        wire.checkpoint,
        wire.restore,
        CopyDirections(wire.blocking),
        wire.slot_checkpoint,
        wire.slot_restore,
    )
