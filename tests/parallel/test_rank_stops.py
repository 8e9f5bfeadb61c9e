"""Steps of several ranks that are stopped, suspended and resumed, or that fail: no token changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.config import PreemptionMode, SchedulerConfig
from backfill.core.request import Request, ServiceClass
from backfill.engine.engine import Engine
from backfill.execution.collectives import PeerFailed
from tests.builders import linear_cost, make_profile
from tests.engine.interruptions import (
    OFFLINE_SHAPES,
    Interruptions,
    drain,
    requests,
    tokens_of,
    undisturbed,
)
from tests.models.tiny import save_tiny_model
from tests.parallel.arrivals import run_arrivals
from tests.parallel.rank_threads import RankThreads, Sizes, load_tiny

NUM_LAYERS = 4
LAYOUTS = [Sizes(tensor=2), Sizes(pipeline=2), Sizes(2, 2)]
ONLINE_SHAPES = [(13, 5), (4, 7)]
PROFILE = make_profile(linear_cost(token_s=0.002, step_s=0.02))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder, num_hidden_layers=NUM_LAYERS)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def ranks(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[RankThreads]:
    threads = RankThreads(request.param, load_tiny(model_dir, request.param, num_blocks=36))
    yield threads
    threads.close()


def before_layers(ranks: RankThreads, callback: Callable[[int, int, int], None] | None) -> None:
    """``callback`` is called with rank, step and layer before each layer on each rank."""
    for number, rank in enumerate(ranks.ranks):
        model: Any = rank._model
        assert isinstance(model, Interruptions)
        if callback is None:
            model.before_layer = lambda layer: None
        else:
            model.before_layer = lambda layer, number=number, rank=rank: callback(
                number, rank._stage.step, layer
            )


def make_engine(ranks: RankThreads, preemption: PreemptionMode = "suspend", **limits: Any) -> Engine:
    config = SchedulerConfig(
        policy="slo",
        preemption=preemption,
        max_stop_s=1e-9,  # a safepoint before every layer
        ttft_slo=0.5,
        tpot_slo=0.3,
        **limits,
    )
    words = ranks.state.stops._words
    words[:] = memoryview(bytes(words.nbytes)).cast("q")  # the engine before counted its steps from 0 too
    return Engine(config, ranks, VirtualClock(), PROFILE)


def all_requests() -> list[Request]:
    return requests(ServiceClass.OFFLINE, OFFLINE_SHAPES) + requests(ServiceClass.ONLINE, ONLINE_SHAPES)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[int]]:
    """Tokens of one rank with all layers, undisturbed."""
    ranks = RankThreads(Sizes(), load_tiny(model_dir, Sizes()))
    tokens = undisturbed(ranks, all_requests())
    ranks.close()
    return tokens


def run_disturbed(
    ranks: RankThreads, arrivals: dict[tuple[int, int], int], engine: Engine
) -> dict[str, list[int]]:
    """Online request ``number`` arrives in the step and before the layer that ``arrivals`` maps to it."""
    offline = requests(ServiceClass.OFFLINE, OFFLINE_SHAPES)
    online = requests(ServiceClass.ONLINE, ONLINE_SHAPES)
    for request in offline:
        engine.add(request)
    arrived: set[int] = set()
    size = ranks.ranks[0]._stage.shard.group.size

    def arrive(rank: int, step: int, layer: int) -> None:
        number = arrivals.get((step, layer))
        if rank % size == 0 and number is not None and number not in arrived:
            arrived.add(number)
            engine.arrive(online[number])

    before_layers(ranks, arrive)
    for _ in range(40):
        engine.step()
        engine.scheduler.check_integrity()
    before_layers(ranks, None)
    for number, request in enumerate(online):
        if number not in arrived:
            engine.arrive(request)
    drain(engine, ranks)
    return tokens_of([*offline, *online])


@pytest.mark.parametrize("preemption", ["suspend", "discard"])
@pytest.mark.parametrize("layer", range(NUM_LAYERS + 1))
def test_an_arrival_at_any_point_of_a_step_changes_no_token(
    ranks: RankThreads, expected: dict[str, list[int]], layer: int, preemption: PreemptionMode
) -> None:
    engine = make_engine(ranks, preemption)
    assert run_disturbed(ranks, {(step, layer): step - 1 for step in (1, 2)}, engine) == expected
    if layer == 0 and preemption == "suspend":
        assert engine.num_stopped_steps > 0


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    places=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, NUM_LAYERS)), min_size=2, max_size=2, unique=True
    ),
    preemption=st.sampled_from(["suspend", "discard"]),
    max_num_batched_tokens=st.sampled_from([20, 64]),
    prefix_caching=st.booleans(),
)
def test_any_interleaving_yields_the_undisturbed_tokens(
    ranks: RankThreads,
    expected: dict[str, list[int]],
    places: list[tuple[int, int]],
    preemption: PreemptionMode,
    max_num_batched_tokens: int,
    prefix_caching: bool,
) -> None:
    engine = make_engine(
        ranks,
        preemption,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=16,
        prefix_caching=prefix_caching,
    )
    arrivals = {place: number for number, place in enumerate(places)}
    assert run_disturbed(ranks, arrivals, engine) == expected


@pytest.mark.parametrize("failing_rank", range(4))
@pytest.mark.parametrize("layer", [0, 2])
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
        engine.scheduler.check_integrity()
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


@pytest.mark.parametrize("sizes", [Sizes(tensor=2), Sizes(tensor=3), Sizes(pipeline=3), Sizes(2, 2)], ids=str)
def test_ranks_stop_after_the_same_layer_at_random_arrivals(sizes: Sizes) -> None:
    found = run_arrivals(sizes, 150)
    assert sum(found.stopped.values()) + found.num_unstopped >= 150
