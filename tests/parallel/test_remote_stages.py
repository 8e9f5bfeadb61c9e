"""Stages that were started apart from each other, with ranks that compute nothing."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backfill.core.block import BlockCopy
from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import BackfillError, ExecutorDead
from backfill.core.plan import AdmittedRequest, BlockCopies, Compute, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.create import create_torch_executor
from backfill.parallel.executor import ParallelExecutor, RankFailed
from backfill.parallel.load import load_rank
from backfill.parallel.remote_stages import _HostLink
from tests.models.tiny import save_tiny_model
from tests.parallel.fake_ranks import NUM_BLOCKS, load_fake, load_refused, token_of
from tests.parallel.processes import num_open_files, wait_ended
from tests.parallel.stage_hosts import HostProcesses, executor_on_hosts
from tests.parallel.test_executor import BLOCKS, plan_of
from tests.parallel.test_rank_tokens import tokens

FOUR = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
TWO = EngineConfig(pipeline_parallel_size=2)
Started = tuple[ParallelExecutor, HostProcesses]


@pytest.fixture(scope="module")
def shared() -> Iterator[Started]:
    executor, hosts = executor_on_hosts(FOUR, load_fake)
    yield executor, hosts
    ranks, pids = executor.pids, [each.pid for each in hosts.processes]
    executor.close()
    wait_ended(ranks + pids)


def test_all_ranks_get_all_plans(shared: Started) -> None:
    executor, _ = shared
    assert executor.info.num_blocks == NUM_BLOCKS
    assert executor.info.max_steps_in_flight == 2
    tokens = [1]
    for step in range(3):
        plan = plan_of(step, "a", start=step, admits=step == 0)
        (sampled,) = executor.run(plan).sampled
        assert sampled == ("a", token_of(tokens, plan.slices[0]), None)
        tokens.append(sampled.token_id)


def test_a_copy_is_complete_when_the_ranks_of_all_stages_have_completed_it(shared: Started) -> None:
    executor, _ = shared
    copies = (BlockCopy(1, 2), BlockCopy(3, 4))
    begun = executor.run(StepPlan(10, Compute(()), copies=BlockCopies(checkpoint=copies)))
    assert begun.completed_copies == ()
    assert executor.run(StepPlan(11, Compute(()))).completed_copies == copies


def test_a_stop_request_reaches_all_stages(shared: Started) -> None:
    executor, _ = shared
    executor.request_stop(21)
    assert executor.run(plan_of(20, "b", stops=True)).stopped == ()
    stopped = executor.run(plan_of(21, "c", stops=True))
    assert (stopped.sampled, stopped.discarded) == ((), ("c",))


def test_a_plan_larger_than_all_buffers_arrives(shared: Started) -> None:
    executor, _ = shared
    prompt = tuple(range(2_000_000))
    request = AdmittedRequest(RequestId("long"), prompt, SamplingParams(max_tokens=1))
    scheduled = ScheduledSlice(RequestId("long"), 0, 1, BLOCKS, samples=True)
    outcome = executor.run(StepPlan(30, Compute((scheduled,)), (request,)))
    assert outcome.sampled[0].token_id == token_of(prompt, scheduled)


def test_who_sends_takes_reports_meanwhile_also_while_another_thread_sends() -> None:
    """Else both ends could wait for the other one to read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = _HostLink(ours)
        link._sending.acquire()  # a stop request that waits for room
        link.send(b"plan", link._sending.release)
        assert theirs.recv(4, socket.MSG_WAITALL) == b"plan"


def test_a_step_that_fails_on_a_rank_of_one_stage_has_failed(shared: Started) -> None:
    executor, _ = shared
    with pytest.raises(RankFailed, match=r"ValueError: asked by .* on rank 2"):
        executor.run(plan_of(40, "r2:raise"))
    assert len(executor.run(plan_of(41, "d")).sampled) == 1


def test_ranks_stream_weights_and_have_micro_batches_as_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    save_tiny_model("llama", tmp_path)
    one = EngineConfig(
        model_dir=str(tmp_path), device="cpu", dtype="float32", block_size=8, kv_gib=2**20 / GIB, threads=1
    )
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
    executor, hosts = executor_on_hosts(TWO, load_fake)
    ranks = executor.pids
    for link in executor._ranks._links.values():  # type: ignore[attr-defined]
        link.close()  # as the kernel does when the driver is killed
    wait_ended(ranks)
    wait_ended(each.pid for each in hosts.processes)
    executor.close()


def test_a_stage_that_cannot_load_says_where() -> None:
    gc.collect()
    before = num_open_files()
    with pytest.raises(BackfillError, match=r"^In host of stage 1: `threads` 1 is refused here"):
        executor_on_hosts(TWO, load_refused)
    gc.collect()
    assert num_open_files() == before
