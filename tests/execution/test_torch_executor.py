"""A request's KV leaves the device and comes back; copies are reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backfill.core.block import BlockCopy, pack_block_ref
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
from backfill.execution.create import create_torch_executor
from backfill.execution.torch_executor import TorchExecutor
from tests.execution.tiny import Gate, copies, two_tier_config

BOTH = CopyDirections.CHECKPOINT | CopyDirections.RESTORE
NEW_TOKENS = 20
PROMPT = torch.randint(3, 90, (29,), generator=torch.Generator().manual_seed(1)).tolist()
REQUEST = RequestId("request")
EMPTY = StepPlan(step=0, work=Compute(slices=()))
WAIT = StepPlan(step=0, work=WaitForCopies())


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> TorchExecutor:
    return create_torch_executor(two_tier_config(model_dir))


def admission() -> StepPlan:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    return replace(EMPTY, admitted=(AdmittedRequest(REQUEST, tuple(PROMPT), sampling),))


def compute(
    executor: TorchExecutor, blocks: Sequence[int], start: int, count: int, plan: StepPlan = EMPTY
) -> tuple[int, StepOutcome]:
    refs = tuple(pack_block_ref(block) for block in blocks)
    group = ScheduledSlice(REQUEST, start, count, refs, samples=True)
    outcome = executor.run(replace(plan, work=Compute((group,))))
    return outcome.sampled[0].token_id, outcome


def generate(executor: TorchExecutor, blocks: Sequence[int], start: int, num_tokens: int) -> list[int]:
    return [compute(executor, blocks, start + index, 1)[0] for index in range(num_tokens)]


@pytest.fixture(scope="module")
def undisturbed(executor: TorchExecutor) -> list[int]:
    blocks = range(7)
    first, _ = compute(executor, blocks, 0, len(PROMPT), admission())
    tokens = [first, *generate(executor, blocks, len(PROMPT), NEW_TOKENS - 1)]
    executor.run(replace(EMPTY, released=(REQUEST,)))
    assert len(set(tokens)) > 3
    return tokens


def await_copies(executor: TorchExecutor, outcome: StepOutcome, count: int) -> list[BlockCopy]:
    """Copies reported until there are ``count``: the outcome's, then those of steps that wait for more."""
    copied = list(outcome.completed_copies)
    until_s = time.monotonic() + 30.0
    while len(copied) < count:
        assert time.monotonic() < until_s
        copied += executor.run(WAIT).completed_copies
    return copied


@pytest.mark.parametrize("blocking_copies", [CopyDirections.NONE, BOTH])
def test_a_request_goes_on_where_its_kv_was_restored(
    executor: TorchExecutor, undisturbed: list[int], blocking_copies: CopyDirections
) -> None:
    pool = executor._kv_pool
    pool.fill_(7.0)
    blocks, others, hosts = (3, 4, 5, 6, 7), (17, 2, 4, 20, 9), (11, 0, 5, 2, 7)
    first, outcome = compute(executor, blocks, 0, len(PROMPT), admission())
    # The three full blocks are copied beside the decodes, the partly filled ones at the end.
    saves = copies(list(zip(blocks, hosts, strict=True)))
    of_full = replace(EMPTY, copies=BlockCopies(checkpoint=saves[:3], blocking=blocking_copies))
    second, outcome = compute(executor, blocks, 29, 1, of_full)
    tokens = [first, second, *generate(executor, blocks, 30, 6)]
    if blocking_copies:
        assert outcome.completed_copies == ()
    of_others = replace(EMPTY, copies=BlockCopies(checkpoint=saves[3:], blocking=BOTH))
    assert executor.run(of_others).completed_copies == () or not blocking_copies
    pool.fill_(float("nan"))
    restores = copies(list(zip(others, hosts, strict=True)))
    outcome = executor.run(replace(EMPTY, copies=BlockCopies(restore=restores, blocking=blocking_copies)))
    if blocking_copies:
        assert outcome.completed_copies == ()
    else:
        reported = await_copies(executor, outcome, len(restores))
        assert set(restores) <= set(reported)
    tokens += generate(executor, (*others, 12, 13), 36, NEW_TOKENS - 8)
    assert tokens == undisturbed
    executor.run(replace(EMPTY, released=(REQUEST,)))


def test_every_outcome_reports_and_a_failed_step_has_begun_its_copies(executor: TorchExecutor) -> None:
    saves = copies([(0, 0), (1, 1), (2, 2)])
    unknown = ScheduledSlice(RequestId("unknown"), 0, 1, (pack_block_ref(8),), samples=True)
    with pytest.raises(KeyError):
        executor.run(replace(EMPTY, work=Compute((unknown,)), copies=BlockCopies(checkpoint=saves)))
    assert await_copies(executor, executor.run(EMPTY), 3) == list(saves)
    assert executor.run(WAIT).completed_copies == ()


def test_an_executor_that_awaits_a_copy_waits_a_bounded_time(executor: TorchExecutor, gate: Gate) -> None:
    saves = copies([(0, 0)])
    assert executor.run(replace(WAIT, copies=BlockCopies(checkpoint=saves))).completed_copies == ()
    gate.let(1)
    assert await_copies(executor, executor.run(EMPTY), 1) == list(saves)
