"""Ranks on a bus: transfers are held to it, plans take interval and share to all, and no token changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest

from backfill.bus.file import BusFile, BusReservations, BusUse
from backfill.bus.member import BusMember, OffloadedModel
from backfill.bus.throttle import ROUND_BYTES, BusTransfers
from backfill.core.block import BlockCopy
from backfill.core.clock import VirtualClock
from backfill.core.config import GIB, SchedulerConfig
from backfill.core.plan import BlockCopies, Compute, CopyDirections, StepPlan
from backfill.engine.engine import Engine
from backfill.engine.process import load_engine
from backfill.execution.offloading import LayerStreamer
from backfill.parallel.executor import ParallelExecutor
from tests.builders import make_request
from tests.engine.interruptions import all_requests, tokens_of, undisturbed
from tests.execution.tiny import cache_fixture, model_fixture, tiny_config
from tests.parallel.processes import wait_ended
from tests.parallel.rank_threads import RankThreads, Sizes, load_tiny, tokens_of_one_rank
from tests.parallel.test_rank_stops import LAYOUTS

NUM_LAYERS = 12
GIB_PER_S = 0.5


cache = cache_fixture("module")
model_dir = model_fixture("llama", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[int]]:
    return tokens_of_one_rank(model_dir)


@pytest.fixture
def engine_file(tmp_path: Path) -> Iterator[BusFile]:
    """The place of the ranks' engine on their bus."""
    file = BusFile(tmp_path / "bus", GIB_PER_S * GIB)
    yield file
    file.close()


def on_bus(model_dir: Path, tmp_path: Path, sizes: Sizes, interval: int, **changes: Any) -> RankThreads:
    bus = {"offload_bus": str(tmp_path / "bus"), "offload_bus_gib_per_s": GIB_PER_S}
    return RankThreads(sizes, load_tiny(model_dir, offload_interval=interval, **bus, **changes))


def streamers(ranks: RankThreads) -> list[LayerStreamer]:
    found = [each.streamer for each in ranks.ranks]
    return [each for each in found if each is not None]


def buses(ranks: RankThreads) -> list[BusTransfers]:
    found = [each._bus for each in streamers(ranks)]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_all_that_ranks_transfer_is_reserved_on_the_bus(
    model_dir: Path,
    tmp_path: Path,
    engine_file: BusFile,
    expected: dict[str, list[int]],
    sizes: Sizes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserved = Counter[BusReservations]()
    reserve = BusReservations.reserve

    def counting(file: BusReservations, num_bytes: int, follows_s: float | None = None) -> float:
        reserved[file] += num_bytes
        return reserve(file, num_bytes, follows_s)

    monkeypatch.setattr(BusReservations, "reserve", counting)
    ranks = on_bus(model_dir, tmp_path, sizes, 2, num_host_blocks=8)
    assert engine_file.uses() == [BusUse()], "ranks are no engines"
    try:
        assert undisturbed(ranks, all_requests()) == expected
        copies = BlockCopies(checkpoint=(BlockCopy(3, 5),), blocking=CopyDirections.CHECKPOINT)
        ranks.run(StepPlan(10_000, Compute(()), copies=copies))
        transfers = [each.weight_transfers for each in ranks.outcomes if each is not None]
        assert sum(each.copied_bytes for each in transfers) == ranks.info.block_bytes
        assert len(reserved) == len(buses(ranks)) == len(ranks.ranks)
    finally:
        ranks.close()
    layer_bytes = [each.layer_bytes for each in streamers(ranks)]
    for bus, num_bytes, of_layer in zip(buses(ranks), reserved.values(), layer_bytes, strict=True):
        assert bus.weights.num_bytes > 10 * of_layer
        assert bus.weights.num_bytes % of_layer == 0
        assert bus.weights.num_bytes + bus.copies.num_bytes == num_bytes


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_plans_give_all_ranks_the_interval_and_the_share_of_their_engine(
    model_dir: Path, tmp_path: Path, engine_file: BusFile, expected: dict[str, list[int]], sizes: Sizes
) -> None:
    """Two layers of a stage are offloaded at first, in whose memory one may be: less is transferred."""
    first = NUM_LAYERS // sizes.pipeline // 2
    ranks = on_bus(model_dir, tmp_path, sizes, first)
    clock, info = VirtualClock(), ranks.info
    model = OffloadedModel(info.layers_of_stages, info.layer_bytes, first)
    engine = Engine(SchedulerConfig(), ranks, clock, bus=BusMember(engine_file, model, clock))
    other = BusFile(tmp_path / "bus", GIB_PER_S * GIB)
    shares = []

    def chunks() -> set[int]:
        return {each.weights._chunk_bytes for each in buses(ranks)}

    try:
        requests = all_requests()
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
            clock.advance(0.2)
            if len(shares) == 2:
                instance = engine_file.uses()[0].instance
                assert instance is not None
                other.publish(BusUse(replace(instance, name=other.name)))
            if share := engine.stats().bus_share:
                shares.append(share)
                if len(shares) == 2:
                    assert chunks() == {ROUND_BYTES // len(ranks.ranks)}
        assert {each._buffers.interval for each in streamers(ranks)} == {first + 1}
        assert engine.stats().offload_interval == first + 1
        assert 0.1 < shares[-1] < 0.9
        (chunk,) = chunks()
        assert chunk == pytest.approx(shares[-1] * ROUND_BYTES / len(ranks.ranks), abs=PAGESIZE)
        assert tokens_of(requests) == expected
    finally:
        ranks.close()
        other.close()


@pytest.mark.slow  # of threads in the tests above; other processes in test_process_tokens.py
def test_an_engine_of_processes_is_one_member_of_its_bus(model_dir: Path, tmp_path: Path) -> None:
    other = BusFile(tmp_path / "bus", 0.02 * GIB)  # so little that every transfer has to wait
    scheduler = SchedulerConfig(policy="fcfs", prefix_caching=False, tpot_slo=0.5)
    config = tiny_config(model_dir, scheduler=scheduler)
    shared = replace(
        config,
        threads=2,
        tensor_parallel_size=2,
        offload_interval=2,
        offload_bus=str(tmp_path / "bus"),
        offload_bus_gib_per_s=0.02,
    )
    shared.validate()

    def generate(engine: Engine) -> list[int]:
        request = make_request(prompt_token_ids=range(5, 25), max_tokens=12, ignore_eos=True)
        engine.add(request)
        while engine.has_work:
            engine.step()
            if request.finish_reason is None:
                uses.append(other.uses())
        return request.output_token_ids

    uses: list[list[BusUse]] = []
    wanted = generate(load_engine(config))
    uses.clear()
    engine = load_engine(shared)
    executor = engine.executor
    assert isinstance(executor, ParallelExecutor)
    try:
        assert generate(engine) == wanted
        stats = engine.stats()
        assert stats.offload_interval == 2
        assert stats.bus_wait_s > 0.0
        assert 0.0 < stats.bus_load < 1.0
        for own, member in uses:
            assert own == BusUse()
            assert member.instance is not None
            assert member.instance.layer_bytes == executor.info.layer_bytes
        assert other.uses() == [BusUse(), BusUse()], "it is idle"
    finally:
        executor.close()
        other.close()
    wait_ended(executor.pids)
