"""Ranks in processes of their own that are connected by gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

from backfill.core.clock import WallClock
from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.executor import Executor
from backfill.execution.torch_executor import TorchExecutor
from backfill.parallel import load
from backfill.parallel.connect import connect_by_torch
from backfill.parallel.create import create_parallel_executor
from backfill.parallel.rank import RankContext
from tests.builders import make_request
from tests.models.tiny import save_tiny_model


def load_over_gloo(config: EngineConfig, context: RankContext) -> TorchExecutor:
    with mock.patch.object(load, "connect", connect_by_torch):
        return load.load_rank(config, context)


def tokens(executor: Executor) -> list[list[int]]:
    engine = Engine(SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=8), executor, WallClock())
    requests = [
        make_request(
            prompt_tokens=length, max_tokens=8, request_id=f"r{length}", temperature=temperature, seed=1
        )
        for length, temperature in ((5, 0.0), (40, 0.9), (17, 0.0))
    ]
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return [request.output_token_ids for request in requests]


def test_tokens_are_those_of_one_process(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    config = EngineConfig(
        model_dir=str(tmp_path), dtype="float32", block_size=8, kv_gib=2**20 / GIB, device="cpu", threads=1
    )
    expected = tokens(create_torch_executor(config))
    two_ranks = replace(config, tensor_parallel_size=2)
    executor = create_parallel_executor(two_ranks, load_over_gloo)
    try:
        assert tokens(executor) == expected
    finally:
        executor.close()
