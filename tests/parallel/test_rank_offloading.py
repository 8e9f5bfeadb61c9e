"""Ranks that stream the weights of their shards, or have micro-batches: tokens are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import Compute, DeviceMemory, ScheduledSlice, StepPlan
from backfill.core.request import ServiceClass
from backfill.engine import engine as engine_module
from backfill.engine.engine import Engine
from backfill.execution import torch_executor
from backfill.execution.micro_batches import split_step
from backfill.offloading.interval import num_device_layers, offloaded_layers
from tests.builders import make_profile
from tests.engine.interruptions import (
    OFFLINE_SHAPES,
    all_requests,
    any_interleaving,
    before_layers,
    drain,
    requests,
    run_disturbed,
    tokens_of,
    undisturbed,
)
from tests.engine.test_memory_division_tokens import ENOUGH, LEAST, make_erratic
from tests.engine.test_restored_tokens import HOST, create_executor, serve_on
from tests.execution.tiny import cache_fixture, model_fixture
from tests.parallel.rank_threads import RankThreads, Sizes, load_tiny, tokens_of_one_rank
from tests.parallel.test_rank_pipeline import ADMITTED, scheduled
from tests.parallel.test_rank_stops import LAYOUTS, make_engine

NUM_LAYERS = 12
LARGEST = 3  # whose memory has room for all smaller intervals too


cache = cache_fixture("module")
model_dir = model_fixture("llama-biased", num_hidden_layers=NUM_LAYERS)  # only rank 0 has output biases


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[int]]:
    return tokens_of_one_rank(model_dir)


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def ranks(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[RankThreads]:
    load = load_tiny(model_dir, num_blocks=36, offload_interval=LARGEST, num_micro_batches=2)
    threads = RankThreads(request.param, load)
    yield threads
    threads.close()


def taking_turns(intervals: list[int]) -> Callable[[StepPlan], StepPlan]:
    following = cycle(intervals)
    return lambda plan: replace(plan, offload_interval=next(following))


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("interval", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_each_rank_streams_its_shard_of_its_own_layers(
    model_dir: Path, expected: dict[str, list[int]], sizes: Sizes, interval: int
) -> None:
    ranks = RankThreads(sizes, load_tiny(model_dir, offload_interval=interval))
    try:
        ranks.run(StepPlan(0, Compute((scheduled("online-a", 0, 17),)), ADMITTED))
        for start in (17, 18):  # layers that were there at the start were not transferred for the first
            ranks.run(StepPlan(start, Compute((scheduled("online-a", start, 1),))))
        for rank, outcome in zip(ranks.ranks, ranks.outcomes, strict=True):
            streamer, num_layers = rank.streamer, len(rank._stage.layers)
            assert streamer is not None
            assert outcome is not None
            assert streamer.num_buffers == num_device_layers(num_layers, interval) < num_layers
            num_bytes = len(offloaded_layers(num_layers, interval)) * streamer.layer_bytes
            assert outcome.weight_transfers.num_bytes == num_bytes
        ids = tuple(each.request_id for each in ADMITTED)
        ranks.run(StepPlan(20, Compute(()), released=ids))
        assert undisturbed(ranks, all_requests()) == expected
    finally:
        ranks.close()


def test_the_ranks_shards_are_in_files_of_their_own(model_dir: Path, tmp_path: Path) -> None:
    sizes = Sizes(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path))
        written: list[dict[str, int]] = []
        for _ in range(2):
            RankThreads(sizes, load_tiny(model_dir, offload_interval=1)).close()
            written.append({path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.layers")})
    assert written[0] == written[1]  # the second start has found its files
    parts = sorted(name[name.index("part") :].rpartition("-")[0] for name in written[0])
    assert parts == [f"part{part}of2-layers{layers}" for part in (1, 2) for layers in ("0to5", "6to11")]


def resizable(model_dir: Path, sizes: Sizes, **changes: Any) -> RankThreads:
    """Ranks whose interval may change from 3 to 1."""
    load = load_tiny(model_dir, offload_interval=LARGEST, min_offload_interval=1, **changes)
    return RankThreads(sizes, load)


@pytest.mark.parametrize(
    "sizes", [Sizes(tensor=2), pytest.param(Sizes(pipeline=2), marks=pytest.mark.slow)], ids=str
)
def test_all_ranks_divide_their_memory_anew(
    model_dir: Path, expected: dict[str, list[int]], sizes: Sizes
) -> None:
    ranks = resizable(model_dir, sizes, scheduler=SchedulerConfig(policy="slo"))
    try:
        info = ranks.info
        few, most = info.residencies[0], info.residencies[-1]
        assert most.num_blocks == info.num_blocks
        num_saved = 8 // sizes.pipeline  # layers' worth of weights, on each rank
        freed = [(num_saved * each.streamer.layer_bytes, each) for each in ranks.ranks if each.streamer]
        added = min(num_bytes // rank.info.block_bytes for num_bytes, rank in freed)
        assert few.num_blocks == most.num_blocks + added > most.num_blocks + 50
        for step, each in enumerate((few, most)):
            memory = DeviceMemory(each.num_blocks, each.interval)
            ranks.run(StepPlan(step, Compute(()), offload_interval=each.interval, memory=memory))
            for rank in ranks.ranks:
                assert rank.streamer is not None
                assert rank.streamer.num_buffers == num_device_layers(len(rank._stage.layers), each.interval)
                assert len(rank._kv_pool) == rank.info.residencies[0].num_blocks >= few.num_blocks
                rank._kv_pool[: each.num_blocks].fill_(1.0)
            assert undisturbed(ranks, all_requests()) == expected
    finally:
        ranks.close()


@pytest.mark.slow
def test_tokens_are_the_same_while_memory_changes_hands_on_ranks(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preemptions, KV copies, shared blocks, micro-batches and stops; residencies are random."""
    plain = SchedulerConfig(prefix_caching=False)
    alone = create_executor(model_dir, ENOUGH, plain)
    served, _ = serve_on(Engine(plain, alone, VirtualClock(), make_profile()), alone)
    wanted = [request.output_token_ids for request in served]
    config = SchedulerConfig(policy="slo", checkpointing="adaptive", kv_layout="bidirectional")
    ranks = resizable(
        model_dir, Sizes(2, 2), num_blocks=LEAST, num_host_blocks=HOST, scheduler=config, num_micro_batches=2
    )
    plans: list[StepPlan] = []
    try:
        for rank in ranks.ranks:
            rank._kv_pool[:LEAST].fill_(float("nan"))  # beyond the pool's end there are weights

        def stopped_by_turns(plan: StepPlan) -> StepPlan:
            plans.append(plan)
            if plan.step % 2 == 0:
                ranks.request_stop(plan.step)
            return plan

        ranks.change = stopped_by_turns
        monkeypatch.setattr(engine_module, "ResidencyPolicy", partial(make_erratic, 0))
        engine = Engine(config, ranks, VirtualClock(), make_profile())
        served, num_stopped = serve_on(engine, ranks)
    finally:
        ranks.close()
    assert [request.output_token_ids for request in served] == wanted
    assert num_stopped > 1
    assert sum(len(plan.moves) for plan in plans) > 3
    assert sum(plan.memory is not None for plan in plans) > 5
    assert engine.scheduler.counters[ServiceClass.OFFLINE].num_preemptions > 0


@pytest.mark.slow
@any_interleaving(6, 12, NUM_LAYERS, intervals=st.lists(st.integers(1, LARGEST), min_size=1, max_size=5))
def test_no_interleaving_of_stops_and_intervals_changes_a_token(
    ranks: RankThreads,
    expected: dict[str, list[int]],
    intervals: list[int],
    arrivals: dict[tuple[int, int], int],
    options: dict[str, Any],
) -> None:
    ranks.change = taking_turns(intervals)
    assert tokens_of(run_disturbed(make_engine(ranks, **options), ranks, arrivals)) == expected


@pytest.mark.parametrize("failing_rank", [0, 3])
def test_after_a_step_that_failed_layers_are_where_they_are_needed(
    ranks: RankThreads, expected: dict[str, list[int]], failing_rank: int
) -> None:
    failing_rank %= len(ranks.ranks)
    middle = ranks.ranks[failing_rank]._stage.layers[3]
    ranks.change = taking_turns([1, 3, 2])
    engine = make_engine(ranks)
    offline = requests(ServiceClass.OFFLINE, OFFLINE_SHAPES)
    for request in offline:
        engine.add(request)

    def fail(rank: int, step: int, before: int) -> None:
        if (rank, step, before) == (failing_rank, 0, middle):
            raise ZeroDivisionError

    before_layers(ranks, fail)
    engine.step()
    assert isinstance(ranks.errors[failing_rank], ZeroDivisionError)
    drain(engine, ranks)
    before_layers(ranks, None)
    outputs = tokens_of(offline)
    assert outputs == {name: tokens for name, tokens in expected.items() if name in outputs}


def test_rows_of_both_micro_batches_reach_the_next_stage(
    ranks: RankThreads, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes beside chunks of prompts."""
    numbers: list[int] = []

    def counting(slices: Sequence[ScheduledSlice], most: int) -> tuple[tuple[ScheduledSlice, ...], ...]:
        parts = split_step(slices, most)
        numbers.append(len(parts))
        return parts

    monkeypatch.setattr(torch_executor, "split_step", counting)
    ranks.change = taking_turns([1])
    engine = Engine(SchedulerConfig(max_num_batched_tokens=20, max_num_seqs=8), ranks, VirtualClock())
    wanted = requests(ServiceClass.OFFLINE, OFFLINE_SHAPES)
    for request in wanted:
        engine.add(request)
    drain(engine, ranks)
    assert numbers.count(2) >= len(ranks.ranks)
    assert all(expected[each.request_id] == each.output_token_ids for each in wanted)
