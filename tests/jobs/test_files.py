"""Stored files: who may see, use and delete them, and for how long they are kept."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from backfill.core.config import GIB
from backfill.core.errors import ConfigError, RequestError
from backfill.jobs.errors import Conflict, NotFound, TooLarge
from backfill.jobs.manager import JobManager
from backfill.jobs.records import BatchStatus
from tests.api.servers import TIMEOUT_S
from tests.jobs.doubles import (
    OWNER,
    InstantRunner,
    Start,
    check_accounts,
    create,
    ended,
    in_status,
    input_of,
    make_manager,
    ready,
    store_input,
    submit,
)

pytestmark = pytest.mark.anyio


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
    async with asyncio.timeout(TIMEOUT_S):
        while list((tmp_path / "files").iterdir()):
            await asyncio.sleep(0.01)
    with pytest.raises(NotFound):
        await manager.files.get(OWNER, file_id)
