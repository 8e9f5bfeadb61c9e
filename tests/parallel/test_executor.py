"""The driver and its ranks' processes, with ranks that compute nothing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from backfill.core.block import BlockCopy
from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError, ExecutorDead
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    RankTiming,
    ScheduledSlice,
    StepPlan,
    WeightTransfers,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.parallel.executor import ParallelExecutor, RankFailed, merge_transfers
from backfill.parallel.rank import RankLoader
from tests.parallel.fake_ranks import (
    BLOCKS,
    NUM_BLOCKS,
    load_broken,
    load_fake,
    load_killed,
    load_refused,
    plan_of,
    stalled,
    token_of,
)
from tests.parallel.processes import num_open_files, wait_ended
from tests.parallel.stage_hosts import executor_on_hosts
from tests.patience import with_more_time

TWO = EngineConfig(tensor_parallel_size=2)
STAGES = EngineConfig(pipeline_parallel_size=2)
NAMES = ("a", "b", "r1:slow", "r0:raise", "r1:raise", "*:raise", "r0:stall")


@pytest.fixture(scope="module", params=["local", "remote"])
def shared(request: pytest.FixtureRequest) -> Iterator[ParallelExecutor]:
    """Two stages that share memory with the driver, or two ranks of a stage that connect to it."""
    is_local = request.param == "local"
    created = ParallelExecutor(STAGES, 1, load_fake) if is_local else executor_on_hosts(TWO, load_fake)[0]
    yield created
    pids = created.pids
    assert len(pids) == 2
    created.close()
    wait_ended(pids)


@pytest.fixture
def executor(shared: ParallelExecutor) -> Iterator[ParallelExecutor]:
    """For tests after which it still runs."""
    yield shared
    shared.run(StepPlan(0, Compute(()), released=tuple(map(RequestId, NAMES))))


@pytest.fixture
def mortal() -> Iterator[ParallelExecutor]:
    created = ParallelExecutor(TWO, 1, load_fake)
    yield created
    created.close()


def test_a_wait_for_a_step_ends_with_it(executor: ParallelExecutor) -> None:
    executor.submit(plan_of(0, "*:raise"))
    assert executor.wait(), "a failure is collected"
    with pytest.raises(RankFailed):
        executor.collect()
    executor.submit(plan_of(1, "a"))
    assert executor.wait() and executor.wait()
    executor.wake()
    assert executor.wait(), "it is done, however many requests arrive"
    assert executor.collect().sampled


def test_a_wait_for_a_step_ends_with_a_wake_but_wakes_do_not_put_off_the_look_after_the_ranks(
    mortal: ParallelExecutor,
) -> None:
    mortal._unwatched_s = 600.0
    mortal.submit(plan_of(0, "r0:hang"))
    for _ in range(2):
        mortal.wake()
        mortal.wake()
        assert not mortal.wait()
    mortal._unwatched_until_s = time.monotonic() + 0.01
    assert mortal.wait(), "one wake-up for all calls before it"
    mortal.wake()
    assert mortal.wait()


def test_ranks_know_the_tokens_of_steps_before(executor: ParallelExecutor) -> None:
    assert executor.info.num_blocks == NUM_BLOCKS, "the least of the ranks"
    tokens = [1]
    for step in range(5):
        plan = plan_of(step, "a", start=step, admits=step == 0)
        (sampled,) = executor.run(plan).sampled
        assert sampled == ("a", token_of(tokens, plan.slices[0]), None)
        tokens.append(sampled.token_id)


@pytest.mark.parametrize("shared", ["local"], indirect=True)
def test_several_steps_are_in_flight(executor: ParallelExecutor) -> None:
    assert executor.info.max_steps_in_flight == 2
    plans = [plan_of(0, "a"), plan_of(1, "r1:slow")]
    executor.submit(plans[0])
    executor.submit(plans[1])
    first = executor.collect()
    # Its token goes to the ranks with the next plan, which is submitted before the second is collected.
    plans.append(plan_of(2, "a", start=1, admits=False))
    executor.submit(plans[2])
    outcomes = [first, executor.collect(), executor.collect()]
    expected = [token_of([1], plans[0].slices[0]), token_of([1], plans[1].slices[0])]
    expected.append(token_of([1, expected[0]], plans[2].slices[0]))
    assert [each.sampled[0].token_id for each in outcomes] == expected


def test_a_copy_is_complete_when_all_ranks_have_completed_it(executor: ParallelExecutor) -> None:
    copies = (BlockCopy(1, 2), BlockCopy(3, 4))
    begun = executor.run(StepPlan(0, Compute(()), copies=BlockCopies(checkpoint=copies)))
    assert begun.completed_copies == ()
    assert executor.run(StepPlan(1, Compute(()))).completed_copies == copies
    assert executor.run(StepPlan(2, Compute(()))).completed_copies == ()


def test_copies_that_complete_in_a_failed_step_are_reported_by_the_next(executor: ParallelExecutor) -> None:
    copies = (BlockCopy(1, 2),)
    executor.run(StepPlan(0, Compute(()), copies=BlockCopies(checkpoint=copies)))
    with pytest.raises(RankFailed):
        executor.run(plan_of(1, "r0:raise"))
    assert executor.run(StepPlan(2, Compute(()))).completed_copies == copies


def test_of_transfers_in_a_failed_step_bytes_are_reported_by_the_next(executor: ParallelExecutor) -> None:
    with pytest.raises(RankFailed):
        executor.run(plan_of(0, "r0:stall", "r1:raise"))
    plan = replace(plan_of(1, "r0:stall"), offload_interval=2)
    assert executor.run(plan).weight_transfers == stalled(2)._replace(num_bytes=200, copied_bytes=20)
    with pytest.raises(RankFailed):
        executor.run(plan_of(2, "r0:stall", "r1:raise"))
    assert executor.run(plan_of(3, "a")).weight_transfers == WeightTransfers(4, 100, 0.0, 0.25, 10)


def test_a_stop_request_reaches_the_ranks(executor: ParallelExecutor) -> None:
    executor.request_stop(1)
    assert executor.run(plan_of(0, "a", stops=True)).stopped == ()
    stopped = executor.run(plan_of(1, "b", stops=True))
    assert (stopped.sampled, stopped.discarded) == ((), ("b",))


def test_a_plan_larger_than_all_buffers_arrives(executor: ParallelExecutor) -> None:
    prompt = tuple(range(1_000_000))
    request = AdmittedRequest(RequestId("a"), prompt, SamplingParams(max_tokens=1))
    scheduled = ScheduledSlice(RequestId("a"), 0, 1, BLOCKS, samples=True)
    outcome = executor.run(StepPlan(0, Compute((scheduled,)), (request,)))
    assert outcome.sampled[0].token_id == token_of(prompt, scheduled)


@pytest.mark.parametrize("who", ["r0", "r1", "*"])
def test_a_step_fails_if_it_fails_on_a_rank_and_the_next_one_runs(
    executor: ParallelExecutor, who: str
) -> None:
    name = f"{who}:raise"
    rank = who.replace("*", "0").strip("r")
    with pytest.raises(RankFailed, match=rf"ValueError: asked by .* on rank {rank}"):
        executor.run(plan_of(0, name))
    # No token of the failed step is known to any rank.
    assert len(executor.run(plan_of(1, "a")).sampled) == 1
    assert len(executor.run(plan_of(2, "a", start=1, admits=False)).sampled) == 1


def test_ranks_that_do_not_come_out_of_a_failed_step_are_ended() -> None:
    def attempt(factor: float) -> None:
        executor = ParallelExecutor(TWO, 1, load_fake, failed_step_s=0.2 * factor)
        pids = executor.pids
        match = r"Step 3 failed \(ValueError.* on rank 0\).* did not come out of it .*: rank 1 "
        with pytest.raises(ExecutorDead, match=match):
            executor.run(plan_of(3, "r1:hang", "r0:raise"))
        wait_ended(pids)
        with pytest.raises(ExecutorDead, match="Step 3 failed"):
            executor.run(plan_of(4, "a"))

    with_more_time(attempt)


def test_a_step_that_stands_still_ends_all_and_says_where() -> None:
    def attempt(factor: float) -> None:
        executor = ParallelExecutor(replace(TWO, engine_hang_timeout=0.4 * factor), 1, load_fake)
        executor.run(plan_of(6, "a"))
        match = r"Step 7 .* still for .* s: rank 1 stands still .*; rank 0 waits for others in layer 3\."
        with pytest.raises(ExecutorDead, match=match):
            executor.run(plan_of(7, "r0:wait", "r1:stop"))
        wait_ended(executor.pids)

    with_more_time(attempt)


def test_a_rank_that_is_killed_in_a_step_ends_all(mortal: ParallelExecutor) -> None:
    with pytest.raises(ExecutorDead, match="rank 1 of 2 was killed by signal 9"):
        mortal.run(plan_of(0, "r0:hang", "r1:kill"))
    wait_ended(mortal.pids)


def check_again_and_again(executor: ParallelExecutor) -> None:
    """A process counts as ended before its last thread has, and then its sockets close."""
    for _ in range(3000):
        executor.check()
        time.sleep(0.01)


def test_a_rank_that_is_killed_while_nothing_runs_is_noticed(mortal: ParallelExecutor) -> None:
    mortal.check()
    pid = mortal.pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_ended([pid])
    with pytest.raises(ExecutorDead, match="rank 0 of 2 was killed by signal 9"):
        check_again_and_again(mortal)
    with pytest.raises(ExecutorDead, match="rank 0 of 2 was killed by signal 9"):
        mortal.submit(plan_of(0, "a"))
    wait_ended(mortal.pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "message"),
    [
        (load_refused, "`threads` 3 is refused here."),
        (load_broken, "Rank 0 could not start: ValueError: a bug"),
        (load_killed, "rank 1 of 2 was killed by signal 9"),
    ],
)
def test_a_rank_that_cannot_be_loaded_ends_all(load: RankLoader, message: str) -> None:
    gc.collect()
    before = num_open_files()
    with pytest.raises(BackfillError, match=message):
        ParallelExecutor(TWO, 3, load)
    gc.collect()
    assert num_open_files() == before


def test_bytes_of_ranks_add_up_and_they_wait_beside_each_other() -> None:
    """Those of one stage; a step waits in the next after them, but for the bus, which is one."""
    timings = [RankTiming((number,), (0.0,), (), 10) for number in range(3)]
    ranks = [
        (0, WeightTransfers(2, 100, 0.25, 0.5, 30, 0.125, (timings[0],))),
        (0, WeightTransfers(2, 60, 0.75, 0.25, 20, 0.375, (timings[1],))),
        (1, WeightTransfers(2, 40, 0.125, 0.25, 10, 0.25, (timings[2],))),
    ]
    assert merge_transfers(ranks[:2]) == WeightTransfers(2, 160, 0.75, 0.5, 50, 0.375, tuple(timings[:2]))
    stages = WeightTransfers(2, 200, 0.875, 0.5, 60, 0.375, tuple(timings), other_stalls_s=0.125)
    assert merge_transfers(ranks) == merge_transfers(ranks[::-1])._replace(timings=tuple(timings)) == stages
    assert stages.longest_stall_s == 0.75
    assert merge_transfers([]) == WeightTransfers()


_DRIVER = """
from backfill.core.config import EngineConfig
from backfill.parallel.executor import ParallelExecutor
from tests.parallel.fake_ranks import load_fake, plan_of
import time

executor = ParallelExecutor(EngineConfig(tensor_parallel_size=2), 1, load_fake)
print(*executor.pids, flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("time.sleep(3600)", id="idle", marks=pytest.mark.slow),
        pytest.param("executor.run(plan_of(0, 'r0:hang', 'r1:hang'))", id="in-a-step"),
    ],
)
def test_ranks_end_with_a_driver_that_is_killed(then: str) -> None:
    command: Sequence[str] = [sys.executable, "-c", _DRIVER.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(each) for each in driver.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.1)  # so that a step has perhaps begun
        driver.kill()
    wait_ended(pids)
