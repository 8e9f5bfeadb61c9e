"""Stages that were started apart from each other, with ranks that compute nothing."""

from __future__ import annotations

import gc
import logging
import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from socket import socket

import pytest

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError, ExecutorDead
from backfill.execution.create import create_torch_executor
from backfill.parallel import worker
from backfill.parallel.load import load_rank
from backfill.parallel.rank import RankContext, RemoteStage
from backfill.parallel.shared_state import SharedState
from backfill.parallel.sockets import Address, ConnectionRefused
from tests.execution.tiny import tiny_config
from tests.models.tiny import save_tiny_model
from tests.parallel.fake_ranks import load_fake, load_refused, plan_of
from tests.parallel.processes import num_open_files, wait_ended
from tests.parallel.stage_hosts import executor_on_hosts
from tests.parallel.test_rank_tokens import tokens
from tests.patience import with_more_time

TWO = EngineConfig(pipeline_parallel_size=2)
ONE = EngineConfig(tensor_parallel_size=2)


@pytest.mark.slow
def test_ranks_stream_weights_and_have_micro_batches_as_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    save_tiny_model("llama", tmp_path)
    one = tiny_config(tmp_path)
    expected = tokens(create_torch_executor(one))
    config = replace(one, pipeline_parallel_size=2, threads=2, offload_interval=1, num_micro_batches=2)
    executor, _ = executor_on_hosts(config, load_rank)
    try:
        assert tokens(executor) == expected
    finally:
        executor.close()
    assert len(list(tmp_path.glob("cache/packed/*.layers"))) == 2


def test_a_rank_that_is_killed_ends_all_stages_and_is_named() -> None:
    executor, hosts = executor_on_hosts(TWO, load_fake)
    ranks = executor.pids
    with pytest.raises(ExecutorDead, match=r"host of stage 1 .*rank 1 of 2 was killed by signal 9"):
        executor.run(plan_of(0, "r0:hang", "r1:kill"))
    wait_ended(ranks)
    assert not any(each.is_alive() for each in hosts.processes)


def test_a_host_that_is_killed_ends_all_stages() -> None:
    executor, hosts = executor_on_hosts(TWO, load_fake)
    ranks = executor.pids
    executor.submit(plan_of(0, "r0:hang", "r1:hang"))
    pid = hosts.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ExecutorDead, match="host of stage 0"):
        executor.collect()
    wait_ended(ranks)


def test_a_stage_ends_when_the_driver_does() -> None:
    executor, hosts = executor_on_hosts(ONE, load_fake)
    ranks = executor.pids
    for link in executor._ranks._links.values():
        link.close()  # as the kernel does when the driver is killed
    wait_ended(ranks)
    wait_ended(each.pid for each in hosts.processes)
    executor.close()


def test_a_rank_that_cannot_reach_the_driver_says_where_it_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise ConnectionRefused("no answer")

    monkeypatch.setattr(worker, "connect_to", connect)
    monkeypatch.setattr(worker, "name_process", lambda _: None)
    with socket() as listener, closing(SharedState(1)) as state:
        stage = RemoteStage(0, (0,), Address("10.0.0.9", 7), (), None, b"")
        context = RankContext(0, 1, 1, state, listener.fileno(), remote=stage)
        with pytest.raises(SystemExit, match=r"Rank 0 cannot reach the driver at 10\.0\.0\.9:7: no answer"):
            worker.run_rank(EngineConfig(), context, "unused:unused", None, logging.WARNING)


@pytest.mark.slow  # why a stage ends is told alike: test_a_rank_that_is_killed_ends_all_stages_and_is_named
def test_a_stage_that_cannot_load_says_where() -> None:
    gc.collect()
    before = num_open_files()
    with pytest.raises(BackfillError, match=r"^In host of stage 1: `threads` 1 is refused here"):
        executor_on_hosts(TWO, load_refused)
    gc.collect()
    assert num_open_files() == before


def test_a_step_that_stands_still_ends_all_ranks_and_says_where() -> None:
    def attempt(factor: float) -> None:
        executor, _ = executor_on_hosts(replace(ONE, engine_hang_timeout=0.8 * factor), load_fake)
        executor.run(plan_of(6, "a"))
        match = r"Step 7 .* still for .* s: rank 1 stands still .*; rank 0 waits for others in layer 3\."
        with pytest.raises(ExecutorDead, match=match):
            executor.run(plan_of(7, "r0:wait", "r1:hang"))
        wait_ended(executor.pids)

    with_more_time(attempt)
