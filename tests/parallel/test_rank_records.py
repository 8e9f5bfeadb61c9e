"""The performance record of ranks, measured in their processes, and the interval that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.costs.copy_profiler import EMPTY_PLAN
from backfill.engine import analyzer
from backfill.engine.analyzer import analyze, record_key, saved_record
from backfill.engine.process import load_engine
from backfill.execution.layer_timing import TimedExecutor
from backfill.execution.machine import OthersMeter
from backfill.offloading.loads import LoadGrid
from backfill.parallel.create import create_timed_executor
from backfill.parallel.executor import ParallelExecutor
from tests.builders import make_request
from tests.execution.tiny import cache_fixture, tiny_config
from tests.models.tiny import save_tiny_model
from tests.parallel.processes import wait_ended

NUM_LAYERS = 7
PACKED_HEADER_BYTES = 4096
GRID = LoadGrid(batch_sizes=(1,), prompt_lengths=(16,), context_lengths=(32,), rounds=2, longest_s=9.0)


def config_of(folder: Path, **sizes: Any) -> EngineConfig:
    save_tiny_model("llama", folder, num_hidden_layers=NUM_LAYERS)
    objectives = SchedulerConfig(
        policy="fcfs", max_num_seqs=4, max_num_batched_tokens=64, ttft_slo=1e3, tpot_slo=1e3
    )
    automatic: dict[str, Any] = {"device_memory": 1.0, "offload_interval": "auto", "scheduler": objectives}
    return tiny_config(folder, kv_gib=1 / 256, threads=2, **automatic, **sizes)


cache = cache_fixture()


@pytest.mark.slow  # of a saved record: tests/engine/test_interval_choice.py
def test_tensor_ranks_serve_with_the_interval_that_follows_from_their_record(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyzer, "QUICK_LOADS", GRID)
    config = config_of(tmp_path / "model", tensor_parallel_size=2)
    config.validate()
    engine = load_engine(config)
    assert isinstance(engine.executor, ParallelExecutor)
    pids = engine.executor.pids
    try:
        assert engine.stats().offload_interval == engine.executor.info.offload_interval == 1
        request = make_request(prompt_token_ids=[5, 6, 7], max_tokens=3, ignore_eos=True)
        engine.add(request)
        while engine.has_unfinished:
            engine.step()
        assert len(request.output_token_ids) == 3
        timings = engine.executor.run(EMPTY_PLAN).weight_transfers.timings
        assert timings == (), "only ranks that are measured time their layers"
    finally:
        engine.executor.close()
    wait_ended(pids)
    record = saved_record(config)
    assert record is not None
    assert record.key.device.endswith(", 1 threads, 2 x 1 ranks")
    assert (record.num_layers, record.stages) == (NUM_LAYERS, (NUM_LAYERS,))
    sizes = [path.stat().st_size - PACKED_HEADER_BYTES for path in cache.rglob("packed/*.layers")]
    assert len(sizes) == 2
    assert record.layer_bytes * NUM_LAYERS == sum(sizes)
    assert all(each.compute_s > 0.0 for each in record.loads)
    assert 0.0 < record.typical_transfer_s <= record.transfer_s


@pytest.mark.slow
def test_two_stages_are_measured_one_behind_the_other(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: list[int | None] = []
    not_counted: list[int] = []

    def create(given: EngineConfig) -> TimedExecutor | ParallelExecutor:
        executor = create_timed_executor(given)
        assert isinstance(executor, ParallelExecutor)
        ranks.extend(executor.pids)
        return executor

    class Meter(OthersMeter):
        def __init__(self, own: Sequence[int] = ()) -> None:
            not_counted.extend(own)
            super().__init__(own)

    monkeypatch.setattr(analyzer, "create_timed_executor", create)
    monkeypatch.setattr(analyzer, "OthersMeter", Meter)
    config = config_of(tmp_path / "model", pipeline_parallel_size=2)
    analysis = analyze(config, GRID)
    assert not_counted == ranks, "what ranks use of the processors is not of other processes"
    assert len(ranks) == 2
    record = analysis.record
    assert record.key == record_key(config)
    assert record.key.device.endswith(", 1 threads, 1 x 2 ranks")
    assert sum(record.stage_layers) == record.num_layers == NUM_LAYERS
    assert len(record.stage_layers) == 2
    sizes = {path.stat().st_size - PACKED_HEADER_BYTES for path in cache.rglob("packed/*.layers")}
    assert sizes == {record.layer_bytes * each for each in record.stage_layers}
    assert {each.phase for each in record.loads} == {"prefill", "decode"}
    assert all(each.compute_s > 0.0 and each.other_s > 0.0 for each in record.loads)
    assert 0.0 < record.typical_transfer_s <= record.transfer_s == max(analysis.alone_s, analysis.beside_s)
