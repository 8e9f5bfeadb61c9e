"""A real model on ranks in processes of their own: the same tokens as in one process."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.plan import Compute, StepPlan
from backfill.core.structured import StructuredOutputsParams
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.profile import profile_key
from backfill.execution.torch_executor import TorchExecutor
from backfill.parallel import load
from backfill.parallel.create import create_executor, create_parallel_executor
from backfill.parallel.executor import ParallelExecutor
from backfill.parallel.rank import RankContext
from tests.builders import make_request
from tests.engine.interruptions import all_requests, stopping_engine, tokens_of, undisturbed
from tests.execution.tiny import tiny_config
from tests.integrity import check_scheduler
from tests.models.tiny import save_tiny_model
from tests.parallel.processes import wait_ended
from tests.parallel.test_rank_tokens import tokens


def structured_outputs(executor: TorchExecutor | ParallelExecutor) -> list[tuple[list[int], str]]:
    """Tokens of requests with grammars, and why each has ended; the last one's cannot be compiled."""
    forms: list[dict[str, Any]] = [
        {"regex": "([a-f]{2,5}-){4}"},
        {"choice": ["so", "not so"]},
        {"regex": "[a"},
    ]
    requests = [
        make_request(
            9 + 20 * index,
            max_tokens=24,
            request_id=f"r{index}",
            temperature=1.0,
            seed=index,
            structured_outputs=StructuredOutputsParams(**form),
        )
        for index, form in enumerate(forms)
    ]
    requests.append(make_request(12, max_tokens=24, request_id="free", ignore_eos=True))
    engine = Engine(SchedulerConfig(max_num_batched_tokens=16), executor, WallClock())
    outputs = [output for request in requests if (output := engine.add(request)) is not None]
    while engine.has_unfinished:
        outputs += engine.step()
    engine.step()
    ends = {output.request_id: output.message for output in outputs if output.finish_reason is not None}
    return [(request.output_token_ids, ends[request.request_id]) for request in requests]


def check_structured_outputs(executor: ParallelExecutor, alone: TorchExecutor) -> None:
    expected = structured_outputs(alone)
    assert [bool(message) for _, message in expected] == [False, False, True, False]
    assert not expected[2][0] and all(len(tokens) > 1 for tokens, message in expected if not message)
    assert structured_outputs(executor) == expected


@pytest.mark.parametrize(
    "sizes",
    [
        # In one process, with threads as ranks: test_rank_offloading.py.
        pytest.param({"tensor_parallel_size": 2, "offload_interval": 1}, marks=pytest.mark.slow),
        # With threads in test_rank_offloading.py; two processes below.
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_micro_batches": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tp2-offloaded", "tp2-pp2-micro-batches"],
)
def test_tokens_of_processes_are_those_of_one(
    sizes: dict[str, int], small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several stages also those of structured outputs."""
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    alone, divided = tiny_config(small_model, threads=2), tiny_config(small_model, threads=2, **sizes)
    expected = create_torch_executor(alone)
    executor = create_executor(divided)
    assert isinstance(executor, ParallelExecutor)
    try:
        assert tokens(executor) == tokens(expected)
        offloaded = "offload_interval" in sizes
        assert executor.info.offload_interval == (1 if offloaded else None)
        files = list(tmp_path.rglob("*.layers"))
        assert len(files) == (2 if offloaded else 0)
        if offloaded:
            plan = StepPlan(step=10_000, work=Compute(()))
            assert executor.run(plan).weight_transfers.interval == 1
            assert executor.info.layer_bytes > 0
        else:
            check_structured_outputs(executor, expected)
        assert executor.info.block_bytes == expected.info.block_bytes
        assert executor.info.num_blocks == expected.info.num_blocks
        executor.fill_kv_pool(executor.info.num_blocks)
        # Times of one process must not be taken for those of several.
        assert profile_key(divided, executor) != profile_key(alone, expected)
    finally:
        pids = executor.pids
        executor.close()
        wait_ended(pids)


def test_tokens_of_processes_whose_steps_are_stopped_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages: half of the steps stop at the first safepoint, others whenever a thread asks them to."""
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    save_tiny_model("llama", tmp_path, num_hidden_layers=6)
    alone = tiny_config(tmp_path, threads=2)
    expected = undisturbed(create_torch_executor(alone), all_requests())
    executor = create_executor(replace(alone, pipeline_parallel_size=2))
    assert isinstance(executor, ParallelExecutor)
    engine, ended = stopping_engine(executor), threading.Event()
    rng, of_thread = random.Random(0), random.Random(1)
    submit, served, num_stopped = executor.submit, all_requests(), 0

    def stop_and_submit(plan: StepPlan) -> None:
        if rng.random() < 0.5:
            executor.request_stop(plan.step)
        submit(plan)

    def ask() -> None:
        while not ended.wait(0.001):
            for each in engine._in_flight[: of_thread.randint(0, 2)]:
                executor.request_stop(each.plan.step)

    monkeypatch.setattr(executor, "submit", stop_and_submit)
    asking = threading.Thread(target=ask)
    try:
        asking.start()
        for request in served:
            engine.add(request)
        while engine.has_unfinished:
            engine.step()
            check_scheduler(engine.scheduler)
            num_stopped += engine.stats().step.stopped
    finally:
        ended.set()
        asking.join()
        executor.close()
    assert tokens_of(served) == expected
    assert num_stopped > 10


def load_over_gloo(config: EngineConfig, context: RankContext) -> TorchExecutor:
    with mock.patch.object(load, "connect", load.connect_by_torch):
        return load.load_rank(config, context)


@pytest.mark.slow  # its groups and links: test_groups.py and test_links.py
def test_tokens_of_processes_that_are_connected_by_gloo(tmp_path: Path) -> None:
    """What CUDA devices are connected by, with gloo in NCCL's place."""
    save_tiny_model("llama", tmp_path)
    alone = tiny_config(tmp_path, threads=2)
    executor = create_parallel_executor(replace(alone, tensor_parallel_size=2), load_over_gloo)
    try:
        assert tokens(executor) == tokens(create_torch_executor(alone))
    finally:
        executor.close()
