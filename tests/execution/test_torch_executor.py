"""KV that leaves the device and comes back beside the steps: blocks, and slots of a shared block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from backfill.core.block import BlockCopy, BlockRef, SlotCopy, pack_block_ref
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    CopyDirections,
    Resume,
    Safepoints,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WaitForCopies,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.create import create_torch_executor
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.llama import LlamaModel
from tests.execution.tiny import Gate, two_tier_config

BOTH = CopyDirections.CHECKPOINT | CopyDirections.RESTORE
EMPTY = StepPlan(step=0, work=Compute(slices=()))
WAIT = StepPlan(step=0, work=WaitForCopies())

FRONT, BACK, OTHER = RequestId("front"), RequestId("back"), RequestId("other")
PROMPTS = {
    request_id: tuple(torch.randint(3, 90, (num,), generator=torch.Generator().manual_seed(num)).tolist())
    for request_id, num in ((FRONT, 29), (BACK, 4), (OTHER, 3))
}
NEW_TOKENS = {FRONT: 20, BACK: 3, OTHER: 1}
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

    def generate(self, request_id: RequestId, blocks: Sequence[BlockRef], until: int | None = None) -> None:
        """All tokens that are left, or until there are so many."""
        while len(self.tokens[request_id]) < (until or NEW_TOKENS[request_id]):
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


def await_copies(run: Run, outcome: StepOutcome, *expected: BlockCopy | SlotCopy) -> None:
    """Copies that are reported by this outcome, and by those of steps that wait for more."""
    reported = [*outcome.completed_copies, *outcome.completed_slot_copies]
    while len(reported) < len(expected):
        outcome = run.run(WAIT)
        reported += [*outcome.completed_copies, *outcome.completed_slot_copies]
    assert tuple(reported) == expected


@pytest.mark.parametrize("blocking", [CopyDirections.NONE, BOTH])
def test_a_request_goes_on_where_its_kv_was_restored(
    executor: TorchExecutor, undisturbed: dict[RequestId, list[int]], blocking: CopyDirections
) -> None:
    executor._kv_pool.fill_(7.0)
    run = Run(executor)
    blocks, others, hosts = (3, 4, 5, 6, 7), (17, 2, 4, 20, 9), (11, 0, 5, 2, 7)
    saves = tuple(map(BlockCopy, blocks, hosts))
    refs = [pack_block_ref(block) for block in blocks]
    run.admit(FRONT)
    run.compute(FRONT, refs, 0, 29)
    # The three full blocks are copied beside the decodes, the partly filled ones at the end.
    outcome = run.compute(FRONT, refs, 29, 1, BlockCopies(checkpoint=saves[:3], blocking=blocking))
    assert outcome.completed_copies == () or not blocking
    run.generate(FRONT, refs, until=8)
    outcome = run.run(replace(EMPTY, copies=BlockCopies(checkpoint=saves[3:], blocking=BOTH)))
    assert outcome.completed_copies == () or not blocking
    executor._kv_pool.fill_(float("nan"))
    restores = tuple(map(BlockCopy, others, hosts))
    outcome = run.run(replace(EMPTY, copies=BlockCopies(restore=restores, blocking=blocking)))
    await_copies(run, outcome, *(() if blocking else restores))
    run.generate(FRONT, [pack_block_ref(block) for block in (*others, 12, 13)])
    assert run.tokens[FRONT] == undisturbed[FRONT]
    run.run(replace(EMPTY, released=(FRONT,)))


def test_every_outcome_reports_and_a_failed_step_has_begun_its_copies(executor: TorchExecutor) -> None:
    run, saves = Run(executor), tuple(map(BlockCopy, range(3), range(3)))
    unknown = ScheduledSlice(RequestId("unknown"), 0, 1, (pack_block_ref(8),), samples=True)
    with pytest.raises(KeyError):
        run.run(replace(EMPTY, work=Compute((unknown,)), copies=BlockCopies(checkpoint=saves)))
    await_copies(run, run.run(EMPTY), *saves)
    assert run.run(WAIT).completed_copies == ()


def test_an_executor_that_awaits_a_copy_waits_a_bounded_time(executor: TorchExecutor, gate: Gate) -> None:
    run, saves = Run(executor), (BlockCopy(0, 0),)
    assert run.run(replace(WAIT, copies=BlockCopies(checkpoint=saves))).completed_copies == ()
    gate.let(1)
    await_copies(run, run.run(EMPTY), *saves)


def test_two_requests_share_a_block_and_the_first_one_goes_on_after_the_second(
    executor: TorchExecutor, undisturbed: dict[RequestId, list[int]], gate: Gate
) -> None:
    executor._kv_pool.fill_(float("nan"))
    run = Run(executor)
    front = [pack_block_ref(block) for block in (3, 4, 5, SHARED, 7, 8)]
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
    await_copies(run, run.run(WAIT), saved)
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
    await_copies(run, run.run(WAIT), saved)
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
    front = [pack_block_ref(block) for block in (3, 4, 5, SHARED, 7, 8)]
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


@pytest.mark.parametrize("heeds_stops", [True, False])
@pytest.mark.parametrize("apart", [1, 2, 3, 4])
def test_layers_run_in_one_call_up_to_a_safepoint(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, apart: int, heeds_stops: bool
) -> None:
    """A step that is asked to stop does so at the next one, and goes on to the same token.

    Where the call itself heeds the stop, it passes safepoints.
    """
    monkeypatch.setattr(LlamaModel, "heeds_stops", heeds_stops)
    executor = create_torch_executor(two_tier_config(model_dir))
    num_layers, run_layers = executor.info.num_layers, executor._model.run_layers
    safepoints = [*range(0, num_layers, apart), num_layers]
    blocks = tuple(pack_block_ref(index) for index in range(4))
    whole = ScheduledSlice(FRONT, 0, len(PROMPTS[FRONT]), blocks, samples=True, stoppable=True)
    request = AdmittedRequest(FRONT, PROMPTS[FRONT], SamplingParams(max_tokens=1, temperature=0.0))
    calls: list[range] = []
    step, asked = 0, -1

    def running(layers: range, *arguments: Any) -> Any:
        nonlocal asked
        calls.append(layers)
        if asked in layers:
            executor.request_stop(step)
            asked = -1
        return run_layers(layers, *arguments)

    monkeypatch.setattr(executor._model, "run_layers", running)
    (expected,) = executor.run(StepPlan(step, Compute((whole,)), (request,))).sampled
    assert calls == [range(num_layers)]
    points = Safepoints(apart, suspends=True)
    for asked in range(num_layers):
        step += 1
        calls.clear()
        stop = next(each for each in safepoints if each > (0 if heeds_stops else asked))
        outcome = executor.run(
            StepPlan(step, Compute((whole,), safepoints=points), (request,), released=(FRONT,))
        )
        up_to_safepoints = [range(*pair) for pair in pairwise(safepoints) if pair[1] <= stop]
        assert calls == ([range(num_layers)] if heeds_stops else up_to_safepoints)
        if stop < num_layers:
            assert (outcome.suspended, outcome.layers_done) == ((FRONT,), stop)
            step += 1
            outcome = executor.run(StepPlan(step, Resume((whole,), num_layers - stop, 0.0, points)))
        assert outcome.sampled == (expected,)
