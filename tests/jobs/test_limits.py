"""Limits of one owner's batches, uploads and bytes, and the disk space kept for results."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from backfill.core.config import GIB
from backfill.core.errors import ConfigError, RequestError
from backfill.jobs.config import JobsConfig
from backfill.jobs.errors import Conflict, NotFound, StorageFull, TooLarge, TooMany, TooManyUploads
from backfill.jobs.manager import JobManager
from backfill.jobs.records import BatchRecord, BatchStatus
from tests.jobs.doubles import (
    OWNER,
    InstantRunner,
    Start,
    check_accounts,
    create,
    ended,
    hold_after,
    in_status,
    input_of,
    make_manager,
    ready,
    run_batch,
    store_input,
    submit,
)
from tests.patience import TIMEOUT_S, until

pytestmark = pytest.mark.anyio


@pytest.mark.usefixtures("each_database")
async def test_open_batches_of_one_owner_are_limited(start: Start) -> None:
    manager = await start(limits={"batch_max_open": 5})
    file_id = await store_input(manager, input_of(3))
    made = await asyncio.gather(*(create(manager, file_id) for _ in range(20)), return_exceptions=True)
    refused = [error for error in made if isinstance(error, TooMany)]
    assert len(refused) == 15
    assert "At most 5 of your batches" in str(refused[0])
    upload = await manager.files.begin_upload("other")
    await upload.write(input_of(3))
    other = await upload.finish(filename="in.jsonl", purpose="batch", expires_after_s=None)
    await create(manager, other.id, "other")
    ready(manager)
    for batch in made:
        if isinstance(batch, BatchRecord):
            await ended(manager, batch.id)
    await create(manager, file_id)


async def test_unfinished_lines_of_one_owner_are_limited(start: Start) -> None:
    manager = await start(limits={"batch_max_queued_lines": 25})
    file_id = await store_input(manager, input_of(10))
    batches = await asyncio.gather(*(create(manager, file_id) for _ in range(4)))
    await until_validated(manager, batches)
    failed = [batch for batch in batches if (await manager.get_batch(OWNER, batch.id)).status.is_final]
    assert len(failed) == 2, "in any order"
    for batch in failed:
        (error,) = (await manager.get_batch(OWNER, batch.id)).errors
        assert error.code == "token_limit_exceeded"
        assert "25 are allowed" in error.message
    ready(manager)
    for batch in batches:
        if batch not in failed:
            assert (await ended(manager, batch.id)).status is BatchStatus.COMPLETED
    assert (await ended(manager, (await create(manager, file_id)).id)).status is BatchStatus.COMPLETED


async def until_validated(manager: JobManager, batches: list[BatchRecord]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        for batch in batches:
            while (await manager.get_batch(OWNER, batch.id)).status is BatchStatus.VALIDATING:
                await asyncio.sleep(0.002)


async def test_a_full_queue_refuses_and_an_input_longer_than_it_fails(start: Start) -> None:
    manager = await start(limits={"batch_max_queued_lines": 10})
    long = await run_batch(manager, input_of(11))
    assert [error.code for error in long.errors] == ["too_many_tasks"]
    batch = await submit(manager, input_of(10))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    with pytest.raises(TooMany, match="10 unfinished lines"):
        await submit(manager, input_of(1))
    await manager.cancel_batch(OWNER, batch.id)
    await ended(manager, batch.id)
    await submit(manager, input_of(1))


async def test_what_a_batch_had_done_before_a_restart_is_not_queued(start: Start) -> None:
    runner = InstantRunner()
    manager = await start(runner, limits={"batch_max_queued_lines": 20})
    batch = await submit(manager, input_of(20))
    ready(manager)
    await hold_after(manager, runner, batch, 8)
    file_id = await store_input(manager, input_of(1))
    await manager.pause()
    other = await create(manager, file_id)  # validated by the next start
    await manager.stop()
    runner = InstantRunner()
    manager = await start(runner, limits={"batch_max_queued_lines": 20})
    ready(manager)
    for made in (batch, other):
        assert (await ended(manager, made.id)).status is BatchStatus.COMPLETED


async def test_bytes_of_one_owner_are_limited(start: Start) -> None:
    manager = await start(limits={"batch_max_owner_gib": 100 / GIB})
    first = await store_input(manager, b"x" * 60)
    with pytest.raises(TooLarge, match="limited to 100 bytes together"):
        await store_input(manager, b"x" * 41)
    uploads = [await manager.files.begin_upload(OWNER) for _ in range(2)]
    await uploads[0].write(b"x" * 40)
    with pytest.raises(TooLarge):
        await uploads[1].write(b"x")
    for upload in uploads:
        await upload.abort()
    other = await manager.files.begin_upload("other")
    await other.write(b"x" * 100)
    await other.finish(filename="a", purpose="user_data", expires_after_s=None)
    await manager.files.delete(OWNER, first)
    await store_input(manager, b"x" * 100)


async def test_results_are_written_though_their_owner_is_at_the_limit(start: Start) -> None:
    content = input_of(10)
    manager = await start(limits={"batch_max_owner_gib": len(content) / GIB})
    ready(manager)
    batch = await run_batch(manager, content)
    await check_accounts(manager, batch, 10)


async def test_the_rest_of_the_disk_is_kept_for_results(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await start(limits={"batch_min_free_gib": 1000 / GIB})
    num_free = 5000
    real = os.statvfs(tmp_path)

    def statvfs(_: Any) -> os.statvfs_result:
        values = list(real)
        values[1], values[4] = 1, num_free  # fragment size, blocks available
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)
    file_id = await store_input(manager, input_of(10))
    batch = await create(manager, file_id)
    upload = await manager.files.begin_upload(OWNER)
    await upload.write(b"x" * 4000)
    with pytest.raises(StorageFull):
        await upload.write(b"x" * 4001)
    await upload.abort()
    num_free = 999
    with pytest.raises(StorageFull):
        await manager.files.begin_upload(OWNER)
    with pytest.raises(StorageFull):
        await create(manager, file_id)
    ready(manager)
    await check_accounts(manager, await ended(manager, batch.id), 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_max_uploads", 0),
        ("batch_max_open", 0),
        ("batch_max_queued_lines", 0),
        ("batch_max_owner_gib", 0),
        ("batch_min_free_gib", -1),
    ],
)
def test_limits_out_of_range_are_refused(field: str, value: int) -> None:
    config = JobsConfig(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"`{field}` must be"):
        config.validate()


async def test_open_uploads_are_limited_for_each_owner_and_for_all(start: Start) -> None:
    manager = await start(limits={"batch_max_uploads": 8, "batch_max_bytes": 100})
    uploads = [await manager.files.begin_upload(f"owner {number // 2}") for number in range(8)]
    with pytest.raises(TooManyUploads, match="2 of your uploads"):
        await manager.files.begin_upload("owner 0")
    with pytest.raises(TooManyUploads, match="At most 8 uploads"):
        await manager.files.begin_upload("other")
    await uploads[0].abort()
    await uploads[0].abort()
    await uploads[1].finish(filename="in", purpose="user_data", expires_after_s=None)
    await uploads[2].write(b"x" * 101)
    with pytest.raises(TooLarge):
        await uploads[2].finish(filename="in.jsonl", purpose="batch", expires_after_s=None)
    uploads += [await manager.files.begin_upload("other"), await manager.files.begin_upload("another")]
    uploads.append(await manager.files.begin_upload("owner 1"))
    with pytest.raises(TooManyUploads):
        await manager.files.begin_upload("one more")
    for upload in uploads[3:]:
        await upload.abort()


async def test_an_input_file_is_kept_while_its_batch_runs(manager: JobManager) -> None:
    batch = await submit(manager, input_of(5))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    with pytest.raises(Conflict):
        await manager.files.delete(OWNER, batch.input_file_id)
    ready(manager)
    batch = await ended(manager, batch.id)
    await manager.files.delete(OWNER, batch.input_file_id)
    with pytest.raises(NotFound):
        await manager.files.get(OWNER, batch.input_file_id)
    await check_accounts(manager, batch, 5)


async def test_an_input_removed_from_the_disk_fails_its_batch(tmp_path: Path, start: Start) -> None:
    manager = await start()
    batch = await submit(manager, input_of(5))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    await manager.stop()
    (tmp_path / "files" / batch.input_file_id).unlink()
    manager = await start()
    ready(manager)
    batch = await ended(manager, batch.id)
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.errors] == ["file_not_found"]


async def test_one_server_for_one_folder(tmp_path: Path) -> None:
    first = make_manager(tmp_path, InstantRunner(), url="http://first:1")
    await first.start()
    second = make_manager(tmp_path, InstantRunner())
    with pytest.raises(ConfigError, match=rf"process id {os.getpid()} at http://first:1"):
        await second.start()
    await first.stop()
    await second.start()
    await second.stop()


@pytest.mark.usefixtures("each_database")
async def test_other_owners_see_nothing(manager: JobManager) -> None:
    batch = await submit(manager, input_of(1))
    for attempt in (
        manager.files.get("other", batch.input_file_id),
        manager.files.delete("other", batch.input_file_id),
        manager.get_batch("other", batch.id),
        manager.cancel_batch("other", batch.id),
    ):
        with pytest.raises(NotFound):
            await attempt
    assert (await manager.list_batches("other", limit=10, after=None)).items == []


@pytest.mark.usefixtures("each_database")
async def test_limits_of_storage(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, InstantRunner())
    object.__setattr__(manager.config, "batch_max_storage_gib", 100 / GIB)
    object.__setattr__(manager.config, "batch_max_bytes", 60)
    await manager.start()
    with pytest.raises(TooLarge, match="limited to 60 bytes"):
        await store_input(manager, b"x" * 61)
    await store_input(manager, b"x" * 61, purpose="user_data")
    with pytest.raises(TooLarge, match="storage is full"):
        await store_input(manager, b"x" * 40)
    with pytest.raises(RequestError, match="has purpose 'user_data'; a batch needs 'batch'"):
        await create(manager, await store_input(manager, b"x", purpose="user_data"))
    await manager.stop()


async def test_expired_files_are_deleted_at_the_next_sweep(tmp_path: Path, start: Start) -> None:
    wall = [1_000_000.0]
    manager = await start(wall=lambda: wall[0])
    file_id = await store_input(manager, b"x")
    await manager.stop()
    (tmp_path / "files" / "file-left.part").write_bytes(b"an upload a crash cut")
    wall[0] += 31 * 24 * 3600
    manager = await start(wall=lambda: wall[0])
    await until(lambda: not list((tmp_path / "files").iterdir()))
    with pytest.raises(NotFound):
        await manager.files.get(OWNER, file_id)
