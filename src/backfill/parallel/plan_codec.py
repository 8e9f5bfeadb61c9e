"""Plans as MessagePack: the same bytes for all ranks, and nothing twice that they know already.

Encoder and decoder remember the block tables of requests and the slices of the last steps. Of a table only
its new end is sent. In most steps the same requests decode one more token each, as they did in the last step
or, with several steps in flight, a few steps ago: then of the slices only their starts are. A rank makes the
slices of such a step ahead, while it has nothing else to do (``PlanDecoder.prepare``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count, repeat
from operator import add, is_, is_not
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
    ScheduledSlice,
    StepPlan,
    WaitForCopies,
    Work,
)
from backfill.core.request import RequestId

Table: TypeAlias = Sequence[BlockRef]
Slices: TypeAlias = tuple[ScheduledSlice, ...]

_NUM_RECENT = 8  # steps; with more in flight, plans are larger


class Sampled(NamedTuple):
    """Tokens, and the requests that they belong to."""

    request_ids: tuple[RequestId, ...] = ()
    token_ids: tuple[int, ...] = ()


class _Columns(NamedTuple):
    """The slices of a step by column."""

    request_ids: tuple[RequestId, ...] = ()
    starts: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    tables: tuple[Table, ...] = ()
    samples: tuple[bool, ...] = ()
    preemptible: tuple[bool, ...] = ()


@dataclass(slots=True)
class _Step:
    """Slices of a step, and on a rank perhaps those of the step that follows if its requests go on."""

    columns: _Columns
    ahead: tuple[_Columns, Slices] | None = None


class _Recent:
    """The last steps that had slices.

    Attributes:
        steps: the latest first, and one for each set of requests.
        has_tables: the tables of the latest are what the ranks know.
    """

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.has_tables = False

    def find(self, request_ids: Sequence[RequestId]) -> int | None:
        """The place of the step with these requests, in this order."""
        for place, step in enumerate(self.steps):
            if step.columns.request_ids == request_ids:
                return place
        return None

    def add(self, columns: _Columns, base: int | None) -> None:
        """Add the latest step, in place of the one with the same requests."""
        if base is not None:
            del self.steps[base]
        self.steps = [_Step(columns), *self.steps[: _NUM_RECENT - 1]]
        self.has_tables = True


class _TableChange(NamedTuple):
    """Blocks of the request of slice ``row``, which ``extend`` its table or replace it."""

    row: int
    extend: bool
    blocks: Table


class _Slices(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """Columns that are None are as in an earlier step.

    Attributes:
        base: that step's place in ``_Recent``; None if all columns are here.
    """

    base: int | None
    starts: tuple[int, ...] = ()
    tables: tuple[_TableChange, ...] = ()
    num_tokens: tuple[int, ...] | None = None
    samples: tuple[bool, ...] | None = None
    preemptible: tuple[bool, ...] | None = None
    request_ids: tuple[RequestId, ...] | None = None

    @property
    def repeats(self) -> bool:
        """All but starts and tables is as in the earlier step."""
        return self.base is not None and self.num_tokens is self.samples is self.preemptible is None


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
        sampled_ids: whose they are, or the place in ``_Recent`` of a step with the same requests.
    """

    step: int
    token_ids: tuple[int, ...]
    sampled_ids: tuple[RequestId, ...] | int
    slices: _Slices | None
    predicted_s: float
    safepoints: Safepoints | None = None
    num_layers: int | None = None
    admitted: tuple[AdmittedRequest, ...] = ()
    released: tuple[RequestId, ...] = ()
    copies: _Copies | None = None
    offload_interval: int | None = None
    memory: DeviceMemory | None = None
    moves: tuple[BlockMove, ...] = ()
    dropped: tuple[RequestId, ...] = ()


class PlanEncoder:
    """Encodes plans for decoders that get all of them, in the same order."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._tables: dict[RequestId, Table] = {}
        self._recent = _Recent()
        self._columns = _Columns()  # of the last plan

    def encode(self, plan: StepPlan, sampled: Sampled) -> bytes:
        """``sampled``: in steps before it, and not sent yet."""
        work, copies = plan.work, plan.copies
        for request_id in plan.released:
            self._recent.has_tables = False
            self._tables.pop(request_id, None)
        place = self._recent.find(sampled.request_ids)
        self._columns = _Columns()
        return self._encoder.encode(
            _Plan(
                plan.step,
                sampled.token_ids,
                sampled.request_ids if place is None else place,
                None if isinstance(work, WaitForCopies) else self._slices(work.slices),
                plan.predicted_s,
                plan.safepoints,
                work.num_layers if isinstance(work, Resume) else None,
                plan.admitted,
                plan.released,
                _encoded_copies(copies) if copies or copies.blocking else None,
                plan.offload_interval,
                plan.memory,
                plan.moves,
                plan.dropped,
            )
        )

    def sampling_ids(self) -> tuple[RequestId, ...]:
        """Requests of the last plan whose slices sample, in its order."""
        return tuple(compress(self._columns.request_ids, self._columns.samples))

    def _slices(self, slices: Slices) -> _Slices:
        recent, columns = self._recent, _Columns(*zip(*slices, strict=True))
        self._columns = columns
        if not slices:
            return _Slices(None)
        base = recent.find(columns.request_ids)
        changes = self._changed_tables(columns, base)
        last = _Columns() if base is None else recent.steps[base].columns
        recent.add(columns, base)
        return _Slices(
            base,
            columns.starts,
            changes,
            None if columns.num_tokens == last.num_tokens else columns.num_tokens,
            None if columns.samples == last.samples else columns.samples,
            None if columns.preemptible == last.preemptible else columns.preemptible,
            None if base is not None else columns.request_ids,
        )

    def _changed_tables(self, columns: _Columns, base: int | None) -> tuple[_TableChange, ...]:
        request_ids, tables, known = columns.request_ids, columns.tables, self._tables
        as_last = base == 0 and self._recent.has_tables
        before_of = self._recent.steps[0].columns.tables if as_last else map(known.get, request_ids)
        changes = []
        # A table that has not changed is the same object.
        for row in compress(count(), map(is_not, tables, before_of)):
            request_id, table = request_ids[row], tables[row]
            before = known.get(request_id)
            if before is not None and table[: len(before)] == before:
                changes.append(_TableChange(row, True, table[len(before) :]))
            else:
                changes.append(_TableChange(row, False, table))
            known[request_id] = table
        return tuple(changes)


class PlanDecoder:
    """Decodes what a ``PlanEncoder`` has encoded, all of it and in the same order."""

    def __init__(self) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Plan] = msgspec.msgpack.Decoder(_Plan)
        self._tables: dict[RequestId, list[BlockRef]] = {}
        self._recent = _Recent()

    def decode(self, data: bytes) -> tuple[StepPlan, list[tuple[RequestId, int]]]:
        """The plan, and the requests and tokens that were sampled in steps before it."""
        wire = self._decoder.decode(data)
        for request_id in wire.released:
            self._recent.has_tables = False
            self._tables.pop(request_id, None)
        sampled_ids = wire.sampled_ids
        if isinstance(sampled_ids, int):
            sampled_ids = self._recent.steps[sampled_ids].columns.request_ids
        plan = StepPlan(
            wire.step,
            self._work(wire),
            wire.admitted,
            wire.released,
            BlockCopies() if wire.copies is None else _decoded_copies(wire.copies),
            wire.offload_interval,
            wire.memory,
            wire.moves,
            wire.dropped,
        )
        return plan, list(zip(sampled_ids, wire.token_ids, strict=True))

    def prepare(self) -> None:
        """Make the slices of the next step, as if it went on with the requests of the last one."""
        if self._recent.steps and self._recent.steps[0].ahead is None:
            last = self._recent.steps[0].columns
            following = last._replace(starts=tuple(map(add, last.starts, last.num_tokens)))
            self._recent.steps[0].ahead = following, _rows(following)

    def _work(self, wire: _Plan) -> Work:
        if wire.slices is None:
            return WaitForCopies()
        slices = self._slices(wire.slices)
        if wire.num_layers is None:
            return Compute(slices, wire.predicted_s, wire.safepoints)
        assert wire.safepoints is not None
        return Resume(slices, wire.num_layers, wire.predicted_s, wire.safepoints)

    def _slices(self, wire: _Slices) -> Slices:
        recent, base = self._recent, wire.base
        step = _Step(_Columns()) if base is None else recent.steps[base]
        last = step.columns
        request_ids = last.request_ids if wire.request_ids is None else wire.request_ids
        if not request_ids:
            return ()
        is_replaced = self._change_tables(request_ids, wire.tables)
        tables: tuple[Table, ...] = last.tables
        if is_replaced or base != 0 or not recent.has_tables:
            tables = tuple(map(self._tables.__getitem__, request_ids))
        if step.ahead is not None and wire.repeats:
            columns, slices = step.ahead
            has_tables = tables is columns.tables or all(map(is_, tables, columns.tables))
            if has_tables and columns.starts == wire.starts:
                recent.add(columns, base)
                return slices
        columns = _Columns(
            request_ids,
            wire.starts,
            last.num_tokens if wire.num_tokens is None else wire.num_tokens,
            tables,
            last.samples if wire.samples is None else wire.samples,
            last.preemptible if wire.preemptible is None else wire.preemptible,
        )
        recent.add(columns, base)
        return _rows(columns)

    def _change_tables(self, request_ids: Sequence[RequestId], changes: Sequence[_TableChange]) -> bool:
        """Returns whether a table was replaced."""
        known, is_replaced = self._tables, False
        for row, extend, blocks in changes:
            if extend:
                # In place: to copy a long table costs more than all else here.
                known[request_ids[row]] += blocks
            else:
                known[request_ids[row]] = list(blocks)
                is_replaced = True
        return is_replaced


def _rows(columns: _Columns) -> Slices:
    return tuple(map(tuple.__new__, repeat(ScheduledSlice), zip(*columns, strict=True)))


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
