"""Steps of several ranks that are stopped, suspended and resumed, or that fail: no token changes."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backfill.core.config import PreemptionMode
from backfill.core.request import ServiceClass
from backfill.engine.engine import Engine
from backfill.execution.collectives import PeerFailed
from tests.engine.interruptions import (
    OFFLINE_SHAPES,
    any_interleaving,
    before_layers,
    drain,
    requests,
    run_disturbed,
    stopping_engine,
    tokens_of,
)
from tests.execution.tiny import model_fixture
from tests.integrity import check_scheduler
from tests.parallel.rank_threads import RankThreads, Sizes, load_tiny, tokens_of_one_rank

NUM_LAYERS = 4
LAYOUTS = [
    Sizes(2, 2),
    *(pytest.param(each, marks=pytest.mark.slow) for each in (Sizes(tensor=2), Sizes(pipeline=2))),
]


model_dir = model_fixture("llama", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def ranks(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[RankThreads]:
    threads = RankThreads(request.param, load_tiny(model_dir, num_blocks=36))
    yield threads
    threads.close()


def make_engine(ranks: RankThreads, **options: Any) -> Engine:
    words = ranks.state.stops._words
    words[:] = memoryview(bytes(words.nbytes)).cast("q")  # the engine before counted its steps from 0 too
    return stopping_engine(ranks, **options)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[int]]:
    return tokens_of_one_rank(model_dir)


@pytest.mark.parametrize(
    ("layer", "preemption"), [*((layer, "suspend") for layer in range(NUM_LAYERS + 1)), (1, "discard")]
)
def test_an_arrival_at_any_point_of_a_step_changes_no_token(
    ranks: RankThreads, expected: dict[str, list[int]], layer: int, preemption: PreemptionMode
) -> None:
    engine = make_engine(ranks, preemption=preemption)
    arrivals = {(step, layer): step - 1 for step in (1, 2, 3)}
    assert tokens_of(run_disturbed(engine, ranks, arrivals)) == expected
    if layer == 0 and preemption == "suspend":
        assert engine.num_stopped_steps > 0


@any_interleaving(10, 20, NUM_LAYERS)
def test_any_interleaving_yields_the_undisturbed_tokens(
    ranks: RankThreads,
    expected: dict[str, list[int]],
    arrivals: dict[tuple[int, int], int],
    options: dict[str, Any],
) -> None:
    assert tokens_of(run_disturbed(make_engine(ranks, **options), ranks, arrivals)) == expected


@pytest.mark.parametrize(("failing_rank", "layer"), [(0, 0), (1, 2), (2, 2), (3, 0)])  # of two ranks too
def test_a_step_that_fails_on_one_rank_fails_on_those_that_need_it_and_the_next_step_runs(
    ranks: RankThreads, expected: dict[str, list[int]], failing_rank: int, layer: int
) -> None:
    failing_rank %= len(ranks.ranks)
    layers = ranks.ranks[failing_rank]._stage.layers
    layer = layers[layer % len(layers)]
    engine = make_engine(ranks)
    offline = requests(ServiceClass.OFFLINE, OFFLINE_SHAPES)
    for request in offline:
        engine.add(request)
    errors: list[list[Exception | None]] = []

    def fail(rank: int, step: int, before: int) -> None:
        if (rank, step, before) == (failing_rank, 0, layer):
            raise ZeroDivisionError

    before_layers(ranks, fail)
    while engine.has_unfinished:
        engine.step()
        check_scheduler(engine.scheduler)
        errors.append(ranks.errors)
    before_layers(ranks, None)
    kinds = [type(error) for error in errors[0]]
    size = ranks.ranks[0]._stage.shard.group.size
    stage = failing_rank // size
    assert kinds[failing_rank] is ZeroDivisionError
    needing = set(range(stage * size, len(kinds))) - {failing_rank}
    assert all(kinds[rank] is PeerFailed for rank in needing)
    assert not any(error for later in errors[1:] for error in later)
    outputs = tokens_of(offline)
    assert outputs == {name: tokens for name, tokens in expected.items() if name in outputs}
    drain(engine, ranks)


def test_ranks_stop_after_the_same_layer_whenever_they_are_asked(
    ranks: RankThreads, expected: dict[str, list[int]]
) -> None:
    """A thread asks each step to stop, at any moment of it."""
    steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    rng = random.Random(0)

    def ask() -> None:
        while (step := steps.get()) is not None:
            time.sleep(rng.uniform(0.0, 0.004))
            ranks.request_stop(step)

    asking = threading.Thread(target=ask)
    asking.start()
    ranks.change = lambda plan: steps.put(plan.step) or plan  # type: ignore[func-returns-value]
    size, num_stopped = ranks.ranks[0]._stage.shard.group.size, 0
    try:
        engine, offline = make_engine(ranks), requests(ServiceClass.OFFLINE, OFFLINE_SHAPES)
        for request in offline:
            engine.add(request)
        while engine.has_unfinished:
            engine.step()
            outcomes = [each for each in ranks.outcomes if each is not None]
            for first in range(0, len(outcomes), size):
                of_stage = outcomes[first : first + size]
                assert len({(each.layers_done, each.stopped) for each in of_stage}) == 1
            num_stopped += bool(outcomes[-size].stopped)
        outputs = tokens_of(offline)
        assert outputs == {name: tokens for name, tokens in expected.items() if name in outputs}
        drain(engine, ranks)
    finally:
        steps.put(None)
        asking.join()
        ranks.change = lambda plan: plan
    assert num_stopped > 0
