"""Errors around a batch end it as failed, or are retried. A database belongs to one data folder."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from backfill.core.config import GIB
from backfill.core.errors import ConfigError, NotReady
from backfill.http.batches import batch_body
from backfill.jobs.database import open_database
from backfill.jobs.errors import TooLarge
from backfill.jobs.lifecycle import BatchDriver
from backfill.jobs.manager import JobManager
from backfill.jobs.records import BatchRecord, BatchStatus
from backfill.jobs.results import ResultLog
from tests.jobs.doubles import (
    OWNER,
    InstantRunner,
    Start,
    check_accounts,
    check_completed,
    ended,
    hold_after,
    in_status,
    input_line,
    input_of,
    make_manager,
    ready,
    results_of,
    run_batch,
    store_input,
    submit,
)
from tests.patience import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backfill.jobs.retry.FIRST_RETRY_S", 0.001)


def with_warning() -> bytes:
    """20 lines, of which one has a field without effect."""
    return input_of(19) + input_line(19, body={"prompt": "x", "max_tokns": 3})


def told(manager: JobManager, batch: BatchRecord) -> tuple[list[str] | None, str | None]:
    """Codes of errors, and the warning, as the API shows them."""
    body = batch_body(batch, manager.outlook)
    return body["errors"] and [each["code"] for each in body["errors"]["data"]], body["warning"]


async def half_done(manager: JobManager, runner: InstantRunner, content: bytes = input_of(20)) -> BatchRecord:
    """A batch of 20 lines; some have results, the runner holds the rest."""
    batch = await submit(manager, content)
    ready(manager)
    await hold_after(manager, runner, batch, 6)
    return await manager.get_batch(OWNER, batch.id)


def remove(path: Path) -> None:
    path.unlink()


def move_away(path: Path) -> None:
    path.rename(path.with_suffix(".bak"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [remove, move_away, cut])
async def test_results_that_vanish_while_their_batch_runs_fail_it(
    tmp_path: Path, start: Start, harm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = InstantRunner()
    manager = await start(runner)
    batch = await half_done(manager, runner)
    harm(tmp_path / "files" / batch.output_blob)
    runner.release()
    with caplog.at_level(logging.ERROR):
        batch = await ended(manager, batch.id)
    assert batch.status is BatchStatus.FAILED
    (error,) = batch.errors
    assert error.code == "results_lost"
    assert batch.output_blob in error.message
    assert any(batch.id in text and batch.output_blob in text for text in caplog.messages)
    output, _ = await results_of(manager, batch)
    assert len(output) == batch.request_counts.completed, "remaining results can be read and are counted"


async def test_a_warning_is_no_error_and_stays_beside_one(tmp_path: Path, start: Start) -> None:
    runner = InstantRunner()
    manager = await start(runner)
    batch = await half_done(manager, runner, with_warning())
    _, warning = told(manager, batch)
    assert warning is not None and "max_tokns" in warning
    remove(tmp_path / "files" / batch.output_blob)
    runner.release()
    assert told(manager, await ended(manager, batch.id)) == (["results_lost"], warning)
    done = await run_batch(manager, with_warning())
    assert (done.status, *told(manager, done)) == (BatchStatus.COMPLETED, None, warning)
    runner.hold()
    late = await run_batch(manager, with_warning(), window_s=0)
    assert (late.status, *told(manager, late)) == (BatchStatus.EXPIRED, None, warning)


async def test_results_that_vanish_once_every_line_has_one_fail_their_batch(
    tmp_path: Path, manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_lines = BatchDriver._run_lines

    async def and_remove(driver: BatchDriver, job: Any) -> None:
        await run_lines(driver, job)
        (tmp_path / "files" / job.batch.output_blob).unlink()

    monkeypatch.setattr(BatchDriver, "_run_lines", and_remove)
    ready(manager)
    batch = await run_batch(manager, input_of(5))
    assert (batch.status, batch.request_counts.completed) == (BatchStatus.FAILED, 0)
    assert [error.code for error in batch.errors] == ["results_lost"]


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), NotReady("No process can be started.")]
)
async def test_a_temporary_error_only_delays_a_batch(
    manager: JobManager, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, num_failures = ResultLog.open, 0

    def refuse(log: ResultLog) -> None:
        nonlocal num_failures
        if num_failures < 8:
            num_failures += 1
            raise error
        real_open(log)

    monkeypatch.setattr(ResultLog, "open", refuse)
    ready(manager)
    batch = await run_batch(manager, input_of(9))
    assert num_failures == 8
    await check_completed(manager, batch, 9)


@pytest.mark.usefixtures("each_database")
async def test_a_lasting_error_fails_a_batch(manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stumble(driver: BatchDriver, job: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(BatchDriver, "_run_lines", stumble)
    ready(manager)
    batch = await run_batch(manager, input_of(9))
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.errors] == ["internal_error"]
    await manager.files.delete(OWNER, batch.input_file_id)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("output_blob", b"no result\n", "results_lost"),
        ("input_file_id", input_of(3), "file_changed"),
        ("input_file_id", input_of(19) + b"{\n", "file_changed"),
    ],
)
async def test_files_that_were_changed_between_starts_fail_their_batch(
    tmp_path: Path, start: Start, name: str, content: bytes, code: str
) -> None:
    runner = InstantRunner()
    manager = await start(runner)
    batch = await half_done(manager, runner)
    await manager.stop()
    (tmp_path / "files" / getattr(batch, name)).write_bytes(content)
    manager = await start()
    other = await submit(manager, input_of(50))
    ready(manager)
    batch = await ended(manager, batch.id)
    assert (batch.status, [error.code for error in batch.errors]) == (BatchStatus.FAILED, [code])
    assert (await ended(manager, other.id)).status is BatchStatus.COMPLETED, "other batches go on"


async def test_open_batches_take_no_descriptors(start: Start) -> None:
    runner = InstantRunner()
    runner.hold()
    manager = await start(runner, num_in_flight=40)
    ready(manager)
    before = len(os.listdir("/proc/self/fd"))
    batches = [await submit(manager, input_of(4)) for _ in range(20)]
    for batch in batches:
        await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    # The database's connections.
    assert len(os.listdir("/proc/self/fd")) - before <= 12
    await manager.cancel_batch(OWNER, batches[-1].id)
    cancelled = await ended(manager, batches[-1].id)
    assert cancelled.status is BatchStatus.CANCELLED, "though others are fed before it"
    await check_accounts(manager, cancelled, 4)
    late = await run_batch(manager, input_of(4), window_s=0)
    assert late.status is BatchStatus.EXPIRED
    runner.release()
    for batch in batches[:-1]:
        last = await ended(manager, batch.id)
        await check_completed(manager, last, 4)


@pytest.mark.usefixtures("each_database")
@pytest.mark.parametrize("status", [BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.COMPLETED])
async def test_a_commit_whose_answer_is_lost_counts_once(manager: JobManager, status: BatchStatus) -> None:
    real_change, num_lost = manager._storage.store.change_batch, 0

    def change(batch_id: str, row: Any, **options: Any) -> bool:
        nonlocal num_lost
        is_changed = real_change(batch_id, row, **options)
        if row["status"] is status and num_lost == 0:
            num_lost += 1
            raise OperationalError("COMMIT", {}, Exception("the connection was closed"))
        return is_changed

    manager._storage.store.change_batch = change  # type: ignore[method-assign]
    ready(manager)
    batch = await run_batch(manager, input_of(5))
    await until(lambda: num_lost)  # the record may be read before the answer is lost
    await check_completed(manager, batch, 5)


async def test_files_are_not_swept_away_for_an_empty_database(tmp_path: Path, start: Start) -> None:
    manager = await start()
    file_id = await store_input(manager, input_of(3))
    await manager.stop()
    for path in tmp_path.glob("jobs.db*"):
        path.unlink()
    with pytest.raises(ConfigError, match="another database"):
        await make_manager(tmp_path, InstantRunner()).start()
    assert (tmp_path / "files" / file_id).exists()


async def test_a_damaged_database_of_the_data_folder_is_told_by_that_option(
    tmp_path: Path, start: Start
) -> None:
    manager = await start()
    await manager.stop()
    for path in tmp_path.glob("jobs.db-*"):
        path.unlink()
    (tmp_path / "jobs.db").write_bytes(b"damaged" * 100)
    with pytest.raises(
        ConfigError, match=r"`data_dir`: the database .*jobs\.db cannot be opened: file is not"
    ):
        await make_manager(tmp_path, InstantRunner()).start()


def test_a_database_url_with_a_bad_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`batch_database_url`"):
        open_database("postgresql://host:port/name", tmp_path)


async def test_a_folder_among_the_files_is_left_alone(tmp_path: Path, start: Start) -> None:
    (tmp_path / "files" / "lost+found").mkdir(parents=True)
    manager = await start()
    await manager.stop()
    assert (tmp_path / "files" / "lost+found").is_dir()


@pytest.mark.usefixtures("each_database")
async def test_concurrent_uploads_share_the_free_storage(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, InstantRunner())
    object.__setattr__(manager.config, "batch_max_storage_gib", 100 / GIB)
    await manager.start()
    uploads = [await manager.files.begin_upload(OWNER) for _ in range(3)]
    await uploads[0].write(b"x" * 60)
    with pytest.raises(TooLarge, match="storage is full"):
        await uploads[1].write(b"x" * 60)
    await uploads[1].abort()
    await uploads[2].write(b"x" * 40)
    for upload in (uploads[0], uploads[2]):
        await upload.finish(filename="a", purpose="user_data", expires_after_s=None)
    await manager.stop()


async def test_a_paused_manager_answers_and_leaves_batches_to_the_next_start(
    tmp_path: Path, start: Start
) -> None:
    runner = InstantRunner()
    manager = await start(runner)
    ready(manager)
    upload = await manager.files.begin_upload(OWNER)
    await upload.write(input_of(3))
    await manager.pause()
    with pytest.raises(ConfigError, match="in use"):
        await make_manager(tmp_path, InstantRunner()).start()
    await upload.finish(filename="in.jsonl", purpose="batch", expires_after_s=None)
    batch = await submit(manager, input_of(5))
    ready(manager)  # an engine that was loading meanwhile
    await asyncio.sleep(0.02)
    assert not runner.runs
    await manager.stop()
    manager = await start(runner)
    ready(manager)
    assert (await ended(manager, batch.id)).status is BatchStatus.COMPLETED


async def test_lines_that_never_ran_are_named_without_their_bodies(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes: list[int] = []
    real_append = ResultLog.append

    def append(log: ResultLog, results: Sequence[Any]) -> None:
        num_bytes.append(sum(result.line.num_bytes for result in results))
        real_append(log, results)

    monkeypatch.setattr(ResultLog, "append", append)
    manager = await start()
    batch = await run_batch(manager, input_of(2500), window_s=0)
    await check_accounts(manager, batch, 2500)
    assert sum(num_bytes) == 0
