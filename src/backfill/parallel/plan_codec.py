"""Plans as MessagePack: the same bytes for all ranks, and nothing twice that they know already.

Encoder and decoder remember the block tables of requests, of which only new ends are sent, and which requests
the last steps had: most steps have the requests of the last one or, with several steps in flight, of one
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count, repeat
from operator import is_not
from typing import NamedTuple, TypeAlias

import msgspec

from backfill.core.block import BlockMove, BlockRef
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
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

_NO_COPIES = BlockCopies()
_NUM_RECENT = 8  # steps; with more in flight, plans are larger


class BadMessage(Exception):
    """The other end has sent what it never sends."""


class Sampled(NamedTuple):
    """Tokens, and the requests that they belong to."""

    request_ids: tuple[RequestId, ...] = ()
    token_ids: tuple[int, ...] = ()


class _RecentRequests:
    """Those of the last steps, in the order of their slices; the latest first, and each set of them once."""

    def __init__(self) -> None:
        self._recent: list[tuple[RequestId, ...]] = []

    def find(self, request_ids: tuple[RequestId, ...]) -> int | None:
        """The index of a step with these requests."""
        return self._recent.index(request_ids) if request_ids in self._recent else None

    def at(self, index: int) -> tuple[RequestId, ...]:
        return self._recent[index]

    def add(self, request_ids: tuple[RequestId, ...], index: int | None) -> None:
        """Add those of the latest step. ``index``: what ``find`` has returned for them."""
        if index is not None:
            del self._recent[index]
        self._recent = [request_ids, *self._recent[: _NUM_RECENT - 1]]


class _TableChange(NamedTuple):
    """Blocks of the request of slice ``row``, which ``extend`` its table or replace it."""

    row: int
    extend: bool
    blocks: Table


class _Slices(msgspec.Struct, array_like=True, frozen=True):
    """The slices of a step by column.

    Attributes:
        request_ids: or the index in ``_RecentRequests`` of a step with the same ones.
        tables: those that are not what the ranks know.
    """

    request_ids: tuple[RequestId, ...] | int
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    tables: tuple[_TableChange, ...]
    samples: tuple[bool, ...]
    stoppable: tuple[bool, ...]


class _Plan(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """A StepPlan: if it ``waits`` its work is WaitForCopies, with ``num_layers`` Resume, else Compute.

    Attributes:
        token_ids: sampled in steps before it.
        sampled_ids: whose they are, or the index in ``_RecentRequests`` of a step with the same ones.
    """

    step: int
    token_ids: tuple[int, ...]
    sampled_ids: tuple[RequestId, ...] | int
    slices: _Slices | None
    predicted_s: float
    safepoints: Safepoints | None = None
    waits: bool = False
    num_layers: int | None = None
    admitted: tuple[AdmittedRequest, ...] = ()
    released: tuple[RequestId, ...] = ()
    copies: BlockCopies | None = None
    offload_interval: int | None = None
    memory: DeviceMemory | None = None
    moves: tuple[BlockMove, ...] = ()
    dropped: tuple[RequestId, ...] = ()
    bus_share: float | None = None


class PlanEncoder:
    """Encodes plans for decoders that get all of them, in the same order."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._tables: dict[RequestId, Table] = {}
        self._recent = _RecentRequests()

    def encode(self, plan: StepPlan, sampled: Sampled) -> bytes:
        """``sampled``: in steps before it, and not sent yet."""
        work = plan.work
        for request_id in plan.released:
            self._tables.pop(request_id, None)
        index = self._recent.find(sampled.request_ids)
        return self._encoder.encode(
            _Plan(
                plan.step,
                sampled.token_ids,
                sampled.request_ids if index is None else index,
                self._slices(plan.slices) if plan.slices else None,
                plan.predicted_s,
                plan.safepoints,
                isinstance(work, WaitForCopies),
                work.num_layers if isinstance(work, Resume) else None,
                plan.admitted,
                plan.released,
                plan.copies if plan.copies != _NO_COPIES else None,
                plan.offload_interval,
                plan.memory,
                plan.moves,
                plan.dropped,
                plan.bus_share,
            )
        )

    def _slices(self, slices: Slices) -> _Slices:
        request_ids, starts, num_tokens, tables, samples, stoppable = zip(*slices, strict=True)
        index = self._recent.find(request_ids)
        self._recent.add(request_ids, index)
        return _Slices(
            request_ids if index is None else index,
            starts,
            num_tokens,
            self._changed_tables(request_ids, tables),
            samples,
            stoppable,
        )

    def _changed_tables(
        self, request_ids: tuple[RequestId, ...], tables: tuple[Table, ...]
    ) -> tuple[_TableChange, ...]:
        known, changes = self._tables, []
        # A table that has not changed is the same object.
        for row in compress(count(), map(is_not, tables, map(known.get, request_ids))):
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
        self._recent = _RecentRequests()

    def decode(self, data: bytes) -> tuple[StepPlan, list[tuple[RequestId, int]]]:
        """The plan, and the requests and tokens that were sampled in steps before it.

        Raises: BadMessage; what follows cannot be decoded either.
        """
        try:
            return self._decoded(data)
        except (msgspec.MsgspecError, ArithmeticError, LookupError, RecursionError, ValueError) as error:
            raise BadMessage(f"this is no plan: {error!r}") from error

    def _decoded(self, data: bytes) -> tuple[StepPlan, list[tuple[RequestId, int]]]:
        wire = self._decoder.decode(data)
        for request_id in wire.released:
            self._tables.pop(request_id, None)
        sampled_ids, _ = self._requests(wire.sampled_ids)
        plan = StepPlan(
            wire.step,
            self._work(wire),
            wire.admitted,
            wire.released,
            _NO_COPIES if wire.copies is None else wire.copies,
            wire.offload_interval,
            wire.memory,
            wire.moves,
            wire.dropped,
            wire.bus_share,
        )
        return plan, list(zip(sampled_ids, wire.token_ids, strict=True))

    def _requests(self, wire: tuple[RequestId, ...] | int) -> tuple[tuple[RequestId, ...], int | None]:
        """The requests, and the index where they were found."""
        return (self._recent.at(wire), wire) if isinstance(wire, int) else (wire, None)

    def _work(self, wire: _Plan) -> Work:
        if wire.waits:
            return WaitForCopies()
        slices = () if wire.slices is None else self._slices(wire.slices)
        if wire.num_layers is None:
            return Compute(slices, wire.predicted_s, wire.safepoints)
        if wire.safepoints is None:
            raise ValueError("what resumes has no safepoints")
        return Resume(slices, wire.num_layers, wire.predicted_s, wire.safepoints)

    def _slices(self, wire: _Slices) -> Slices:
        request_ids, index = self._requests(wire.request_ids)
        self._recent.add(request_ids, index)
        known = self._tables
        for row, extend, blocks in wire.tables:
            if extend:
                # In place: to copy a long table costs more than all else here.
                known[request_ids[row]] += blocks
            else:
                known[request_ids[row]] = list(blocks)
        tables = map(known.__getitem__, request_ids)
        rows = zip(
            request_ids, wire.starts, wire.num_tokens, tables, wire.samples, wire.stoppable, strict=True
        )
        return tuple(map(tuple.__new__, repeat(ScheduledSlice), rows))
