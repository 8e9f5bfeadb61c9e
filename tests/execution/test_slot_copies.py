"""Copies of slots: what they move, what they leave alone, and two requests in one block from its two ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backfill.core.block import BlockCopy, BlockRef, SlotCopy, pack_block_ref
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    CopyDirections,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WaitForCopies,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.copies import ThreadBlockCopier
from backfill.execution.create import create_torch_executor
from backfill.execution.pool_pair import CompletedCopies, CpuPools, CudaPools
from backfill.execution.torch_executor import TorchExecutor
from tests.execution.tiny import Gate, two_tier_config

BOTH = CopyDirections.CHECKPOINT | CopyDirections.RESTORE
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_BLOCKS, BLOCK_SIZE = 6, 8
SHAPE = (3, 2, 2, BLOCK_SIZE, 8)  # layers, K and V, heads, slots, head size
EMPTY = StepPlan(step=0, work=Compute(slices=()))
WAIT = StepPlan(step=0, work=WaitForCopies())


def make_pool(seed: int, device: str = "cpu") -> Tensor:
    return torch.randn((NUM_BLOCKS, *SHAPE), generator=torch.Generator().manual_seed(seed)).to(device)


def make_copier(kv_pool: Tensor, host_pool: Tensor, max_group_slots: int | None = None) -> ThreadBlockCopier:
    pools = CudaPools(kv_pool, host_pool) if kv_pool.is_cuda else CpuPools(kv_pool, host_pool)
    if max_group_slots is not None:
        pools.max_group_slots = max_group_slots
    return ThreadBlockCopier(pools)


def wait_for(copier: ThreadBlockCopier, count: int) -> CompletedCopies:
    """Take completed copies until there are so many."""
    taken = copier.take_completed()
    while len(taken.blocks) + len(taken.slots) < count:
        copier.wait(30.0)
        more = copier.take_completed()
        taken = CompletedCopies(taken.blocks + more.blocks, taken.slots + more.slots)
    return taken


@st.composite
def copies_of_one_plan(draw: st.DrawFn) -> BlockCopies:
    """Copies of whole blocks, and of slots of other blocks; blocks of a direction go to different ones."""
    directions = []
    for _ in range(2):
        pairs = list(
            zip(
                draw(st.permutations(range(NUM_BLOCKS))),
                draw(st.permutations(range(NUM_BLOCKS))),
                strict=True,
            )
        )
        num_blocks = draw(st.integers(0, 3))
        slots = []
        for device, host in pairs[num_blocks : num_blocks + draw(st.integers(0, 3))]:
            first = draw(st.integers(0, BLOCK_SIZE - 1))
            slots.append(SlotCopy(device, host, first, draw(st.integers(1, BLOCK_SIZE - first))))
        directions.append((tuple(BlockCopy(*pair) for pair in pairs[:num_blocks]), tuple(slots)))
    (checkpoint, slot_checkpoint), (restore, slot_restore) = directions
    blocking = draw(st.sampled_from([CopyDirections.NONE, *CopyDirections, BOTH]))
    return BlockCopies(checkpoint, restore, blocking, slot_checkpoint, slot_restore)


def apply(copies: BlockCopies, device: Tensor, host: Tensor) -> None:
    """What the copies mean, one after another."""
    for block in copies.checkpoint:
        host[block.host] = device[block.device]
    for each in copies.slot_checkpoint:
        at = slice(each.first, each.first + each.num)
        host[each.host, :, :, :, at] = device[each.device, :, :, :, at]
    for block in copies.restore:
        device[block.device] = host[block.host]
    for each in copies.slot_restore:
        at = slice(each.first, each.first + each.num)
        device[each.device, :, :, :, at] = host[each.host, :, :, :, at]


@pytest.mark.parametrize("device", DEVICES)
@given(plans=st.lists(copies_of_one_plan(), min_size=1, max_size=4), max_group_slots=st.integers(8, 24))
def test_copies_do_what_they_mean_in_their_order(
    device: str, plans: list[BlockCopies], max_group_slots: int
) -> None:
    pool, host_pool = make_pool(0, device), make_pool(1)
    expected, expected_host = make_pool(0), make_pool(1)
    copier = make_copier(pool, host_pool, max_group_slots)
    blocks: tuple[BlockCopy, ...] = ()
    slots: tuple[SlotCopy, ...] = ()
    for copies in plans:
        copier.begin(copies)
        apply(copies, expected, expected_host)
        if CopyDirections.CHECKPOINT not in copies.blocking:
            blocks, slots = blocks + copies.checkpoint, slots + copies.slot_checkpoint
        if CopyDirections.RESTORE not in copies.blocking:
            blocks, slots = blocks + copies.restore, slots + copies.slot_restore
    assert wait_for(copier, len(blocks) + len(slots)) == CompletedCopies(blocks, slots), "each once, in order"
    copier.begin(BlockCopies(checkpoint=(BlockCopy(0, 0),), blocking=BOTH))  # after all others
    apply(BlockCopies(checkpoint=(BlockCopy(0, 0),)), expected, expected_host)
    assert torch.equal(pool.cpu(), expected)
    assert torch.equal(host_pool, expected_host)
    assert copier.take_completed() == CompletedCopies()
    copier.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocking", [CopyDirections.CHECKPOINT, CopyDirections.RESTORE])
def test_blocking_slot_copies_are_complete_and_not_reported(device: str, blocking: CopyDirections) -> None:
    pool, host_pool = make_pool(0, device), make_pool(1)
    expected, expected_host = make_pool(0), make_pool(1)
    copier = make_copier(pool, host_pool, max_group_slots=8)
    copies = BlockCopies(
        slot_checkpoint=(SlotCopy(0, 0, 0, 5), SlotCopy(1, 1, 7, 1)),
        slot_restore=(SlotCopy(2, 2, 0, 3), SlotCopy(3, 3, 4, 4)),
        blocking=blocking,
    )
    copier.begin(copies)
    apply(copies, expected, expected_host)
    if blocking is CopyDirections.RESTORE:
        assert torch.equal(pool.cpu(), expected)
    assert torch.equal(host_pool, expected_host), "checkpoints begin first"
    reported = copies.slot_restore if blocking is CopyDirections.CHECKPOINT else copies.slot_checkpoint
    assert wait_for(copier, 2) == CompletedCopies(slots=reported)
    copier.close()


@pytest.mark.parametrize("blocking", [CopyDirections.NONE, BOTH])
@pytest.mark.parametrize(
    "wrong", [SlotCopy(0, NUM_BLOCKS, 0, 1), SlotCopy(0, 0, 4, 5), SlotCopy(-1, 0, 0, 1)]
)
@pytest.mark.parametrize("restores", [False, True])
def test_a_slot_copy_that_fails_is_raised_by_every_call_after_it(
    wrong: SlotCopy, blocking: CopyDirections, restores: bool
) -> None:
    copier = make_copier(make_pool(0), make_pool(1))
    copies = BlockCopies(slot_checkpoint=(wrong,), blocking=blocking)
    if restores:
        copies = BlockCopies(slot_restore=(wrong,), blocking=blocking)
    with pytest.raises(RuntimeError, match="between device and host memory failed") as raised:  # noqa: PT012
        copier.begin(copies)
        copier.wait(30.0)
    assert isinstance(raised.value.__cause__, ValueError)
    for call in (lambda: copier.begin(BlockCopies()), copier.take_completed, lambda: copier.wait(30.0)):
        with pytest.raises(RuntimeError, match="failed"):
            call()
    copier.close()


def test_large_plans_complete_group_by_group(gate: Gate) -> None:
    copier = make_copier(make_pool(0), make_pool(1), max_group_slots=8)
    slots = tuple(SlotCopy(block, block, 0, num) for block, num in ((0, 3), (1, 5), (2, 1), (3, 8), (4, 7)))
    copier.begin(BlockCopies(slot_checkpoint=slots))
    for completed in (slots[:2], slots[2:3], slots[3:4], slots[4:]):
        assert copier.take_completed() == CompletedCopies()
        gate.let(1)
        copier.wait(30.0)
        assert copier.take_completed() == CompletedCopies(slots=completed)
    copier.close()


FRONT, BACK, OTHER = RequestId("front"), RequestId("back"), RequestId("other")
PROMPTS = {
    request_id: tuple(torch.randint(3, 90, (num,), generator=torch.Generator().manual_seed(num)).tolist())
    for request_id, num in ((FRONT, 29), (BACK, 4), (OTHER, 3))
}
NEW_TOKENS = {FRONT: 8, BACK: 3, OTHER: 1}
SHARED = 6  # a block


class Run:
    """Requests on an executor, computed as asked for."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self.tokens: dict[RequestId, list[int]] = {}

    def admit(self, request_id: RequestId) -> None:
        sampling = SamplingParams(max_tokens=NEW_TOKENS[request_id], temperature=0.0)
        self.tokens[request_id] = []
        self.run(replace(EMPTY, admitted=(AdmittedRequest(request_id, PROMPTS[request_id], sampling),)))

    def compute(
        self,
        request_id: RequestId,
        blocks: Sequence[BlockRef],
        start: int,
        num: int,
        copies: BlockCopies | None = None,
    ) -> StepOutcome:
        known = len(PROMPTS[request_id]) + len(self.tokens[request_id])
        group = ScheduledSlice(request_id, start, num, tuple(blocks), samples=start + num == known)
        outcome = self.run(replace(EMPTY, work=Compute((group,)), copies=copies or BlockCopies()))
        self.tokens[request_id] += [sampled.token_id for sampled in outcome.sampled]
        return outcome

    def generate(self, request_id: RequestId, blocks: Sequence[BlockRef]) -> None:
        """All tokens that are left."""
        while len(self.tokens[request_id]) < NEW_TOKENS[request_id]:
            known = len(PROMPTS[request_id]) + len(self.tokens[request_id])
            self.compute(request_id, blocks, known - 1, 1)

    def run(self, plan: StepPlan) -> StepOutcome:
        return self._executor.run(plan)


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> TorchExecutor:
    return create_torch_executor(two_tier_config(model_dir))


@pytest.fixture(scope="module")
def undisturbed(executor: TorchExecutor) -> dict[RequestId, list[int]]:
    run = Run(executor)
    for request_id in (FRONT, BACK):
        run.admit(request_id)
        blocks = [pack_block_ref(block) for block in range(10, 16)]
        run.compute(request_id, blocks, 0, len(PROMPTS[request_id]))
        run.generate(request_id, blocks)
        run.run(replace(EMPTY, released=(request_id,)))
    return run.tokens


def await_slots(run: Run, *expected: SlotCopy) -> None:
    reported: tuple[SlotCopy, ...] = ()
    while len(reported) < len(expected):
        reported += run.run(WAIT).completed_slot_copies
    assert reported == expected


def test_two_requests_share_a_block_and_the_first_one_goes_on_after_the_second(
    executor: TorchExecutor, undisturbed: dict[RequestId, list[int]], gate: Gate
) -> None:
    executor._kv_pool.fill_(float("nan"))
    run = Run(executor)
    front = [pack_block_ref(block) for block in (3, 4, 5, SHARED, 7)]
    run.admit(FRONT)
    run.compute(FRONT, front, 0, 29)  # five slots of the shared block
    assert not executor._kv_pool[SHARED, :, :, :, :5].isnan().any()
    kept = executor._kv_pool[SHARED, :, :, :, :2].clone()

    # The second request fills slots 7 to 2. Its first tokens are beside the ones that are copied.
    back = [pack_block_ref(SHARED, reverse=True)]
    run.admit(BACK)
    saved = SlotCopy(SHARED, 1, 2, 3)
    run.compute(BACK, back, 0, 3, BlockCopies(slot_checkpoint=(saved,)))
    gate.let(1)
    await_slots(run, saved)
    run.compute(BACK, back, 3, 1)
    run.generate(BACK, back)
    run.run(replace(EMPTY, released=(BACK,)))
    assert run.tokens[BACK] == undisturbed[BACK]
    assert torch.equal(executor._kv_pool[SHARED, :, :, :, :2], kept)

    # A third one takes the second one's place in the slots above, while the first one's come back.
    run.admit(OTHER)
    run.compute(OTHER, [pack_block_ref(SHARED, reverse=True)], 0, 3, BlockCopies(slot_restore=(saved,)))
    written = executor._kv_pool[SHARED, :, :, :, 5:].clone()
    gate.let(1)
    await_slots(run, saved)
    assert torch.equal(executor._kv_pool[SHARED, :, :, :, :2], kept)
    assert torch.equal(executor._kv_pool[SHARED, :, :, :, 5:], written)
    run.run(replace(EMPTY, released=(OTHER,)))
    run.generate(FRONT, front)
    assert run.tokens[FRONT] == undisturbed[FRONT]
    run.run(replace(EMPTY, released=(FRONT,)))


def test_a_step_waits_for_blocking_slot_copies(
    executor: TorchExecutor, undisturbed: dict[RequestId, list[int]]
) -> None:
    executor._kv_pool.fill_(float("nan"))
    run = Run(executor)
    front = [pack_block_ref(block) for block in (3, 4, 5, SHARED, 7)]
    back = [pack_block_ref(SHARED, reverse=True)]
    run.admit(FRONT)
    run.compute(FRONT, front, 0, 29)
    run.admit(BACK)
    saved = (SlotCopy(SHARED, 1, 2, 2), SlotCopy(SHARED, 1, 4, 1))
    outcome = run.compute(BACK, back, 0, 4, BlockCopies(slot_checkpoint=saved, blocking=BOTH))
    assert outcome.completed_slot_copies == ()
    run.generate(BACK, back)
    assert run.tokens[BACK] == undisturbed[BACK]
    outcome = run.compute(FRONT, front, 29, 1, BlockCopies(slot_restore=saved, blocking=BOTH))
    assert outcome.completed_slot_copies == ()
    run.generate(FRONT, front)
    assert run.tokens[FRONT] == undisturbed[FRONT]
    assert run.run(EMPTY).completed_slot_copies == ()
    run.run(replace(EMPTY, released=(FRONT, BACK)))
