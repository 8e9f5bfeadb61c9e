"""Batches from submission to their end: order, restarts, cancellation, expiry, errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from backfill.engine.tasks import TaskWatch
from backfill.jobs import feeder as feeder_module
from backfill.jobs import files as files_module
from backfill.jobs.errors import Busy, Conflict
from backfill.jobs.lifecycle import BatchDriver
from backfill.jobs.lines import LineResult
from backfill.jobs.manager import JobManager
from backfill.jobs.open_batch import OpenBatch
from backfill.jobs.records import BatchStatus, LineOutcome, TokenUsage
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount
from tests.jobs.doubles import (
    OWNER,
    InstantRunner,
    InThreadReader,
    Start,
    check_accounts,
    check_completed,
    content_of,
    ended,
    hold_after,
    in_status,
    input_line,
    input_of,
    ready,
    results_of,
    run_batch,
    store_input,
    submit,
)
from tests.patience import TIMEOUT_S, until
from tests.shared import examples

pytestmark = pytest.mark.anyio


@pytest.mark.usefixtures("each_database")
async def test_a_batch_runs_every_line_once(start: Start) -> None:
    runner = InstantRunner()
    manager = await start(runner)
    batch = await submit(manager, input_of(50))
    assert batch.status is BatchStatus.VALIDATING
    await asyncio.sleep(0.05)
    assert not runner.runs  # no engine yet
    ready(manager)
    batch = await ended(manager, batch.id)
    assert batch.status is BatchStatus.COMPLETED
    assert batch.model == "m"
    assert set(runner.runs.values()) == {1}
    await check_accounts(manager, batch, 50)


async def test_lines_know_the_end_of_their_window(start: Start) -> None:
    wall_s, reader = 1_000_000.0, InThreadReader()
    manager = await start(reader=reader, wall=lambda: wall_s)
    ready(manager)
    for window_s in (3600, 7200):
        before_s = time.monotonic()
        await run_batch(manager, input_of(3), window_s=window_s)
        complete_by_s = reader.selections[-1].complete_by_s
        assert complete_by_s is not None
        assert before_s <= complete_by_s - window_s <= time.monotonic()


@pytest.mark.usefixtures("each_database")
async def test_a_bad_input_fails_before_a_line_runs(start: Start) -> None:
    runner = InstantRunner()
    manager = await start(runner)
    ready(manager)
    batch = await run_batch(manager, input_of(3) + b"{\n")
    assert batch.status is BatchStatus.FAILED
    assert [(error.code, error.line) for error in batch.errors] == [("invalid_json_line", 4)]
    assert batch.failed_at is not None
    assert not runner.runs
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_owners_share_the_engine_evenly_and_the_earlier_deadline_goes_first(start: Start) -> None:
    runner, reader = InstantRunner(), InThreadReader()
    runner.hold()
    manager = await start(runner, num_in_flight=6, reader=reader)
    batches = []
    for name, owner, window_s in (
        ("late", "a", 7200),
        ("early", "a", 3600),
        ("same", "a", 3600),
        ("b", "b", 9999),
    ):
        content = b"".join(input_line(i, custom_id=f"{name} {i}") for i in range(100))
        batches.append((owner, (await submit(manager, content, window_s, owner)).id))
    await until(lambda: len(reader.selections) >= len(batches))
    ready(manager)
    await until(lambda: len(runner.held) >= 6)
    assert Counter(name.split()[0] for name in runner.held) in ({"early": 3, "b": 3}, {"same": 3, "b": 3})
    runner.release()
    for owner, batch_id in batches:
        assert (await ended(manager, batch_id, owner)).status is BatchStatus.COMPLETED


@pytest.mark.parametrize("seed", range(examples(4)))
async def test_no_line_is_lost_or_answered_twice_over_restarts(
    tmp_path: Path, start: Start, seed: int
) -> None:
    chooser = random.Random(seed)
    batch_id = None
    for attempt in range(13):
        manager = await start(num_in_flight=chooser.choice([1, 3, 8]))
        ready(manager)
        if batch_id is None:
            batch_id = (await submit(manager, input_of(120))).id
        timeout_s = chooser.random() * 0.05 if attempt < 12 else TIMEOUT_S
        stop_after = asyncio.create_task(asyncio.sleep(timeout_s))
        end = asyncio.create_task(ended(manager, batch_id))
        await asyncio.wait({stop_after, end}, return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            assert end.result().status is BatchStatus.COMPLETED
            await check_accounts(manager, end.result(), 120)
            await manager.stop()
            return
        end.cancel()
        await manager.stop()
        if not has_ended(tmp_path):
            for path in (tmp_path / "files").iterdir():  # a write that a crash tore
                content = path.read_bytes()
                if b"batch_req_" in content[:60] and chooser.random() < 0.5:
                    os.truncate(path, len(content) - chooser.randrange(60))
    raise AssertionError("the batch never ended")


def has_ended(folder: Path) -> bool:
    with contextlib.closing(sqlite3.connect(folder / "jobs.db")) as database:
        (status,) = database.execute("SELECT status FROM batches").fetchone()
    return BatchStatus(status).is_final


async def lengths_after(start: Start, num_done: int) -> tuple[InstantRunner, Mapping[int, int]]:
    """A runner of 30 lines, one by one, until so many are done, and the lengths that the next start knows."""
    runner, reader = InstantRunner(), InThreadReader()
    first = await start(runner, num_in_flight=1)
    batch = await submit(first, input_of(30))
    ready(first)
    await hold_after(first, runner, batch, num_done)
    await first.stop()
    second = await start(reader=reader)
    ready(second)
    await ended(second, batch.id)
    return runner, reader.selections[0].observed


@pytest.mark.usefixtures("each_database")
async def test_the_next_start_knows_the_lengths_of_finished_lines(start: Start) -> None:
    """Of all of them; where several servers divide the lines, of those in parts that have ended."""
    runner, observed = await lengths_after(start, 26)
    # One line runs, so all parts of four lines but its own and the next have ended.
    assert len(observed) >= 16 and set(observed.values()) == {1}
    assert set(observed) <= {int(name.removeprefix("r")) + 1 for name in runner.runs}


@pytest.mark.parametrize(("num_done", "is_told"), [(14, False), (15, True)])
async def test_without_parts_lengths_are_known_once_half_of_the_lines_are_done(
    start: Start, num_done: int, is_told: bool
) -> None:
    """Of those that ran at the same time the short ones have ended: they would tell too little."""
    _, observed = await lengths_after(start, num_done)
    assert len(observed) == is_told * num_done


async def test_cancelling_keeps_finished_lines(start: Start) -> None:
    runner = InstantRunner()
    manager = await start(runner)
    ready(manager)
    runner.hold()
    batch = await submit(manager, input_of(2500))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    cancelled = await manager.cancel_batch(OWNER, batch.id)
    assert cancelled.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED)
    batch = await ended(manager, batch.id)
    assert batch.status is BatchStatus.CANCELLED
    await check_accounts(manager, batch, 2500)
    _, errors = await results_of(manager, batch)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert (await manager.cancel_batch(OWNER, batch.id)).status is BatchStatus.CANCELLED


@pytest.mark.usefixtures("each_database")
@pytest.mark.parametrize("seed", range(examples(8)))
async def test_a_cancellation_that_races_completion_has_one_winner(manager: JobManager, seed: int) -> None:
    ready(manager)
    batch = await submit(manager, input_of(5))
    await asyncio.sleep(random.Random(seed).random() * 0.03)
    try:
        await manager.cancel_batch(OWNER, batch.id)
        expected = {BatchStatus.CANCELLED}
    except Conflict:
        expected = {BatchStatus.COMPLETED}
    batch = await ended(manager, batch.id)
    assert batch.status in expected
    if batch.request_counts.total:
        await check_accounts(manager, batch, 5)


async def test_an_interrupted_cancellation_is_ended_at_the_next_start(start: Start) -> None:
    runner = InstantRunner()
    manager = await start(runner)
    batch = await submit(manager, input_of(10))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    await asyncio.to_thread(
        manager._storage.store.change_batch,
        batch.id,
        {"status": BatchStatus.CANCELLING, "cancelling_at": batch.created_at},
        only_from=[BatchStatus.IN_PROGRESS],
    )
    await manager.stop()
    manager = await start(runner)
    batch = await ended(manager, batch.id)
    assert batch.status is BatchStatus.CANCELLED
    await check_accounts(manager, batch, 10)


@pytest.mark.usefixtures("each_database")
async def test_a_window_that_ends_keeps_finished_lines(start: Start) -> None:
    runner = InstantRunner()
    runner.hold()
    manager = await start(runner)
    ready(manager)
    batch = await submit(manager, input_of(20), window_s=0)
    batch = await ended(manager, batch.id)
    assert batch.status is BatchStatus.EXPIRED
    assert batch.expired_at is not None
    await check_accounts(manager, batch, 20)
    _, errors = await results_of(manager, batch)
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


async def test_a_changed_clock_ends_nothing_early_and_timestamps_stay_ordered(start: Start) -> None:
    wall = [1_000_000.0]
    manager = await start(wall=lambda: wall[0])
    batch = await submit(manager, input_of(5))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    wall[0] += 1_000_000  # past the window
    await asyncio.sleep(0.02)
    wall[0] -= 2_000_000  # before the batch was made
    ready(manager)
    batch = await ended(manager, batch.id)
    assert batch.status is BatchStatus.COMPLETED
    stamps = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert None not in stamps
    assert stamps == sorted(stamps)  # type: ignore[type-var]


async def test_a_locked_database_delays_the_end_and_loses_nothing(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backfill.jobs.database._BUSY_TIMEOUT_MS", 1)
    manager = await start()
    batch = await submit(manager, input_of(30))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    other = sqlite3.connect(tmp_path / "jobs.db")
    other.execute("BEGIN IMMEDIATE")
    ready(manager)
    await until(lambda: not manager.snapshot().num_lines_queued)
    assert (await manager.get_batch(OWNER, batch.id)).status is BatchStatus.IN_PROGRESS
    other.rollback()
    other.close()
    batch = await ended(manager, batch.id)
    await check_completed(manager, batch, 30)


async def test_tasks_that_an_exception_ends_are_counted(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(driver: BatchDriver, job: OpenBatch) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(BatchDriver, "drive", fail)
    monkeypatch.setattr(files_module, "SWEEP_INTERVAL_S", None)
    tasks = TaskWatch()
    manager = await start(tasks=tasks)
    batch = await submit(manager, input_of(1))
    await until(lambda: tasks.failures.total() >= 2)
    assert tasks.failures == {"batch-driver": 1, "sweeper": 1}
    assert f"{batch.id}: stays as it is" in caplog.text
    assert "ValueError: a bug" in caplog.text


async def test_observers_get_every_line_and_snapshots_count_the_rest(start: Start) -> None:
    seen: list[tuple[LineOutcome, int, TokenUsage]] = []

    def on_lines(outcome: LineOutcome, num_lines: int, usage: TokenUsage) -> None:
        seen.append((outcome, num_lines, usage))

    manager = await start(on_lines=on_lines)
    batch = await submit(manager, input_of(7))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    # The database knows it first.
    await until(lambda: dict(manager.snapshot().jobs_by_status) == {BatchStatus.IN_PROGRESS: 1})
    snapshot = manager.snapshot()
    assert snapshot.num_lines_queued == 7
    assert snapshot.least_slack_s is not None
    assert 3500 < snapshot.least_slack_s <= 3600
    ready(manager)
    await ended(manager, batch.id)
    assert sum(num_lines for outcome, num_lines, _ in seen if outcome is LineOutcome.COMPLETED) == 7
    assert sum(usage.input_tokens for _, _, usage in seen) == 14
    assert manager.snapshot().num_lines_queued == 0


class Counting(InstantRunner):
    """Lines have seven tokens as long as they run."""

    async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
        assert count is not None
        count.num_tokens = 7
        return await super().run(line, count)


@pytest.mark.parametrize("order", ["blend", "fcfs"])
async def test_the_order_says_whether_progress_is_reported(
    start: Start, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(feeder_module, "PROGRESS_PERIOD_S", 0.001)
    runner, reader = Counting(), InThreadReader()
    runner.hold()
    manager = await start(runner, reader=reader, limits={"order": order})
    ready(manager)
    batch = await submit(manager, input_of(3))
    await until(lambda: len(runner.held) == 3)
    if order == "blend":
        await until(lambda: reader.opened[0].progress == {1: 7, 2: 7, 3: 7})
    else:
        assert manager.feeder._reporting is None
        assert not reader.opened[0].progress
    runner.release()
    await ended(manager, batch.id)


def lose_answers(manager: JobManager, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a method of the store: it commits, and nobody hears of it."""
    store = manager._storage.store
    commit = getattr(store, name)

    def commit_without_answer(*args: Any) -> None:
        commit(*args)
        raise OperationalError("COMMIT", None, ConnectionError("lost"))

    monkeypatch.setattr(store, name, commit_without_answer)


async def test_a_file_whose_upload_had_no_answer_has_its_contents(
    manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(manager)
    lose_answers(manager, "add_file", monkeypatch)
    with pytest.raises(Busy):
        await store_input(manager, input_of(3))
    (file,) = (await manager.files.list(OWNER, purpose=None, order="asc", limit=9, after=None)).items
    assert await content_of(manager, file) == input_of(3)


async def test_a_batch_whose_creation_had_no_answer_runs(
    manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(manager)
    lose_answers(manager, "add_batch", monkeypatch)
    with pytest.raises(Busy):
        await submit(manager, input_of(3))
    (batch,) = (await manager.list_batches(OWNER, limit=9, after=None)).items
    await check_completed(manager, await ended(manager, batch.id), 3)
