"""A disk that hangs blocks only what needs it: neither the event loop nor a stop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backfill.core.config import GIB
from backfill.core.errors import ConfigError
from backfill.jobs import files as files_module
from backfill.jobs import manager as manager_module
from backfill.jobs.manager import JobManager
from backfill.jobs.records import BatchStatus
from tests.jobs.doubles import (
    OWNER,
    InstantRunner,
    Start,
    check_accounts,
    check_completed,
    content_of,
    ended,
    in_status,
    input_of,
    make_manager,
    ready,
    run_batch,
    started,
    store_input,
    submit,
)
from tests.patience import TIMEOUT_S, until

pytestmark = pytest.mark.anyio


class HangingDisk:
    """Calls of ``os`` that block from ``hang`` to ``release``, and fail where they would block the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._loop_thread = threading.get_ident()
        self._gate = threading.Event()
        self._hung = threading.Event()
        self.seen_on_loop: list[str] = []

    def hang(self, name: str, is_meant: Callable[..., bool] = lambda *_: True) -> None:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if not self._gate.is_set() and is_meant(*args):
                if threading.get_ident() == self._loop_thread:
                    self.seen_on_loop.append(name)
                    raise AssertionError(f"os.{name} on the event loop")
                self._hung.set()
                self._gate.wait(TIMEOUT_S)
            return real(*args, **options)

        self._monkeypatch.setattr(os, name, call)

    async def hangs(self) -> None:
        """Wait until a thread hangs. The event loop goes on."""
        await until(self._hung.is_set)
        for _ in range(20):
            await asyncio.sleep(0)

    def release(self) -> None:
        self._gate.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    hanging = HangingDisk(monkeypatch)
    yield hanging
    hanging.release()
    assert hanging.seen_on_loop == []


def is_blob(path: Any, *_: Any) -> bool:
    return "file-" in os.fspath(path) if isinstance(path, str | os.PathLike) else False


@pytest.mark.parametrize("name", ["fsync", "write", "open"])
async def test_results_that_wait_for_the_disk(disk: HangingDisk, name: str, start: Start) -> None:
    manager = await start()
    batch = await submit(manager, input_of(30))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    content = await store_input(manager, b"meanwhile")
    disk.hang(name)
    ready(manager)
    await disk.hangs()
    assert (await manager.get_batch(OWNER, batch.id)).request_counts.completed == 0
    record = await manager.files.get(OWNER, content)
    if name != "open":
        assert await content_of(manager, record) == b"meanwhile"
    disk.release()
    batch = await ended(manager, batch.id)
    await check_completed(manager, batch, 30)


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace", "statvfs"])
async def test_an_upload_that_waits_for_the_disk(disk: HangingDisk, name: str, start: Start) -> None:
    manager = await start(limits={"batch_min_free_gib": 1 / GIB})
    disk.hang(name)
    upload = asyncio.create_task(store_input(manager, b"x" * 3_000_000))
    await disk.hangs()
    assert not upload.done()
    assert (await manager.files.list(OWNER, purpose=None, order="asc", limit=9, after=None)).items == []
    disk.release()
    assert (await manager.files.get(OWNER, await upload)).num_bytes == 3_000_000


async def test_an_upload_aborted_on_a_hung_disk_leaves_nothing(
    tmp_path: Path, disk: HangingDisk, start: Start
) -> None:
    manager = await start()
    disk.hang("open", is_blob)
    upload = asyncio.create_task(manager.files.begin_upload(OWNER))
    await disk.hangs()
    upload.cancel()
    disk.release()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("name", ["stat", "unlink"])
async def test_the_end_of_a_batch_that_waits_for_the_disk(disk: HangingDisk, name: str, start: Start) -> None:
    manager = await start()
    batch = await submit(manager, input_of(3))
    disk.hang(name, is_blob)  # looks how long the results are; deletes the error file, which is empty
    ready(manager)
    await disk.hangs()
    batch = await manager.get_batch(OWNER, batch.id)
    assert (batch.status, batch.request_counts.completed) == (BatchStatus.FINALIZING, 3)
    disk.release()
    assert (await ended(manager, batch.id)).status is BatchStatus.COMPLETED


async def test_a_deletion_that_waits_for_the_disk(tmp_path: Path, disk: HangingDisk, start: Start) -> None:
    manager = await start()
    file_id = await store_input(manager, b"x")
    disk.hang("unlink", is_blob)
    deletion = asyncio.create_task(manager.files.delete(OWNER, file_id))
    await disk.hangs()
    other = await store_input(manager, b"y")
    assert (await manager.files.get(OWNER, other)).num_bytes == 1
    assert not deletion.done()
    disk.release()
    await deletion
    assert not (tmp_path / "files" / file_id).exists()


async def test_a_download_that_waits_for_the_disk(disk: HangingDisk, start: Start) -> None:
    manager = await start()
    record = await manager.files.get(OWNER, await store_input(manager, b"x" * 10))
    disk.hang("pread")
    downloads = [asyncio.create_task(content_of(manager, record)) for _ in range(50)]
    await disk.hangs()
    assert (await manager.files.get(OWNER, await store_input(manager, b"y"))).num_bytes == 1
    disk.release()
    assert set(await asyncio.gather(*downloads)) == {b"x" * 10}


async def test_a_sweep_that_waits_for_the_disk(
    tmp_path: Path, disk: HangingDisk, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setattr(files_module, "SWEEP_INTERVAL_S", 0.001)
    wall = [1_000_000.0]
    manager = await start(wall=lambda: wall[0])
    file_id = await store_input(manager, b"x")
    disk.hang("unlink", is_blob)
    wall[0] += 31 * 24 * 3600
    await disk.hangs()
    assert (await manager.files.get(OWNER, await store_input(manager, b"y"))).num_bytes == 1
    disk.release()
    await until(lambda: not (tmp_path / "files" / file_id).exists())


async def test_a_sweep_that_fails_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setattr(files_module, "SWEEP_INTERVAL_S", 0.001)
    wall = [1_000_000.0]
    manager = await start(wall=lambda: wall[0])
    real_delete = manager._storage.store.delete_expired_files
    errors_to_raise = [OSError("no disk"), ValueError("a bug")]

    def delete(now: int) -> list[str]:
        if errors_to_raise:
            raise errors_to_raise.pop()
        return real_delete(now)

    monkeypatch.setattr(manager._storage.store, "delete_expired_files", delete)
    file_id = await store_input(manager, b"x")
    wall[0] += 31 * 24 * 3600
    await until(lambda: not (tmp_path / "files" / file_id).exists())
    assert not errors_to_raise


async def test_one_file_that_cannot_be_deleted_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setattr(files_module, "SWEEP_INTERVAL_S", 0.001)
    wall = [1_000_000.0]
    real_unlink = os.unlink
    manager = await start(wall=lambda: wall[0])
    stuck, other = [await store_input(manager, b"x") for _ in range(2)]

    def unlink(path: Any, **options: Any) -> None:
        if os.fspath(path).endswith(stuck):
            raise PermissionError(1, "Operation not permitted")
        real_unlink(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    wall[0] += 31 * 24 * 3600
    await until(lambda: not (tmp_path / "files" / other).exists())
    assert (tmp_path / "files" / stuck).exists()


@pytest.mark.parametrize("name", ["fsync", "write"])
async def test_a_stop_does_not_wait_for_a_hung_disk(
    tmp_path: Path, disk: HangingDisk, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(manager_module, "STOP_TIMEOUT_S", 0.05)
    manager = await started(tmp_path)
    batch = await submit(manager, input_of(30))
    await in_status(manager, batch.id, BatchStatus.IN_PROGRESS)
    upload = await manager.files.begin_upload(OWNER)
    disk.hang(name)
    ready(manager)
    await disk.hangs()
    writing = asyncio.create_task(upload.write(b"x"))
    async with asyncio.timeout(TIMEOUT_S):
        await manager.stop()
        await asyncio.wait([writing])
    with pytest.raises(ConfigError, match="in use"):  # the write may still come through
        await make_manager(tmp_path, InstantRunner()).start()


_EVENTS = {"open", "sqlite3.connect"} | {
    f"os.{name}" for name in ("remove", "rename", "truncate", "scandir", "listdir", "mkdir", "chmod")
}
_on_audit: list[Callable[[str, tuple[Any, ...]], None]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _EVENTS is not None and event in _EVENTS:  # None while the interpreter ends
        for watch in _on_audit:
            watch(event, args)


sys.addaudithook(_audit)  # an audit hook cannot be removed


async def test_no_file_is_opened_or_deleted_on_the_event_loop(tmp_path: Path) -> None:
    seen: list[str] = []
    loop_thread = threading.get_ident()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == loop_thread and str(tmp_path) in str(args[0]):
            seen.append(f"{event} {args}")

    async def live(act: Callable[[JobManager], Awaitable[None]]) -> None:
        manager = await started(tmp_path)
        ready(manager)
        await act(manager)
        await manager.stop()

    async def run_batches(manager: JobManager) -> None:
        batch = await run_batch(manager, input_of(5))
        await check_accounts(manager, batch, 5)
        await manager.files.delete(OWNER, batch.input_file_id)
        await run_batch(manager, input_of(5), window_s=0)
        await run_batch(manager, b"{")
        await (await manager.files.begin_upload(OWNER)).abort()

    async def nothing(manager: JobManager) -> None: ...

    _on_audit.append(watch)
    try:
        await live(run_batches)
        await live(nothing)
    finally:
        _on_audit.remove(watch)
    assert seen == []
