"""Plans of a pipeline with several steps in flight, one by one, and KV copies of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backfill.core.block import BlockCopy, pack_block_ref
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
    Work,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from tests.engine.interruptions import before_layers
from tests.execution.tiny import model_fixture
from tests.parallel.rank_threads import RankThreads, Sizes, load_tiny

BLOCK_SIZE = 8
NAMES = ("offline-a", "online-a", "offline-b", "online-b")
SUSPENDS = Safepoints(1, suspends=True)
HOST_BLOCKS = 12


def scheduled(name: str, start: int, count: int, first_block: int | None = None) -> ScheduledSlice:
    first = 4 * NAMES.index(name) if first_block is None else first_block
    blocks = tuple(pack_block_ref(first + each) for each in range(-(-(start + count) // BLOCK_SIZE)))
    return ScheduledSlice(RequestId(name), start, count, blocks, True, name.startswith("offline"))


def admission(number: int) -> AdmittedRequest:
    prompt = tuple(range(3 + 11 * number, 20 + 11 * number))
    return AdmittedRequest(RequestId(NAMES[number]), prompt, SamplingParams(max_tokens=8, temperature=0.0))


ADMITTED = tuple(map(admission, range(4)))
FIRST_NAMES = tuple(map(RequestId, NAMES[:2]))
FIRST, SECOND = ([scheduled(name, 0, 17) for name in names] for names in (NAMES[:2], NAMES[2:]))


def tokens(*outcomes: StepOutcome) -> dict[str, int]:
    return {each.request_id: each.token_id for outcome in outcomes for each in outcome.sampled}


model_dir = model_fixture("llama", "opt-350m", num_hidden_layers=6)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[dict[str, int]]:
    """Tokens of two steps of all requests, on one rank."""
    ranks = RankThreads(Sizes(), load_tiny(model_dir))
    first = ranks.run(StepPlan(0, Compute((*FIRST, *SECOND)), ADMITTED))
    second = ranks.run(StepPlan(1, Compute(tuple(scheduled(name, 17, 1) for name in NAMES))))
    ranks.close()
    return [tokens(first), tokens(second)]


@pytest.fixture(params=[Sizes(2, 3), pytest.param(Sizes(pipeline=3), marks=pytest.mark.slow)], ids=str)
def ranks(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[RankThreads]:
    threads = RankThreads(request.param, load_tiny(model_dir, num_host_blocks=HOST_BLOCKS))
    yield threads
    threads.close()


def where_kept(ranks: RankThreads) -> list[bool]:
    """Stages that keep suspended slices."""
    return [bool(rank._suspended) for rank in ranks.ranks[:: len(ranks.ranks) // 3]]


def test_a_step_is_suspended_while_the_one_behind_it_runs_and_resumes_at_its_layer(
    ranks: RankThreads, expected: list[dict[str, int]]
) -> None:
    ranks.request_stop(0)
    ranks.submit(StepPlan(0, Compute(tuple(FIRST), safepoints=SUSPENDS), ADMITTED[:2]))
    ranks.submit(StepPlan(1, Compute(tuple(SECOND), safepoints=SUSPENDS), ADMITTED[2:]))
    ranks.request_stop(2)  # not submitted yet
    first, second = ranks.collect(), ranks.collect()
    assert (first.suspended, first.layers_done) == (("offline-a",), 1)
    assert first.stopped_at_s is not None
    assert second.stopped == ()
    assert where_kept(ranks) == [True, False, False]
    # Into the second stage, and to its end: it then keeps what the first one kept before.
    for step, num_layers, layers_done in ((3, 2, 3), (4, 1, 4)):
        partly = ranks.run(StepPlan(step, Resume((FIRST[0],), num_layers, 0.0, SUSPENDS)))
        assert (partly.suspended, partly.layers_done, partly.sampled) == (("offline-a",), layers_done, ())
        assert where_kept(ranks) == [False, True, False]
    ranks.submit(StepPlan(5, Compute((scheduled("online-a", 17, 1),))))
    ranks.submit(StepPlan(6, Resume((FIRST[0],), 2, 0.0, SUSPENDS)))
    decoded, resumed = ranks.collect(), ranks.collect()
    assert resumed.stopped == ()
    assert tokens(first, second, resumed) == expected[0]
    rest = tuple(scheduled(name, 17, 1) for name in NAMES if name != "online-a")
    assert tokens(decoded, ranks.run(StepPlan(7, Compute(rest)))) == expected[1]


@pytest.mark.parametrize("apart", [1, 2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_stage_stops_at_its_next_safepoint(
    ranks: RankThreads, expected: list[dict[str, int]], apart: int
) -> None:
    """Two layers each, and the request comes before any of them."""
    points = Safepoints(apart, suspends=True)
    for asked in range(6):
        number = 2 * asked

        def ask(rank: int, step: int, layer: int, number: int = number, asked: int = asked) -> None:
            if (step, layer) == (number, asked):
                ranks.request_stop(number)

        before_layers(ranks, ask)
        work = Compute(tuple(FIRST), safepoints=points)
        stopped = ranks.run(StepPlan(number, work, ADMITTED[:2], released=FIRST_NAMES if asked else ()))
        before_layers(ranks, None)
        behind = asked + 1 if apart == 1 else asked // 2 * 2 + 2
        if behind == 6:
            assert stopped.stopped == ()
            continue
        assert (stopped.suspended, stopped.layers_done) == (("offline-a",), behind)
        assert where_kept(ranks).index(True) == asked // 2
        resumed = ranks.run(StepPlan(number + 1, Resume((FIRST[0],), 6 - behind, 0.0, points)))
        assert tokens(stopped, resumed).items() <= expected[0].items() and resumed.sampled
        assert not any(where_kept(ranks))


def test_chunks_of_one_prompt_pass_the_stages_one_behind_the_other(
    ranks: RankThreads, expected: list[dict[str, int]]
) -> None:
    for step, (start, count) in enumerate(((0, 6), (6, 10), (16, 1))):
        chunk = scheduled("online-a", start, count)._replace(samples=step == 2)
        ranks.submit(StepPlan(step, Compute((chunk,)), ADMITTED[1:2] if step == 0 else ()))
    assert tokens(*(ranks.collect() for _ in range(3))) == {"online-a": expected[0]["online-a"]}
    assert (
        tokens(ranks.run(StepPlan(3, Compute((scheduled("online-a", 17, 1),))))).items()
        <= expected[1].items()
    )


def test_two_steps_are_suspended_at_a_time(ranks: RankThreads, expected: list[dict[str, int]]) -> None:
    for step, slices in enumerate((FIRST, SECOND)):
        ranks.request_stop(step)
        work = Compute(tuple(slices), safepoints=SUSPENDS)
        ranks.submit(StepPlan(step, work, ADMITTED[2 * step : 2 * step + 2]))
    outcomes = [ranks.collect(), ranks.collect()]
    assert [outcome.suspended for outcome in outcomes] == [("offline-a",), ("offline-b",)]
    for step, slices in ((2, FIRST), (3, SECOND)):
        outcomes.append(ranks.run(StepPlan(step, Resume((slices[0],), 5, 0.0, SUSPENDS))))
    assert tokens(*outcomes) == expected[0]
    ranks.run(StepPlan(4, Compute(())))
    assert all(rank._suspended == {} for rank in ranks.ranks)


@pytest.mark.parametrize("drops", [False, True])
def test_discarded_and_dropped_slices_are_computed_again(
    ranks: RankThreads, expected: list[dict[str, int]], drops: bool
) -> None:
    ranks.request_stop(0)
    suspended = ranks.run(StepPlan(0, Compute(tuple(FIRST), safepoints=SUSPENDS), ADMITTED[:2]))
    assert suspended.suspended == ("offline-a",)
    ranks.request_stop(1)
    points = Safepoints(1, suspends=False)
    work = Compute(tuple(SECOND), safepoints=points)
    dropped = suspended.suspended if drops else ()
    discarded = ranks.run(StepPlan(1, work, ADMITTED[2:], dropped=dropped))
    assert (discarded.discarded, discarded.layers_done) == (("offline-b",), 1)
    assert where_kept(ranks) == [not drops, False, False]
    again: Work = Compute((FIRST[0], SECOND[0]))
    assert tokens(suspended, discarded, ranks.run(StepPlan(2, again))) == expected[0]


def test_each_rank_copies_its_part_of_a_block(ranks: RankThreads, expected: list[dict[str, int]]) -> None:
    both = CopyDirections.CHECKPOINT | CopyDirections.RESTORE
    first = ranks.run(StepPlan(0, Compute((*FIRST, *SECOND)), ADMITTED))
    saved = [(4 * number + block, 3 * number + block) for number in range(4) for block in range(3)]
    checkpoint = tuple(BlockCopy(device, host) for device, host in saved)
    completed = list(
        ranks.run(StepPlan(1, Compute(()), copies=BlockCopies(checkpoint=checkpoint))).completed_copies
    )
    for step in range(2, 5000):
        if len(completed) == len(checkpoint):
            break
        completed += ranks.run(StepPlan(step, WaitForCopies())).completed_copies
    assert set(completed) == set(checkpoint)
    for rank in ranks.ranks:
        rank._kv_pool.fill_(float("nan"))
    restore = tuple(BlockCopy(30 + host, host) for _, host in saved)
    decodes = tuple(scheduled(name, 17, 1, 30 + 3 * number) for number, name in enumerate(NAMES))
    plan = StepPlan(5000, Compute(decodes), copies=BlockCopies(restore=restore, blocking=both))
    assert [tokens(first), tokens(ranks.run(plan))] == expected
