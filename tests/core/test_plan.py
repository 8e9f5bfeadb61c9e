from __future__ import annotations

import pytest

from backfill.core.block import BlockCopy, pack_block_ref
from backfill.core.plan import (
    BlockCopies,
    Compute,
    CopyDirections,
    Resume,
    Safepoints,
    ScheduledSlice,
    StepPlan,
    WaitForCopies,
    Work,
)
from backfill.core.request import RequestId

BLOCKS = tuple(pack_block_ref(index) for index in range(5))
SLICES = (
    ScheduledSlice(RequestId("chat"), start=8, num_tokens=1, blocks=BLOCKS[:3], samples=True),
    ScheduledSlice(
        RequestId("job"), start=0, num_tokens=6, blocks=BLOCKS[3:], samples=False, preemptible=True
    ),
)
POINTS = Safepoints(2, suspends=True)
COPY = BlockCopy(0, 0)
CHECKPOINT, RESTORE = CopyDirections.CHECKPOINT, CopyDirections.RESTORE


@pytest.mark.parametrize("work", [Compute(SLICES, 0.5, POINTS), Resume(SLICES, 3, 0.5, POINTS)])
def test_a_plan_shows_what_its_work_computes(work: Work) -> None:
    plan = StepPlan(0, work)
    assert (plan.slices, plan.predicted_s, plan.safepoints) == (SLICES, 0.5, POINTS)
    assert plan.num_tokens == 7


def test_a_plan_that_waits_for_copies_computes_nothing() -> None:
    plan = StepPlan(0, WaitForCopies())
    assert (plan.slices, plan.predicted_s, plan.safepoints, plan.num_tokens) == ((), 0.0, None, 0)


@pytest.mark.parametrize(
    ("copies", "stalls"),
    [
        (BlockCopies(), False),
        (BlockCopies(blocking=CHECKPOINT | RESTORE), False),
        (BlockCopies((COPY,), (COPY,)), False),
        (BlockCopies((COPY,), (), RESTORE), False),
        (BlockCopies((), (COPY,), CHECKPOINT), False),
        (BlockCopies((COPY,), (), CHECKPOINT), True),
        (BlockCopies((), (COPY,), RESTORE), True),
    ],
)
def test_slices_wait_for_copies_of_a_blocking_direction_only(copies: BlockCopies, stalls: bool) -> None:
    assert copies.stalls is stalls


@pytest.mark.parametrize(
    ("plan", "does_nothing"),
    [
        (StepPlan(0, Compute(())), True),
        (StepPlan(0, Compute(()), dropped=(RequestId("preempted"),)), False),
        (StepPlan(0, Compute(SLICES)), False),
        (StepPlan(0, Resume(SLICES, 3, 0.5, POINTS)), False),
        (StepPlan(0, WaitForCopies()), False),
        (StepPlan(0, Compute(()), released=(RequestId("ended"),)), False),
        (StepPlan(0, Compute(()), copies=BlockCopies(checkpoint=(COPY,), blocking=CHECKPOINT)), False),
        (StepPlan(0, Compute(()), copies=BlockCopies(restore=(COPY,), blocking=RESTORE)), False),
    ],
)
def test_a_plan_that_begins_copies_or_releases_does_something(plan: StepPlan, does_nothing: bool) -> None:
    assert plan.does_nothing is does_nothing
