"""Files in an object store: a real S3 protocol to a local server, and fsspec's memory for what is ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from backfill.core.errors import ConfigError
from backfill.jobs import object_store
from backfill.jobs.errors import NotFound
from backfill.jobs.object_store import ObjectStore, open_file_store
from backfill.jobs.records import BatchStatus
from tests.jobs.doubles import (
    OWNER,
    InstantRunner,
    Start,
    check_accounts,
    check_completed,
    content_of,
    create,
    ended,
    hold_after,
    input_of,
    make_manager,
    ready,
    run_batch,
    store_input,
    submit,
)
from tests.jobs.test_shared_store import Fleet
from tests.patience import until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield
    server.stop()


@pytest.fixture
def bucket(s3: None, tmp_path: Path) -> str:
    """The URL of a place in a bucket of its own."""
    name = tmp_path.name.replace("_", "-").lower()[:50]
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/some/prefix"


@pytest.fixture
def memory(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/prefix"


async def test_servers_on_s3_share_files_and_go_on_with_each_others_batches(
    tmp_path: Path, bucket: str, database_url: str
) -> None:
    fleet = Fleet(tmp_path, database_url)
    fleet.options["batch_file_store"] = bucket
    runner = InstantRunner()
    first, second = await fleet.add(runner), await fleet.add(has_engine=False)
    content = input_of(60)
    batch = await submit(first, content)
    await hold_after(first, runner, batch, 6)
    await first.pause()
    ready(second)
    batch = await ended(second, batch.id)
    await check_completed(second, batch, 60)
    await check_completed(first, batch, 60)
    record = await second.files.get(OWNER, batch.input_file_id)
    download = await second.files.open(record)
    assert b"".join([chunk async for chunk in download.chunks(10, 200)]) == content[10:200]
    await second.files.delete(OWNER, record.id)
    with pytest.raises(NotFound, match="missing"):
        await first.files.open(record)
    left = fsspec.filesystem("s3", skip_instance_cache=True).find(bucket)
    assert sorted(path.rsplit("/", 1)[-1] for path in left) == sorted([str(batch.output_file_id), "store.id"])
    await fleet.stop()
    for folder in (tmp_path / "0", tmp_path / "1"):
        assert list((folder / "files").iterdir()) == [], "copies of inputs are deleted"


async def test_one_server_on_an_object_store_resumes_after_a_restart(
    tmp_path: Path, start: Start, memory: str
) -> None:
    limits = {"batch_file_store": memory}
    runner = InstantRunner()
    manager = await start(runner, limits=limits)
    ready(manager)
    batch = await submit(manager, input_of(60))
    await hold_after(manager, runner, batch, 6)
    await manager.stop()
    num_before = runner.runs.total()
    runner.release()
    manager = await start(runner, limits=limits)
    assert list((tmp_path / "files").iterdir()) == []
    ready(manager)
    await check_completed(manager, await ended(manager, batch.id), 60)
    assert runner.runs.total() <= 60 + 4, "at most what was in flight runs again"
    assert num_before >= 6
    expired = await run_batch(manager, input_of(20), window_s=0)
    assert expired.status is BatchStatus.EXPIRED
    await check_accounts(manager, expired, 20)


async def test_an_input_removed_from_the_bucket_fails_its_batch(start: Start, memory: str) -> None:
    manager = await start(limits={"batch_file_store": memory})
    file_id = await store_input(manager, input_of(5))
    fsspec.filesystem("memory").rm(f"{memory.removeprefix('memory:/')}/files/{file_id}")
    batch = await create(manager, file_id)
    batch = await ended(manager, batch.id)
    assert [error.code for error in batch.errors] == ["file_not_found"]


async def test_an_aborted_upload_leaves_nothing(tmp_path: Path, start: Start, memory: str) -> None:
    manager = await start(limits={"batch_file_store": memory})
    upload = await manager.files.begin_upload(OWNER)
    await upload.write(b"x" * 100)
    await upload.abort()
    kept = await store_input(manager, b"y" * 3_000_000)
    assert list((tmp_path / "files").iterdir()) == []
    store = ObjectStore(memory, tmp_path)
    assert store.num_bytes() == 3_000_000
    assert await content_of(manager, await manager.files.get(OWNER, kept)) == b"y" * 3_000_000
    assert store.garbage(time.time()) == [], "none is a day old"
    store.delete(kept)
    store.delete(kept)
    assert not store.holds_files()


async def test_objects_that_belong_to_nothing_are_deleted(
    tmp_path: Path, start: Start, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(limits={"batch_file_store": memory})
    kept = await store_input(first, input_of(3))
    await first.stop()
    # The store in memory does not say when. Only now: `first` would delete a file that it is about to record.
    monkeypatch.setattr(object_store, "GARBAGE_AGE_S", -60.0)
    store = ObjectStore(memory, tmp_path)
    store.commit("file-1", store.create("file-1"))  # of a server that died before it recorded it
    await start(limits={"batch_file_store": memory})
    await until(lambda: store.garbage(time.time()) == [kept])


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("ftp://host/folder", "a folder or s3://BUCKET/PREFIX, got 'ftp:"),
        ("s3://", "a folder or s3"),
        ("s3://no-such-bucket/prefix", "`batch_file_store` s3://no-such-bucket/prefix cannot be used"),
    ],
)
async def test_a_place_that_cannot_be_used(s3: None, tmp_path: Path, place: str, expected: str) -> None:
    manager = make_manager(tmp_path, InstantRunner(), limits={"batch_file_store": place})
    with pytest.raises(ConfigError, match=expected):
        await manager.start()


async def test_a_store_that_cannot_be_reached(
    tmp_path: Path, s3: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    manager = make_manager(tmp_path, InstantRunner(), limits={"batch_file_store": "s3://bucket/prefix"})
    with pytest.raises(ConfigError, match=r"s3://bucket/prefix (cannot be used|does not answer)"):
        await asyncio.wait_for(manager.start(), 30)


def test_places_are_folders_or_urls(tmp_path: Path) -> None:
    for place in (str(tmp_path), f"file://{tmp_path}"):
        store = open_file_store(place, tmp_path)
        assert not store.is_remote
        assert (store.path("x"), store.is_given) == (tmp_path / "files" / "x", True)
    assert not open_file_store(None, tmp_path).is_given
