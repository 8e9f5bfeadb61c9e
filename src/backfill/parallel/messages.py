"""What passes between the driver and its ranks, encoded with MessagePack.

A plan goes to all ranks as the same bytes, and each rank answers it with one report.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

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
    StepOutcome,
    StepPlan,
    WaitForCopies,
    Work,
)
from backfill.core.request import RequestId
from backfill.execution.executor import ExecutorInfo

Table: TypeAlias = tuple[BlockRef, ...]

_new_slice = partial(tuple.__new__, ScheduledSlice)


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Rank to driver, once: its part of the model is loaded."""

    info: ExecutorInfo


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """Rank to driver, in place of Loaded. The message is for the user."""

    message: str


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """Rank to driver: what it knows of a step's outcome."""

    step: int
    outcome: StepOutcome


class StepRaised(msgspec.Struct, tag=True, frozen=True):
    """Rank to driver: a step failed there."""

    step: int
    message: str


FromRank = Loaded | LoadFailed | StepDone | StepRaised


class _TableChange(msgspec.Struct, array_like=True, frozen=True):
    """A block table is what a rank knows of it up to ``num_kept`` blocks, and then ``tail``."""

    request_id: RequestId
    num_kept: int
    tail: Table


class _Slices(msgspec.Struct, array_like=True, frozen=True):
    """The slices of a step by column: faster to encode than by row. Tables are those that have changed."""

    request_ids: tuple[RequestId, ...]
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    samples: tuple[bool, ...]
    preemptible: tuple[bool, ...]
    tables: list[_TableChange]


class _Copies(msgspec.Struct, array_like=True, frozen=True):
    """BlockCopies, whose flag has no place in MessagePack."""

    checkpoint: tuple[BlockCopy, ...]
    restore: tuple[BlockCopy, ...]
    blocking: int
    slot_checkpoint: tuple[SlotCopy, ...]
    slot_restore: tuple[SlotCopy, ...]


class _Plan(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """A StepPlan. Its work is Resume with ``num_layers``, Compute with other slices, else WaitForCopies."""

    step: int
    sampled: Sequence[SampledToken]
    slices: _Slices | None
    predicted_s: float
    safepoints: Safepoints | None
    keeps_suspended: bool
    num_layers: int | None = None
    admitted: tuple[AdmittedRequest, ...] = ()
    released: tuple[RequestId, ...] = ()
    copies: _Copies | None = None
    offload_interval: int | None = None
    memory: DeviceMemory | None = None
    moves: tuple[BlockMove, ...] = ()


class PlanEncoder:
    """Encodes plans for decoders that get all of them, in the same order.

    Of a block table only the part that the decoders do not know yet is sent.
    """

    def __init__(self) -> None:
        self._tables: dict[RequestId, Table] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, plan: StepPlan, sampled: Sequence[SampledToken]) -> bytes:
        work, copies = plan.work, plan.copies
        for request_id in plan.released:
            self._tables.pop(request_id, None)
        return self._encoder.encode(
            _Plan(
                plan.step,
                sampled,
                None if isinstance(work, WaitForCopies) else self._columns(work.slices),
                plan.predicted_s,
                plan.safepoints,
                not isinstance(work, Resume) and work.keeps_suspended,
                work.num_layers if isinstance(work, Resume) else None,
                plan.admitted,
                plan.released,
                _Copies(
                    copies.checkpoint,
                    copies.restore,
                    copies.blocking.value,
                    copies.slot_checkpoint,
                    copies.slot_restore,
                )
                if copies or copies.blocking
                else None,
                plan.offload_interval,
                plan.memory,
                plan.moves,
            )
        )

    def _columns(self, slices: tuple[ScheduledSlice, ...]) -> _Slices:
        if not slices:
            return _Slices((), (), (), (), (), [])
        request_ids, starts, num_tokens, tables, samples, preemptible = zip(*slices, strict=True)
        known, changes = self._tables, []
        for request_id, table in zip(request_ids, tables, strict=True):
            before = known.get(request_id, ())
            if before is not table:  # a table that is as before is the same tuple
                num_kept = len(before) if table[: len(before)] == before else 0
                changes.append(_TableChange(request_id, num_kept, table[num_kept:]))
                known[request_id] = table
        return _Slices(request_ids, starts, num_tokens, samples, preemptible, changes)


class PlanDecoder:
    """Decodes what a ``PlanEncoder`` has encoded, all of it and in the same order."""

    def __init__(self) -> None:
        self._tables: dict[RequestId, Table] = {}
        self._decoder: msgspec.msgpack.Decoder[_Plan] = msgspec.msgpack.Decoder(_Plan)

    def decode(self, data: bytes) -> tuple[StepPlan, Sequence[SampledToken]]:
        """The plan, and the tokens that were sampled in steps before it."""
        wire = self._decoder.decode(data)
        for request_id in wire.released:
            self._tables.pop(request_id, None)
        copies: dict[str, Any] = {}
        if wire.copies is not None:
            found = wire.copies
            blocking = CopyDirections(found.blocking)
            copies["copies"] = BlockCopies(
                found.checkpoint, found.restore, blocking, found.slot_checkpoint, found.slot_restore
            )
        plan = StepPlan(
            wire.step,
            self._work(wire),
            wire.admitted,
            wire.released,
            offload_interval=wire.offload_interval,
            memory=wire.memory,
            moves=wire.moves,
            **copies,
        )
        return plan, wire.sampled

    def _work(self, wire: _Plan) -> Work:
        if wire.slices is None:
            return WaitForCopies(wire.keeps_suspended)
        slices = self._rows(wire.slices)
        if wire.num_layers is None:
            return Compute(slices, wire.predicted_s, wire.safepoints, wire.keeps_suspended)
        assert wire.safepoints is not None
        return Resume(slices, wire.num_layers, wire.predicted_s, wire.safepoints)

    def _rows(self, columns: _Slices) -> tuple[ScheduledSlice, ...]:
        tables = self._tables
        for request_id, num_kept, tail in map(msgspec.structs.astuple, columns.tables):
            tables[request_id] = tables[request_id][:num_kept] + tail if num_kept else tail
        return tuple(
            map(
                _new_slice,
                zip(
                    columns.request_ids,
                    columns.starts,
                    columns.num_tokens,
                    map(tables.get, columns.request_ids),
                    columns.samples,
                    columns.preemptible,
                    strict=True,
                ),
            )
        )
