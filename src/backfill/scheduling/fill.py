"""The order in which most policies fill a step: decodes, then prompts in progress, then waiting requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from heapq import merge

from backfill.core.request import PriorityLevel, order_key
from backfill.scheduling.policy import NO_LIMITS, Admission, BatchBuilder, ChunkLimits, R, Snapshot


def serve(
    view: Snapshot[R],
    batch: BatchBuilder[R],
    levels: Collection[PriorityLevel],
    limits: ChunkLimits = NO_LIMITS,
    *,
    reserved_blocks: int = 0,
    may_preempt: Collection[PriorityLevel] = (),
) -> None:
    """Serve requests of these levels: those that run first, decodes before prefills, then those that wait.

    A decode costs one token, and its user is reading. It is scheduled even past the limit of the step's time
    where the limits guarantee progress. Requests wait in order: the first that does not fit ends the round.
    """
    running = in_order([view.running[level] for level in levels])
    if running:
        serve_running(batch, running, limits)
    waiting = in_order([view.waiting[level] for level in levels])
    if waiting and (may_preempt or not batch.has_preempted):
        admit(batch, waiting, limits, reserved_blocks=reserved_blocks, may_preempt=may_preempt)


def serve_running(batch: BatchBuilder[R], running: Sequence[R], limits: ChunkLimits = NO_LIMITS) -> None:
    """Add running requests, decodes first."""
    decodes, prefills = split(running)
    batch.add_decodes(decodes, math.inf if limits.guarantees_progress else limits.max_step_s)
    for request in prefills:
        if not batch.has_headroom:
            break
        batch.try_add(request, limits)


def admit(
    batch: BatchBuilder[R],
    waiting: Iterable[R],
    limits: ChunkLimits = NO_LIMITS,
    *,
    reserved_blocks: int = 0,
    may_preempt: Collection[PriorityLevel] = (),
) -> None:
    """Admit waiting requests until one does not fit."""
    for request in waiting:
        admission = batch.try_admit(request, limits, reserved_blocks=reserved_blocks, may_preempt=may_preempt)
        if admission is Admission.REFUSED:
            break


def split(requests: Sequence[R]) -> tuple[Sequence[R], Sequence[R]]:
    """(those that decode, those with more tokens to compute), in their order."""
    decodes = [request for request in requests if request.is_decoding]
    if len(decodes) == len(requests):
        return decodes, ()
    return decodes, [request for request in requests if not request.is_decoding]


def in_order(levels: Sequence[Sequence[R]]) -> Sequence[R]:
    """Requests of several levels by their order within a level."""
    some = [requests for requests in levels if requests]
    if len(some) < 2:
        return some[0] if some else ()
    return list(merge(*some, key=order_key))
